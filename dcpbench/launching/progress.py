"""Progress on stderr: a live display on a terminal, one plain line per event elsewhere.

Both classes are a `launch.Listener`, and a context with which the display begins and ends.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from dcpbench.plan import Launch
from dcpbench.records import IterationRecord

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from dcpbench.launch import LaunchOutcome

_KEEP_ALIVE = 30.0
"""Seconds of silence after which a plain line says that the work goes on."""
_LINES = 200
"""Iterations of a launch that plain progress reports at most, evenly spaced."""


def on(stream: TextIO | None = None) -> PlainProgress | LiveProgress:
    """The display that suits the stream (default: stderr)."""
    stream = stream or sys.stderr
    if not stream.isatty():
        return PlainProgress(stream)
    from rich.console import Console  # noqa: PLC0415 - a redirected run does without

    console = Console(file=stream)
    return PlainProgress(stream) if console.is_dumb_terminal else LiveProgress(stream)


class _Course:
    """How far the run is, and how long the rest will take at the pace so far."""

    def __init__(self) -> None:
        self.pairs = 1
        self._remaining: dict[str, int] = {}
        self._cold: float | None = None
        self._seconds = 0.0
        self._count = 0.0

    def planned(self, launches: list[Launch]) -> None:
        self.pairs = max((launch.pair for launch in launches), default=1)
        self._remaining = {launch.id: launch.spec.training.iterations for launch in launches}

    def name(self, launch: Launch) -> str:
        """What a launch is called; a control is in no pair."""
        return f"pair {launch.pair}/{self.pairs} {launch.case}" if launch.pair else launch.id

    def recorded(self, launch: Launch, record: IterationRecord) -> None:
        self._remaining[launch.id] = launch.spec.training.iterations - record.iteration
        if record.iteration <= launch.spec.training.warmup_iterations:
            self._cold = record.seconds
        elif record.seconds is not None:
            # In lockstep an iteration has two records, and takes the time of both.
            share = 0.5 if record.case else 1.0
            self._seconds, self._count = self._seconds + record.seconds, self._count + share

    def ended(self, launch: Launch) -> None:
        self._remaining[launch.id] = 0

    def seconds_left(self) -> float | None:
        # Warm-up iterations are no measure of the rest, but before the first other one they are all there is.
        pace = self._seconds / self._count if self._count else self._cold
        return None if pace is None else sum(self._remaining.values()) * pace


class PlainProgress:
    """One line per event; a keep-alive line where nothing else was written for a while.

    Args:
        stream: where the lines go.
        clock: seconds on a monotonic clock.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._began = self._last = clock()
        self._doing = "starting"
        self._course = _Course()
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PlainProgress:
        self._thread = threading.Thread(target=self._keep_alive, name="keep-alive", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.set()
        if self._thread is not None:
            self._thread.join()

    def planned(self, launches: list[Launch]) -> None:
        """See `launch.Listener`."""
        self._course.planned(launches)

    def phase(self, text: str) -> None:
        """See `launch.Listener`."""
        self._doing = text
        self._line(text)

    def note(self, text: str) -> None:
        """See `launch.Listener`."""
        self._line(text)

    def started(self, launch: Launch) -> None:
        """See `launch.Listener`."""
        self._doing = f"{self._name(launch)}: starting"
        self._line(f"{self._name(launch)}: started, {launch.spec.topology.world_size} ranks")

    def recorded(self, launch: Launch, record: IterationRecord) -> None:
        """See `launch.Listener`."""
        self._course.recorded(launch, record)
        total = launch.spec.training.iterations
        self._doing = f"{self._name(launch)}: iteration {record.iteration}/{total}"
        every = -(-total // _LINES)
        if record.iteration % every == 0 or record.iteration in {1, total}:
            self._line(", ".join([self._doing, *_figures(record), *_left(self._course.seconds_left())]))

    def ended(self, launch: Launch, outcome: LaunchOutcome) -> None:
        """See `launch.Listener`."""
        self._course.ended(launch)
        self._line(f"{self._name(launch)}: {_outcome(outcome)}")
        self._doing = "between launches"

    def alive(self) -> bool:
        """Write the keep-alive line if nothing was written lately; true when it was."""
        if self._clock() - self._last < _KEEP_ALIVE:
            return False
        self._line(f"still working after {_duration(self._clock() - self._began)}: {self._doing}")
        return True

    def _keep_alive(self) -> None:
        while not self._finished.wait(1.0):
            self.alive()

    def _name(self, launch: Launch) -> str:
        return self._course.name(launch)

    def _line(self, text: str) -> None:
        with self._lock:
            self._last = self._clock()
            print(f"dcpbench: {text}", file=self._stream, flush=True)


class LiveProgress:
    """A bar for the launch that runs, with tokens/s, loss and time left; a line for each that has ended."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console  # noqa: PLC0415 - only a terminal needs rich
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn  # noqa: PLC0415

        self._course = _Course()
        self._bars: RichProgress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._bars.add_task("starting", total=None, figures="")

    def _show(self, description: str, total: int | None, figures: str = "") -> None:
        # A new task each time: rich takes no total away from one that had it.
        self._bars.remove_task(self._task)
        self._task = self._bars.add_task(description, total=total, figures=figures)

    def __enter__(self) -> LiveProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def planned(self, launches: list[Launch]) -> None:
        """See `launch.Listener`."""
        self._course.planned(launches)

    def phase(self, text: str) -> None:
        """See `launch.Listener`."""
        self.note(text)
        self._show(text, None)

    def note(self, text: str) -> None:
        """See `launch.Listener`."""
        self._bars.console.print(text, markup=False, highlight=False)

    def started(self, launch: Launch) -> None:
        """See `launch.Listener`."""
        self._show(self._name(launch), launch.spec.training.iterations, "starting")

    def recorded(self, launch: Launch, record: IterationRecord) -> None:
        """See `launch.Listener`."""
        self._course.recorded(launch, record)
        count = f"{record.iteration}/{launch.spec.training.iterations}"
        figures = ", ".join([count, *_figures(record), *_left(self._course.seconds_left())])
        self._bars.update(self._task, completed=record.iteration, figures=figures)

    def ended(self, launch: Launch, outcome: LaunchOutcome) -> None:
        """See `launch.Listener`."""
        self._course.ended(launch)
        self.note(f"{self._name(launch)}: {_outcome(outcome)}")
        self._show("between launches", None)

    def _name(self, launch: Launch) -> str:
        return self._course.name(launch)


def _figures(record: IterationRecord) -> list[str]:
    figures = [record.case] if record.case else []
    if record.tokens is not None and record.seconds:
        figures.append(f"{record.tokens / record.seconds:,.0f} tokens/s")
    figures.append("loss missing" if record.loss is None else f"loss {record.loss:.4f}")
    return figures


def _left(seconds: float | None) -> list[str]:
    return [] if seconds is None else [f"{_duration(seconds)} left"]


def _outcome(outcome: LaunchOutcome) -> str:
    if outcome.reason is None:
        return f"{outcome.status}, {outcome.iterations} iterations in {_duration(outcome.seconds)}"
    return f"{outcome.status} after {_duration(outcome.seconds)}; it {outcome.reason}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
