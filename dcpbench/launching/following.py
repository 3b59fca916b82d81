"""The records of a launch while it runs, and whether it is complete: one way of reading for each runner.

The built-in worker writes `records.jsonl` with an end mark. Megatron-LM prints to its console only,
so its records are read from the launch's log, and a launch is complete when every iteration is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from dcpbench.plan import Launch
from dcpbench.records import GrowingFile, IterationRecord, RunEnd, RunHeader, from_json

if TYPE_CHECKING:
    from dcpbench.table import Value


class Follower(Protocol):
    """Reads what a launch has recorded since it was last asked."""

    marks_its_end: bool
    """Whether a complete launch says so."""

    def read(self) -> Iterator[IterationRecord | RunEnd]:
        """The new records, in order."""


def follow(launch: Launch) -> Follower:
    """The follower for a launch's runner."""
    return _FOLLOWERS[launch.spec.runner](launch)


def complete(launch: Launch) -> tuple[int, float] | None:
    """(iterations, seconds) of a launch that recorded all it should; None for one that did not."""
    follower = follow(launch)
    seconds: dict[int, float] = {}
    end: RunEnd | None = None
    for record in follower.read():
        if isinstance(record, RunEnd):
            end = record
        else:
            seconds[record.iteration] = record.seconds or 0.0
    if len(seconds) < launch.spec.training.iterations or (follower.marks_its_end and end is None):
        return None
    return len(seconds), sum(seconds.values()) if end is None else end.seconds


class _RecordsFile:
    """`records.jsonl` of the built-in worker."""

    marks_its_end = True

    def __init__(self, launch: Launch) -> None:
        self._lines = GrowingFile(launch.records)

    def read(self) -> Iterator[IterationRecord | RunEnd]:
        for line in self._lines.read():
            try:
                record = from_json(line.decode("utf-8", "replace"))
            except ValueError:
                continue  # analysis names the lines that are no records
            if not isinstance(record, RunHeader):
                yield record


class _MegatronLog:
    """The console log of Megatron-LM."""

    marks_its_end = False

    def __init__(self, launch: Launch) -> None:
        from dcpbench.parse.lines import stretches  # noqa: PLC0415 - numpy, which a dry run does without
        from dcpbench.parse.megatron import LogReader  # noqa: PLC0415

        self._lines = GrowingFile(launch.log)
        self._reader = LogReader()
        self._stretches = stretches
        self._number = 0

    def read(self) -> Iterator[IterationRecord | RunEnd]:
        for line in self._lines.read():
            self._number += 1
            for number, text in self._stretches(self._number, line.decode("latin-1")):
                for row, problems in self._reader.read(number, text):
                    yield _record(dict(zip(self._reader.names, row, strict=True)), problems)


def _record(row: dict[str, Value], problems: tuple[str, ...]) -> IterationRecord:
    loss, milliseconds = float(row["loss"]), float(row["seconds"])
    return IterationRecord(
        iteration=int(row["iteration"]),
        loss=loss if math.isfinite(loss) else None,
        seconds=milliseconds / 1e3 if milliseconds > 0 else None,
        consumed_samples=int(row["consumed_samples"]),
        skipped=int(row["skipped"]) > 0,
        problems=problems,
    )


_FOLLOWERS: dict[str, Callable[[Launch], Follower]] = {"builtin": _RecordsFile, "megatron_lm": _MegatronLog}
