"""The A/A control of lockstep: one more launch with the baseline on both sides.

What it shows is the measurement's own: what the two places in one process do to each other through the allocator,
caches and order, and how far the same computation differs at equal weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcpbench.align import Aligned, align
from dcpbench.analysis import lockstep
from dcpbench.analysis.results import Measured
from dcpbench.faults import LaunchInput
from dcpbench.stats.interval import Interval, Speed, order_interval
from dcpbench.stats.lockstep import Sides, decide_paired, paired
from dcpbench.stats.throughput import log_ratios, order_effect


@dataclass(frozen=True)
class LockstepControl:
    """What the A/A control shows. The *other side* is the baseline in dcp's place."""

    id: str
    scheduler: str | None
    position: int | None
    source: str
    records: int
    """Of both sides."""
    iterations: int
    """Measured."""
    speedup: float
    """How many times as fast the other side came out."""
    interval: Interval | None
    """Over iterations; None with fewer than four."""
    verdict: Speed
    """`faster` or `slower` where the interval excludes 1 by more than the margin."""
    order_effect: float | None
    """How many times as long a side takes for coming second."""
    order_interval: tuple[float, float] | None
    memory_difference: int | None
    """Peak memory of the other side's passes less that of the baseline's, in bytes; None on CPU."""
    loss_difference_max: float
    """Greatest difference of losses at equal weights, in any iteration."""
    grad_norm_difference_max: float | None
    """The same of gradient norms, relative."""
    gradient_difference_max: float | None
    """Norm of the difference of gradients over the norm, at most."""
    baseline_beside_dcp: float
    """Total time of the baseline beside dcp, per launch, over its time beside itself, which is of another launch."""
    baseline_memory_beside_dcp: int | None
    """Peak memory of the baseline's passes beside dcp less that beside itself, in bytes; None on CPU."""


@dataclass(frozen=True)
class Control:
    """The control as reports tell it, as the gates take it, and what a reader must know of it."""

    told: LockstepControl | None = None
    sides: Sides | None = None
    remarks: tuple[str, ...] = ()


def read(
    launches: tuple[LaunchInput, ...], measured: Measured | None, global_batch_size: int | None, margin: float
) -> Control:
    """The control of a run, or why it cannot be used.

    Args:
        launches: both sides of the control; empty where none was launched.
        measured: the run's own launches; None where they cannot be compared.
        global_batch_size: samples of one iteration.
        margin: speed-ups within this share of 1 count as no difference.
    """
    if not launches or measured is None:
        return Control()
    own = next(found for found in measured.aligned.launches if found.case == "baseline")
    _, faults = align((own, *launches), measured.aligned.iterations, global_batch_size)
    both, _ = align(launches, measured.aligned.iterations, global_batch_size)
    if faults or both is None:
        what = f"{faults[0].launch} {faults[0].message}" if faults[0].iteration is None else (
            f"{faults[0].launch}, iteration {faults[0].iteration}: {faults[0].message}"
        )  # fmt: skip
        return Control(
            remarks=(
                "The A/A control cannot be used, so what the two places in one process do to each other is not known "
                f"from this run: {what}{f' ({len(faults)} faults)' if len(faults) > 1 else ''}.",
            )
        )
    told = _told(launches, both, measured, global_batch_size, margin)
    return Control(told, lockstep.sides(both), _remarks(told, margin))


def _told(
    launches: tuple[LaunchInput, ...], both: Aligned, measured: Measured, global_batch_size: int | None, margin: float
) -> LockstepControl:
    control = Measured(both, measured.warmup, global_batch_size)
    seconds = control.seconds("baseline"), control.seconds("dcp")
    found = paired(*seconds, lockstep.baseline_first(both, measured.warmup))
    logs, first = lockstep.places(control)
    apart = lockstep.sides(both)
    norm, gradient = apart.norm, apart.gradient
    beside_dcp = measured.seconds("baseline").sum(axis=1)
    memory = lockstep.peak_memory(measured, "baseline"), lockstep.peak_memory(control, "baseline")
    header = launches[0].table.header
    return LockstepControl(
        id=launches[0].folder or launches[0].id,
        scheduler=header.scheduler if header else None,
        position=launches[0].position,
        source=launches[0].table.source,
        records=sum(launch.table.rows for launch in launches),
        iterations=seconds[0].size,
        speedup=float(np.exp(log_ratios(*seconds).mean())),
        interval=found.interval if found else None,
        verdict=decide_paired(found, margin),
        order_effect=None if first is None else order_effect(logs, first),
        order_interval=None if first is None else order_interval(logs, first),
        memory_difference=lockstep.memory_difference(control),
        loss_difference_max=float(np.abs(apart.loss).max()),
        grad_norm_difference_max=None if norm is None else float(np.abs(norm).max()),
        gradient_difference_max=None if gradient is None else float(gradient.max()),
        baseline_beside_dcp=float(np.exp(np.log(beside_dcp).mean()) / seconds[0].sum()),
        baseline_memory_beside_dcp=None if memory[0] is None or memory[1] is None else memory[0] - memory[1],
    )


def _remarks(told: LockstepControl, margin: float) -> tuple[str, ...]:
    if told.verdict not in ("faster", "slower") or told.interval is None:
        return ()
    return (
        f"The baseline compared with itself in one process (A/A) came out {told.speedup:.3f} times as fast "
        f"({told.interval.low:.3f} to {told.interval.high:.3f}), beyond the margin of {margin:.3g}: the two places are "
        "not alike, and as much of the speed-up may be the measurement's own.",
    )
