"""The slowest measured iteration of each case, as a picture needs it: which ranks worked on what, and about when.

Records hold the plan of an iteration and its time, not the time of each microbatch. So the lengths of microbatches
are their shares of the model's FLOPs (padded tokens, squared lengths), run through in the plan's order, each when
all its ranks are free, and scaled so that the last one ends when the iteration ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dcpbench import records
from dcpbench.align import Aligned
from dcpbench.records import IterationRecord, RunHeader
from dcpbench.runfolder.layout import RunFolder
from dcpbench.spec import CASES

_NUMBERS = 4


@dataclass(frozen=True)
class Microbatch:
    """Ranks [first_rank, first_rank + ranks), and from when to when they work: seconds from the iteration's start."""

    first_rank: int
    ranks: int
    start: float
    end: float


@dataclass(frozen=True)
class SlowestIteration:
    """One iteration of one launch; `seconds` is its measured time."""

    case: str
    launch: str
    iteration: int
    seconds: float
    ranks: int
    microbatches: tuple[Microbatch, ...]


def read(folder: Path, aligned: Aligned, warmup: int) -> tuple[SlowestIteration, ...]:
    """The slowest measured iteration of each case, baseline first; none where a record does not hold its plan.

    Args:
        folder: the run folder.
        aligned: its launches on one grid of iterations.
        warmup: first iterations that are not looked at.
    """
    found = tuple(_slowest(folder, aligned, warmup))
    return found if len(found) == len(CASES) else ()


def _slowest(folder: Path, aligned: Aligned, warmup: int) -> Iterator[SlowestIteration]:
    for case in CASES:
        seconds = aligned.of_case(case, "seconds", warmup)
        assert seconds is not None, "alignment refuses records without times"
        row, column = np.unravel_index(int(np.argmax(seconds)), seconds.shape)
        launch = [launch for launch in aligned.launches if launch.case == case][row]
        iteration = warmup + 1 + int(column)
        record = _record(RunFolder(folder).launch(launch.folder_name) / "records.jsonl", iteration, case)
        header = launch.table.header
        if record is None or not record.jobs or header is None:
            continue
        whole = float(seconds[row, column])
        placed = tuple(_placed(record.jobs, header, whole))
        yield SlowestIteration(case, launch.id, iteration, whole, header.world_size, placed)


def _record(path: Path, iteration: int, case: str) -> IterationRecord | None:
    """The record of an iteration; where records name a case, that of this one."""
    needle = f'"iteration":{iteration},'
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                record = _parsed(line) if needle in line else None
                if record is not None and record.iteration == iteration and record.case in (None, case):
                    return record
    except OSError:
        pass
    return None


def _parsed(line: str) -> IterationRecord | None:
    try:
        record = records.from_json(line)
    except ValueError:
        return None
    return record if isinstance(record, IterationRecord) else None


def _placed(jobs: Sequence[int], header: RunHeader, seconds: float) -> Iterator[Microbatch]:
    """The microbatches of `IterationRecord.jobs`, the last of which ends after `seconds`."""
    per_token, per_square = header.flops_per_token or 1.0, header.flops_per_squared_length or 0.0
    free = [0.0] * header.world_size
    placed: list[tuple[int, int, float, float]] = []
    for place in range(0, len(jobs) - _NUMBERS + 1, _NUMBERS):
        first, size, tokens, squares = jobs[place : place + _NUMBERS]
        if size < 1 or first < 0 or first + size > header.world_size:
            return
        start = max(free[first : first + size])
        end = start + (per_token * tokens + per_square * squares) / size
        free[first : first + size] = [end] * size
        placed.append((first, size, start, end))
    whole = max(free)
    for first, size, start, end in placed:
        yield Microbatch(first, size, seconds * start / whole, seconds * end / whole)
