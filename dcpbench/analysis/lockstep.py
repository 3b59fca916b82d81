"""A lockstep launch, whose one stream of records holds both cases, as two series; and what it alone can tell."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcpbench.align import Aligned
from dcpbench.analysis.results import Measured
from dcpbench.plan import CaseName
from dcpbench.records import Malformed
from dcpbench.stats.gates import Gate
from dcpbench.stats.interval import FEWEST_PAIRS, Interval, Speed, interval
from dcpbench.stats.lockstep import Paired, Sides, lockstep_gates, more_iterations, paired
from dcpbench.stats.throughput import log_ratios
from dcpbench.table import LaunchTable

_CASES: tuple[CaseName, CaseName] = ("baseline", "dcp")


@dataclass(frozen=True)
class Lockstep:
    """What the report of a lockstep run has beside the numbers that every report has."""

    launches: int
    same_case: bool
    """Both sides are the same case (A/A): what differs is the measurement's own."""
    paired: Paired | None
    """Over iterations; None with three launches or more, which then are what is counted."""
    more_iterations: int | None
    """How many more would settle an inconclusive speed-up, where iterations are counted."""
    update_ms: float | None
    """Mean time of the update, part of both cases' iteration times."""
    gradient_difference_max: float | None
    gradient_difference_median: float | None
    """Norm of the difference of gradients over the norm, all iterations."""
    gradient_segment: str | None
    """Where in the model the greatest difference stands out most."""
    memory_difference: int | None
    """Peak memory of dcp's passes less that of the baseline's, in bytes; None on CPU, where peaks are the process's."""


def series(table: LaunchTable) -> dict[CaseName, LaunchTable]:
    """The records of each case. Lines that are no records count against both: nothing tells whose they were."""
    cases = table.columns["case"]
    nameless = [
        Malformed(int(table.columns["line"][row]), "a record of a lockstep launch that names no case")
        for row in np.flatnonzero(~np.isin(cases, [case.encode() for case in _CASES]))
    ]
    found: dict[CaseName, LaunchTable] = {}
    for case in _CASES:
        rows = np.flatnonzero(cases == case.encode())
        place = {int(row): number for number, row in enumerate(rows)}
        found[case] = replace(
            table,
            columns={name: values[rows] for name, values in table.columns.items()},
            header=next((header for header in table.headers if header.case == case), None),
            headers=(),
            malformed=(*table.malformed, *nameless),
            problems={place[row]: words for row, words in (table.problems or {}).items() if row in place},
        )
    return found


def baseline_first(aligned: Aligned, warmup: int = 0) -> NDArray[np.bool_] | None:
    """In which iterations the baseline's pass came first, shape (launches, iterations); None where not recorded."""
    places = aligned.of_case("baseline", "order", warmup)
    return None if places is None else places == 1


def places(measured: Measured) -> tuple[NDArray[np.float64], NDArray[np.bool_] | None]:
    """(log of baseline over dcp, whether the baseline came first) of each measured iteration, flat."""
    first = baseline_first(measured.aligned, measured.warmup)
    logs = np.log(measured.seconds("baseline") / measured.seconds("dcp")).ravel()
    return logs, None if first is None else first.ravel()


def interval_of(measured: Measured, inside: NDArray[np.bool_]) -> Interval | None:
    """The interval of the speed-up over some iterations, shape (iterations,), of all launches."""
    seconds = measured.seconds("baseline"), measured.seconds("dcp")
    if len(seconds[0]) >= FEWEST_PAIRS:
        return interval(log_ratios(*(times[:, inside] for times in seconds)))
    found = within(measured, np.broadcast_to(inside, seconds[0].shape))
    return found.interval if found else None


def within(measured: Measured, kept: NDArray[np.bool_] | None = None) -> Paired | None:
    """The speed-up from iterations; None with too few of them, or with so many launches that these are counted."""
    seconds = measured.seconds("baseline"), measured.seconds("dcp")
    if len(seconds[0]) >= FEWEST_PAIRS:
        return None
    return paired(*seconds, baseline_first(measured.aligned, measured.warmup), kept)


def sides(aligned: Aligned) -> Sides:
    """What both sides computed in all iterations."""
    losses = aligned.of_case("baseline", "loss"), aligned.of_case("dcp", "loss")
    assert losses[0] is not None, "alignment refuses records without losses"
    assert losses[1] is not None, "alignment refuses records without losses"
    return Sides(
        losses[0],
        losses[1],
        aligned.of_case("baseline", "grad_norm"),
        aligned.of_case("dcp", "grad_norm"),
        aligned.of_case("dcp", "gradient_difference"),
        _segments(aligned),
    )


def judged(
    aligned: Aligned, atol: float, rtol: float, *, float32: bool, control: Sides | None = None
) -> tuple[Gate, ...]:
    """The parity gates of lockstep, over all iterations; `control` is the A/A control, if there is one."""
    return lockstep_gates(sides(aligned), atol, rtol, float32=float32, control=control)


def summary(measured: Measured, speed: Speed | None, margin: float) -> Lockstep:
    """See `Lockstep`; `speed` is None where more iterations would not settle it."""
    found = within(measured)
    headers = [launch.table.header for launch in measured.aligned.launches]
    made_of = {header and (header.scheduler, header.cp_sizes) for header in headers}
    seconds = measured.seconds("baseline"), measured.seconds("dcp")
    open_ = speed == "inconclusive" and found is not None
    update = measured.column("baseline", "update_seconds")
    difference = measured.aligned.of_case("dcp", "gradient_difference")
    known = None if difference is None else difference[np.isfinite(difference)]
    return Lockstep(
        launches=len(seconds[0]),
        same_case=len(made_of) == 1 and None not in made_of,
        paired=found,
        more_iterations=more_iterations(found, *seconds, margin) if open_ and found is not None else None,
        update_ms=None if update is None else float(1e3 * np.nanmean(update)),
        gradient_difference_max=None if known is None else float(known.max()),
        gradient_difference_median=None if known is None else float(np.median(known)),
        gradient_segment=_worst_segment(measured.aligned, difference),
        memory_difference=memory_difference(measured),
    )


def memory_difference(measured: Measured) -> int | None:
    """Peak memory of dcp's passes less that of the baseline's, in bytes; None on CPU, where peaks are the process's."""
    found = [peak_memory(measured, case) for case in _CASES]
    return None if found[0] is None or found[1] is None else found[1] - found[0]


def peak_memory(measured: Measured, case: CaseName) -> int | None:
    """The highest peak of a case's passes, in bytes; None on CPU, where peaks are the process's."""
    peaks = None if _on_cpu(measured.aligned) else measured.column(case, "peak_memory_bytes")
    return None if peaks is None else int(peaks.max())


def _segments(aligned: Aligned) -> NDArray[np.bytes_] | None:
    values = aligned.columns.get("gradient_segment")
    if values is None:
        return None
    return values[[index for index, launch in enumerate(aligned.launches) if launch.case == "dcp"]]


def _worst_segment(aligned: Aligned, difference: NDArray[Any] | None) -> str | None:
    segments = _segments(aligned)
    if segments is None or difference is None:
        return None
    worst = np.unravel_index(int(np.nanargmax(difference)), difference.shape)
    return segments[worst].decode() or None


def _on_cpu(aligned: Aligned) -> bool:
    return any(launch.table.header is None or launch.table.header.device == "cpu" for launch in aligned.launches)
