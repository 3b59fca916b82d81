"""The launches of both cases on one grid of iterations, or every fault that prevents it.

Nothing stops at the first fault, and no tolerance applies here: a launch is compared only when each
of its iterations is there once, was not skipped, is finite, and consumed the very samples that the
same iteration of every other launch consumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcpbench.errors import LogError
from dcpbench.faults import Fault, LaunchInput, fault_of, first_rows, integrity_faults, shortened
from dcpbench.table import ABSENT, FLOATS, TEXTS

KEYS = {
    "consumed_samples": "consumed samples",
    "consumed_tokens": "consumed tokens",
    "samples": "samples",
    "tokens": "tokens",
    "squared_lengths": "squared lengths",
    "longest": "longest sample",
    "token_count": "loss tokens",
    "batch_digest": "batch digest",
}
"""What equal iterations must agree on, wherever both records carry it."""

MOST_ITERATIONS = 10_000_000
"""More than this is taken for a broken log, not for a benchmark."""

_NOT_ALIGNED = {"line", "iteration", "total", "skipped", "case"}


@dataclass(frozen=True)
class Aligned:
    """Every launch on the grid of iterations 1 to `iterations`, in the order of `launches`.

    `columns` maps a column of `LaunchTable` to an array of shape (launches, iterations); columns
    that no launch carries are left out.
    """

    launches: tuple[LaunchInput, ...]
    iterations: int
    columns: dict[str, NDArray[Any]]
    keys: tuple[str, ...]
    """The columns on which all launches were found equal."""

    def of_case(self, case: str, column: str, first: int = 0) -> NDArray[Any] | None:
        """The column of one case from iteration index `first` on, shape (pairs, iterations - first).

        None where the case does not record it, or records a count in some iterations only.
        """
        values = self.columns.get(column)
        if values is None:
            return None
        values = values[[index for index, launch in enumerate(self.launches) if launch.case == case], first:]
        if column in FLOATS:
            return None if np.isnan(values).all() else values
        return None if (values == (b"" if column in TEXTS else ABSENT)).any() else values


def expected_iterations(launches: Sequence[LaunchInput]) -> int:
    """How many iterations the launches say they have: the header's number, or else the greatest in the records."""
    announced = [0]
    for launch in launches:
        table = launch.table
        if table.header is not None:
            announced.append(table.header.iterations)
        elif table.rows:
            announced.append(int(max(table.columns["total"].max(), table.columns["iteration"].max())))
    return max(announced)


def _check_size(expected: int) -> None:
    if expected > MOST_ITERATIONS:
        raise LogError(
            f"{expected} iterations are announced or asked for; dcpbench reads up to {MOST_ITERATIONS}: "
            "check the log, or give the number of iterations"
        )


def align(
    launches: Sequence[LaunchInput], iterations: int | None = None, global_batch_size: int | None = None
) -> tuple[Aligned | None, tuple[Fault, ...]]:
    """The launches on one grid; None when there is any fault.

    Args:
        launches: both cases, in the order of reports.
        iterations: how many each launch must have; default: what the launches announce.
        global_batch_size: samples each iteration must consume; default: what the records say.

    Raises:
        LogError: more iterations than any benchmark has, from a broken record or a wrong option.
    """
    expected = iterations or expected_iterations(launches)
    _check_size(expected)
    faults: list[Fault] = []
    grids: list[NDArray[np.int64]] = []
    for launch in launches:
        grid = first_rows(launch.table, expected)
        grids.append(grid)
        faults += shortened(launch, integrity_faults(launch, grid, global_batch_size))
    keys = [key for key in KEYS if all(launch.table.has(key) for launch in launches)]
    reference = next((n for n, launch in enumerate(launches) if launch.table.rows), 0)
    for number, launch in enumerate(launches):
        if number != reference:
            pair = (launches[reference], grids[reference]), (launch, grids[number])
            faults += shortened(launch, _difference_faults(*pair))
    if faults:
        order = {launch.id: number for number, launch in enumerate(launches)}
        return None, tuple(sorted(faults, key=lambda fault: (order[fault.launch], fault.iteration or 0)))
    return Aligned(tuple(launches), expected, _columns(launches, grids), tuple(keys)), ()


def _columns(launches: Sequence[LaunchInput], grids: Sequence[NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
    names = [
        name
        for name in launches[0].table.columns
        if name not in _NOT_ALIGNED and any(launch.table.has(name) for launch in launches)
    ]
    return {
        name: np.stack([launch.table.columns[name][grid] for launch, grid in zip(launches, grids, strict=True)])
        for name in names
    }


def _difference_faults(
    reference: tuple[LaunchInput, NDArray[np.int64]], other: tuple[LaunchInput, NDArray[np.int64]]
) -> Iterator[Fault]:
    """Iterations in which another launch did not consume what the reference launch did."""
    (first, first_grid), (launch, grid) = reference, other
    both = np.flatnonzero((first_grid >= 0) & (grid >= 0))
    found: dict[int, list[str]] = {}
    for key, noun in KEYS.items():
        if not (first.table.has(key) and launch.table.has(key)):
            continue
        expected = first.table.columns[key][first_grid[both]]
        values = launch.table.columns[key][grid[both]]
        for index in np.flatnonzero(values != expected).tolist():
            words = f"{noun} {_word(values[index])} where {first.id} has {_word(expected[index])}"
            found.setdefault(int(both[index]) + 1, []).append(words)
    for iteration in sorted(found):
        yield fault_of(launch, iteration, "misaligned", "; ".join(found[iteration]))


def _word(value: Any) -> str:
    if value in (ABSENT, b""):
        return "missing"
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
