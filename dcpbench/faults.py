"""What is wrong with the records of one launch, taken by itself: every fault, not the first.

A fault is no exception: it is a result, listed in the reports, and it fails the run (exit 5)
whatever the tolerances are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dcpbench.plan import CaseName
from dcpbench.table import ABSENT, LaunchTable

FaultKind = Literal["missing", "duplicate", "skipped", "non_finite", "misaligned", "malformed", "launch_failed"]

LISTED = 1000
"""Faults of one kind in one launch that are listed singly; one more counts the rest."""

_NUMBERS = {
    "loss": ("loss", ("loss",)),
    "seconds": ("iteration time", ("seconds", "time")),
    "grad_norm": ("grad norm", ("grad norm", "grad_norm")),
}
"""Column -> its noun, and words by which a parser's own remark on it is known."""


@dataclass(frozen=True)
class Fault:
    """One reason why records cannot be compared; `iteration` is None when it concerns the whole launch."""

    case: str
    launch: str
    iteration: int | None
    kind: FaultKind
    message: str


@dataclass(frozen=True)
class LaunchInput:
    """One launch as alignment takes it. `position` is its place in time among all launches, where known."""

    id: str
    case: CaseName
    pair: int
    position: int | None
    table: LaunchTable
    failure: str | None = None
    """Why the launch failed, if it did."""
    folder: str | None = None
    """The launch's folder where that has another name than `id`: in lockstep both cases are of one launch."""

    @property
    def folder_name(self) -> str:
        """The name of the launch's folder."""
        return self.folder or self.id


def shortened(launch: LaunchInput, faults: Iterator[Fault]) -> list[Fault]:
    """The faults, with those of one kind beyond `LISTED` counted in one."""
    kept: list[Fault] = []
    counts: dict[FaultKind, int] = {}
    for fault in faults:
        counts[fault.kind] = counts.get(fault.kind, 0) + 1
        if counts[fault.kind] <= LISTED:
            kept.append(fault)
    for kind, count in counts.items():
        if count > LISTED:
            kept.append(fault_of(launch, None, kind, f"and {count - LISTED} more {kind} iterations in this launch"))
    return kept


def fault_of(launch: LaunchInput, iteration: int | None, kind: FaultKind, message: str) -> Fault:
    """A fault of this launch."""
    return Fault(launch.case, launch.id, iteration, kind, message)


def first_rows(table: LaunchTable, expected: int) -> NDArray[np.int64]:
    """For iterations 1 to `expected`, the row that first records each; -1 where none does."""
    grid = np.full(expected, -1, dtype=np.int64)
    iteration = table.columns["iteration"]
    rows = np.flatnonzero((iteration >= 1) & (iteration <= expected))[::-1]
    # Assigned from the back, so that the first record of an iteration is the one that stays.
    grid[iteration[rows] - 1] = rows
    return grid


def integrity_faults(launch: LaunchInput, grid: NDArray[np.int64], global_batch_size: int | None) -> Iterator[Fault]:
    """Every fault of a launch by itself. `grid` is its `first_rows`."""
    expected = len(grid)
    yield from _launch_faults(launch, expected)
    yield from _record_faults(launch, grid, expected)
    yield from _consumption_faults(launch, grid, global_batch_size)


def _launch_faults(launch: LaunchInput, expected: int) -> Iterator[Fault]:
    """What is wrong with the launch as a whole, and lines that were no records."""
    table = launch.table
    if launch.failure is not None:
        yield fault_of(launch, None, "launch_failed", launch.failure)
    for bad in table.malformed:
        yield fault_of(launch, bad.iteration, "malformed", f"{table.source}, line {bad.line}: {bad.message}")
    if launch.failure is not None:
        return
    if not table.rows:
        yield fault_of(launch, None, "missing", table.hint or f"no records in {table.source}")
        return
    if table.format == "jsonl" and table.header is None:
        yield fault_of(launch, None, "missing", f"{table.source} has no launch header")
    totals = set(np.unique(table.columns["total"]).tolist()) - {ABSENT}
    totals |= {table.header.iterations} if table.header else set()
    for total in sorted(totals - {expected}):
        yield fault_of(launch, None, "misaligned", f"the launch announces {total} iterations; {expected} are expected")
    if table.ends_are_marked and table.end is None:
        yield fault_of(launch, None, "missing", f"{table.source} has no end mark; the launch did not complete")


