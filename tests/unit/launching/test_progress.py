"""Plain progress lines, and the live display on a terminal that is only in memory."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from dcpbench.launch import LaunchOutcome
from dcpbench.launching import progress
from dcpbench.launching.progress import LiveProgress, PlainProgress
from dcpbench.plan import Launch, build
from dcpbench.records import IterationRecord
from dcpbench.spec import Spec


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plan(folder: Path, iterations: int = 4, warmup: int = 1) -> list[Launch]:
    training = {"iterations": iterations, "warmup_iterations": warmup}
    spec = Spec.model_validate({"training": training, "launches": {"pairs": 1}})
    return build(spec, folder)


def record(iteration: int, seconds: float = 0.5) -> IterationRecord:
    return IterationRecord(iteration=iteration, loss=6.25, tokens=1000, seconds=seconds)


def done(launch: Launch) -> LaunchOutcome:
    return LaunchOutcome(launch.id, "completed", 0, None, 75.0, 4)


def tell(display: PlainProgress | LiveProgress, launches: list[Launch]) -> None:
    display.planned(launches)
    display.phase("preparing data [1/2]")
    display.note("caution: few cores")
    display.started(launches[0])
    for i in range(1, 5):
        display.recorded(launches[0], record(i, 9.0 if i == 1 else 0.5))
    display.ended(launches[0], done(launches[0]))
    failed = LaunchOutcome(launches[1].id, "failed", 7, "failed after iteration 0 of 4: code 7", 3.0, 0)
    display.started(launches[1])
    display.ended(launches[1], failed)


def test_one_plain_line_per_event(tmp_path: Path) -> None:
    stream = io.StringIO()
    tell(PlainProgress(stream), plan(tmp_path))
    assert stream.getvalue().splitlines() == [
        "dcpbench: preparing data [1/2]",
        "dcpbench: caution: few cores",
        "dcpbench: pair 1/1 baseline: started, 4 ranks",
        "dcpbench: pair 1/1 baseline: iteration 1/4, 111 tokens/s, loss 6.2500, 1:03 left",
        "dcpbench: pair 1/1 baseline: iteration 2/4, 2,000 tokens/s, loss 6.2500, 3 s left",
        "dcpbench: pair 1/1 baseline: iteration 3/4, 2,000 tokens/s, loss 6.2500, 2 s left",
        "dcpbench: pair 1/1 baseline: iteration 4/4, 2,000 tokens/s, loss 6.2500, 2 s left",
        "dcpbench: pair 1/1 baseline: completed, 4 iterations in 1:15",
        "dcpbench: pair 1/1 dcp: started, 4 ranks",
        "dcpbench: pair 1/1 dcp: failed after 3 s; it failed after iteration 0 of 4: code 7",
    ]


def test_keep_alive_line_only_after_silence() -> None:
    stream, clock = io.StringIO(), Clock()
    display = PlainProgress(stream, clock)
    display.phase("preparing data")
    display.note("caution: few cores")
    clock.now += 29
    assert not display.alive()
    clock.now += 2
    assert display.alive()
    assert not display.alive()
    assert stream.getvalue().splitlines()[-1] == "dcpbench: still working after 31 s: preparing data"


def test_long_launches_do_not_flood_the_log(tmp_path: Path) -> None:
    stream = io.StringIO()
    display = PlainProgress(stream)
    launches = plan(tmp_path, iterations=10_000)
    display.planned(launches)
    for i in range(1, 10_001):
        display.recorded(launches[0], record(i))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 201
    assert "iteration 1/" in lines[0]
    assert "iteration 10000/" in lines[-1]


def test_missing_figures_are_left_out(tmp_path: Path) -> None:
    stream = io.StringIO()
    launches = plan(tmp_path)
    PlainProgress(stream).recorded(launches[0], IterationRecord(iteration=1))
    assert stream.getvalue() == "dcpbench: pair 1/1 baseline: iteration 1/4, loss missing\n"


def test_live_display_shows_pair_case_iteration_speed_loss_and_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    with progress.on(stream) as display:
        assert isinstance(display, LiveProgress)
        tell(display, plan(tmp_path))
        display.started(plan(tmp_path)[0])
        display.recorded(plan(tmp_path)[0], record(2))
    shown = stream.getvalue()
    for part in ("pair 1/1 baseline", "2/4", "2,000 tokens/s", "loss 6.2500", "left", "preparing data [1/2]", "code 7"):
        assert part in shown
    assert "\x1b[3" in shown  # colours


def test_no_color_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with progress.on(stream) as display:
        tell(display, plan(tmp_path))
    assert "\x1b[3" not in stream.getvalue()
    assert "pair 1/1 baseline" in stream.getvalue()


@pytest.mark.parametrize(("terminal", "term"), [(False, "xterm"), (True, "dumb")])
def test_plain_without_a_capable_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    assert isinstance(progress.on(Terminal() if terminal else io.StringIO()), PlainProgress)


def test_the_keep_alive_thread_ends_with_the_display() -> None:
    with PlainProgress(io.StringIO()) as display:
        thread = display._thread
        assert thread is not None
        assert thread.is_alive()
    assert not thread.is_alive()
