"""Order, failure, interruption and resumption of launches, with a fake in place of torchrun."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from dcpbench.campaign import set_aside, walk
from dcpbench.errors import DcpbenchError, ExitCode, Interrupted, LaunchError, LaunchTimeout, RecordsError
from dcpbench.launch import LaunchOutcome, Status
from dcpbench.launching.interrupts import Interrupts
from dcpbench.plan import Launch, build
from dcpbench.records import IterationRecord, RunEnd, to_json
from dcpbench.runfolder import ledger
from dcpbench.spec import Spec

ITERATIONS = 2


class Fake:
    """Makes launches in no time: writes the records, ends as told."""

    def __init__(self, ends: dict[str, tuple[Status, int | None]] | None = None, signal_in: str = "") -> None:
        self.ends = ends or {}
        self.signal_in = signal_in
        self.calls: list[str] = []

    def rest(self, seconds: float) -> None:
        self.calls.append(f"rest {seconds:g}")

    def run(self, launch: Launch) -> LaunchOutcome:
        self.calls.append(launch.id)
        assert json.loads(launch.file.read_text())["id"] == launch.id
        status, code = self.ends.get(launch.id, ("completed", 0))
        if launch.id == self.signal_in:
            os.kill(os.getpid(), signal.SIGINT)
            status, code = "interrupted", None
        lines = [to_json(IterationRecord(iteration=i, loss=1.0, seconds=1.0)) for i in range(1, ITERATIONS + 1)]
        if status == "completed":
            lines.append(to_json(RunEnd(iterations=ITERATIONS, seconds=2.0)))
        launch.records.write_text("\n".join(lines) + "\n")
        return LaunchOutcome(launch.id, status, code, None if status == "completed" else "said why", 2.0, ITERATIONS)


class Silent:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def planned(self, launches: list[Launch]) -> None: ...

    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def started(self, launch: Launch) -> None: ...

    def recorded(self, launch: Launch, record: IterationRecord) -> None: ...

    def ended(self, launch: Launch, outcome: LaunchOutcome) -> None: ...


def plan(folder: Path, **launches: object) -> list[Launch]:
    spec = Spec.model_validate(
        {"training": {"iterations": ITERATIONS, "warmup_iterations": 0}, "launches": {"pairs": 2, **launches}}
    )
    return build(spec, folder)


def go(launches: list[Launch], fake: Fake, listener: Silent | None = None) -> list[LaunchOutcome]:
    with Interrupts() as interrupts:
        return walk(
            launches,
            ledger_file=launches[0].folder.parents[1] / "ledger.jsonl",
            executor=fake,
            listener=listener or Silent(),
            interrupts=interrupts,
        )


def entries(folder: Path) -> list[tuple[str, str, str | None]]:
    return [(entry.event, entry.launch, entry.status) for entry in ledger.read(folder / "ledger.jsonl")]


def test_launches_run_in_plan_order_and_the_ledger_says_so(tmp_path: Path) -> None:
    fake = Fake()
    outcomes = go(plan(tmp_path), fake)
    order = ["01-baseline", "01-dcp", "02-dcp", "02-baseline"]
    assert fake.calls == order
    assert [outcome.launch for outcome in outcomes] == order
    assert entries(tmp_path) == [e for name in order for e in (("start", name, None), ("end", name, "completed"))]


def test_cooldown_before_every_launch(tmp_path: Path) -> None:
    fake = Fake()
    go(plan(tmp_path, cooldown=5.0, pairs=1), fake)
    assert fake.calls == ["rest 5", "01-baseline", "rest 5", "01-dcp"]


def test_a42_first_failure_stops_and_names_the_case(tmp_path: Path) -> None:
    fake = Fake({"01-baseline": ("failed", 7)})
    with pytest.raises(LaunchError) as caught:
        go(plan(tmp_path), fake)
    assert fake.calls == ["01-baseline"]
    assert caught.value.exit_code == ExitCode.LAUNCH_FAILED
    for part in ("01-baseline said why", "not launched: 01-dcp, 02-dcp, 02-baseline", "--resume"):
        assert part in str(caught.value)
    assert entries(tmp_path)[-1] == ("end", "01-baseline", "failed")


def test_a42_keep_going_reports_both_states_and_still_fails(tmp_path: Path) -> None:
    fake = Fake({"01-baseline": ("failed", 7)})
    with pytest.raises(LaunchError) as caught:
        go(plan(tmp_path, pairs=1, keep_going=True), fake)
    assert fake.calls == ["01-baseline", "01-dcp"]
    assert "01-baseline said why; 01-dcp completed" in str(caught.value)


@pytest.mark.parametrize(
    ("end", "kind", "code"),
    [
        (("failed", 1), LaunchError, 4),
        (("failed", 0), RecordsError, 5),
        (("timeout", None), LaunchTimeout, 124),
    ],
)
def test_exit_codes(tmp_path: Path, end: tuple[Status, int | None], kind: type[DcpbenchError], code: int) -> None:
    with pytest.raises(kind) as caught:
        go(plan(tmp_path), Fake({"01-baseline": end}))
    assert caught.value.exit_code == code


@pytest.mark.parametrize("keep_going", [True, False])
def test_a40_second_case_is_not_launched_after_an_interrupt(tmp_path: Path, keep_going: bool) -> None:
    fake = Fake(signal_in="01-baseline")
    with pytest.raises(Interrupted, match="SIGINT") as caught:
        go(plan(tmp_path, keep_going=keep_going), fake)
    assert fake.calls == ["01-baseline"]
    assert caught.value.exit_code == 130
    assert entries(tmp_path)[-1] == ("end", "01-baseline", "interrupted")
    assert (tmp_path / "launches" / "01-baseline" / "records.jsonl").exists()


def test_signal_between_launches(tmp_path: Path) -> None:
    class Signalling(Fake):
        def rest(self, seconds: float) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    fake = Signalling()
    with pytest.raises(Interrupted, match="SIGTERM"):
        go(plan(tmp_path, cooldown=1.0), fake)
    assert fake.calls == []


def test_resume_passes_over_what_is_complete_and_moves_the_rest_aside(tmp_path: Path) -> None:
    launches = plan(tmp_path)
    with pytest.raises(LaunchError):
        go(launches, Fake({"01-dcp": ("failed", 1)}))
    listener, fake = Silent(), Fake()
    outcomes = go(launches, fake, listener)
    assert fake.calls == ["01-dcp", "02-dcp", "02-baseline"]
    assert listener.notes == ["01-baseline is complete already"]
    assert [outcome.status for outcome in outcomes] == ["completed"] * 4
    names = {path.name for path in (tmp_path / "launches").iterdir()}
    assert "01-dcp.failed-1" in names
    assert len((tmp_path / "launches" / "01-dcp.failed-1" / "records.jsonl").read_text().splitlines()) == ITERATIONS
    untouched = Fake()
    go(launches, untouched)
    assert untouched.calls == []


def test_records_overrule_a_ledger_that_says_complete(tmp_path: Path) -> None:
    launches = plan(tmp_path, pairs=1)
    go(launches, Fake())
    lines = launches[0].records.read_text().splitlines()
    launches[0].records.write_text("\n".join(lines[:-1]) + "\n")
    fake = Fake()
    go(launches, fake)
    assert fake.calls == ["01-baseline"]


def test_a_launch_cut_off_without_an_end_is_made_again(tmp_path: Path) -> None:
    """dcpbench itself was killed: the ledger has a start and, torn in the middle, no end."""
    launches = plan(tmp_path, pairs=1)
    go(launches, Fake())
    file = tmp_path / "ledger.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    fake = Fake()
    go(launches, fake)
    assert fake.calls == ["01-dcp"]
    assert entries(tmp_path) == [
        ("start", "01-baseline", None),
        ("end", "01-baseline", "completed"),
        ("start", "01-dcp", None),
        ("start", "01-dcp", None),
        ("end", "01-dcp", "completed"),
    ]


def test_a49_attempts_are_numbered_never_overwritten(tmp_path: Path) -> None:
    for text in ("one", "two"):
        (tmp_path / "01-dcp").mkdir()
        (tmp_path / "01-dcp" / "stdout.log").write_text(text)
        set_aside(tmp_path / "01-dcp")
    assert (tmp_path / "01-dcp.failed-1" / "stdout.log").read_text() == "one"
    assert (tmp_path / "01-dcp.failed-2" / "stdout.log").read_text() == "two"
    assert set_aside(tmp_path / "01-dcp") is None


def test_ledger_reason_is_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "planted-secret-value")
    ledger.append(tmp_path / "l", "end", "x", status="failed", exit_code=1, reason="bad planted-secret-value")
    (entry,) = ledger.read(tmp_path / "l")
    assert entry.reason == "bad [redacted]"
    assert entry.time.endswith("+00:00")