def _record_faults(launch: LaunchInput, grid: NDArray[np.int64], expected: int) -> Iterator[Fault]:
    """Iterations of one launch that are missing, repeated, out of place, skipped or not finite."""
    table = launch.table
    if not table.rows:
        return
    iteration = table.columns["iteration"]
    found = int((grid >= 0).sum())
    torn = {bad.iteration for bad in table.malformed}
    last = int(iteration.max())
    for missing in np.flatnonzero(grid < 0) + 1:
        # A failed launch ends where it failed; that is said once, by the failure.
        if int(missing) not in torn and (launch.failure is None or missing < last):
            yield fault_of(launch, int(missing), "missing", f"no record of this iteration: {found} of {expected}")
    values, starts, counts = np.unique(np.sort(iteration), return_index=True, return_counts=True)
    by_iteration = np.argsort(iteration, kind="stable")
    for group in np.flatnonzero(counts > 1).tolist():
        rows = by_iteration[starts[group] : starts[group] + min(counts[group], 5)]
        lines = ", ".join(map(str, table.columns["line"][rows]))
        yield fault_of(launch, int(values[group]), "duplicate", f"recorded {counts[group]} times (lines {lines})")
    for extra in values[(values < 1) | (values > expected)].tolist():
        yield fault_of(launch, extra, "misaligned", f"not expected: the launch has iterations 1 to {expected}")
    highest = np.maximum.accumulate(iteration)
    late = np.isin(iteration, values[counts == 1]) & (iteration < highest)
    for row in np.flatnonzero(late).tolist():
        yield fault_of(launch, int(iteration[row]), "misaligned", f"recorded after iteration {highest[row]}")
    yield from _number_faults(launch)


def _number_faults(launch: LaunchInput) -> Iterator[Fault]:
    """Steps that were skipped, and numbers that are not there or not finite, in any record."""
    table = launch.table
    columns = table.columns
    problems = table.problems or {}
    skipped = (columns["skipped"] > 0) | (columns["skipped_samples"] > 0)
    bad = ~np.isfinite(columns["loss"]) | ~(columns["seconds"] > 0) | ~np.isfinite(columns["seconds"])
    bad |= np.isinf(columns["grad_norm"])
    bad[list(problems)] = True
    for row in np.flatnonzero(skipped | bad).tolist():
        iteration = int(columns["iteration"][row])
        if skipped[row]:
            samples = int(columns["skipped_samples"][row])
            what = f"{samples} samples had been skipped" if samples > 0 else "the optimizer step was skipped"
            yield fault_of(launch, iteration, "skipped", what)
            continue
        remarks = problems.get(row, ())
        reasons: list[str] = []
        for name, (noun, words) in _NUMBERS.items():
            value = float(columns[name][row])
            if any(word in remark for remark in remarks for word in words):
                continue
            if np.isnan(value) and name != "grad_norm":
                reasons.append(f"{noun} missing")
            elif np.isinf(value):
                reasons.append(f"{noun} is {value}")
            elif name == "seconds" and value <= 0:
                reasons.append(f"iteration time is {value} s")
        reasons += remarks
        yield fault_of(launch, iteration, "non_finite", "; ".join(reasons))


def _consumption_faults(launch: LaunchInput, grid: NDArray[np.int64], global_batch_size: int | None) -> Iterator[Fault]:
    """Iterations whose running totals do not rise by what the iteration itself consumed."""
    columns = launch.table.columns
    header = launch.table.header
    samples = global_batch_size or (header.global_batch_size if header else None)
    for total_name, step_name, given in (
        ("consumed_samples", "samples", samples),
        ("consumed_tokens", "tokens", None),
    ):
        total = _on_grid(columns[total_name], grid)
        step = _on_grid(columns[step_name], grid) if given is None else np.where(grid >= 0, given, ABSENT)
        before = np.concatenate([[0], total[:-1]])
        known = (total != ABSENT) & (before != ABSENT) & (step != ABSENT)
        for index in np.flatnonzero(known & (total - before != step)).tolist():
            rise = int(total[index] - before[index])
            yield fault_of(
                launch,
                index + 1,
                "misaligned",
                f"{total_name.replace('_', ' ')} rose by {rise}; the batch has {int(step[index])} {step_name}",
            )


def _on_grid(values: NDArray[Any], grid: NDArray[np.int64]) -> NDArray[Any]:
    return np.where(grid >= 0, values[grid], ABSENT) if len(values) else np.full(len(grid), ABSENT)
