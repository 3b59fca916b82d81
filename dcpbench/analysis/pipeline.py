"""Records -> analysis: the one pipeline behind `run`, `analyze` and every report.

`analyze_run` and `analyze_logs` read, align, compute and judge. An `Analysis` holds every number
that a report shows, and `report.write` writes it to a run's `analysis/` folder. It depends on the
stored files only, so that folder can be deleted and rebuilt with the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dcpbench.align import KEYS, Aligned, align, expected_iterations
from dcpbench.analysis import disturbances, lockstep, lockstep_control, refits, slowest
from dcpbench.analysis.cautions import cautions, unsteady
from dcpbench.analysis.disturbances import Telemetry
from dcpbench.analysis.lockstep import Lockstep
from dcpbench.analysis.lockstep_control import LockstepControl
from dcpbench.analysis.predicted import add_predictions
from dcpbench.analysis.refits import LaunchRefits
from dcpbench.analysis.results import CaseResult, LaunchResult, LayoutControl, Measured, case_result, launch_result
from dcpbench.analysis.slowest import SlowestIteration
from dcpbench.analysis.sources import Source, read_logs, read_run
from dcpbench.errors import LogError, UsageError
from dcpbench.faults import Fault, LaunchInput
from dcpbench.profiles import LaunchProfile
from dcpbench.runfolder.layout import RunFolder
from dcpbench.spec import CASES, Decision, Tolerances
from dcpbench.stats.gates import Control
from dcpbench.stats.interval import (
    FEWEST_PAIRS,
    Interval,
    Speed,
    decide,
    hierarchical_interval,
    interval,
    order_interval,
    pairs_to_settle,
    timing_floor,
)
from dcpbench.stats.lengths import LengthBin, by_longest
from dcpbench.stats.lockstep import Sides, decide_paired
from dcpbench.stats.parity import Parity, parity
from dcpbench.stats.steadiness import without_outliers, workload_removed
from dcpbench.stats.throughput import Speedup, log_ratios, order_effect, speedup
from dcpbench.verdict import Verdict, judge

DEFAULT_WARMUP = 10
"""Warm-up iterations where neither the user nor the records name a number (docs/method.md)."""


@dataclass(frozen=True)
class Analysis:
    """Everything the reports say. `cases` has the keys of `spec.CASES`; what could not be computed is None."""

    name: str
    pairs: int
    iterations: int
    warmup: int
    tolerances: Tolerances
    cases: dict[str, CaseResult]
    launches: tuple[LaunchResult, ...]
    verdict: Verdict
    speedup: Speedup | None = None
    decision: Decision = field(default_factory=Decision)
    speed: Speed | None = None
    """The verdict on the speed-up; `verdict` is that on the comparison as a whole."""
    interval: Interval | None = None
    more_pairs: int | None = None
    """How many more pairs would settle an inconclusive speed-up."""
    order_effect: float | None = None
    """How many times as long a case takes for coming second in its pair."""
    order_interval: tuple[float, float] | None = None
    timing_floor: float | None = None
    """Spread of the log time ratio of neighbouring launches of the same case."""
    lengths: tuple[LengthBin, ...] = ()
    """Speed-up by the longest sample of the batch."""
    workload: str | None = None
    """What iteration times were divided by before their steadiness was looked at."""
    slowest: tuple[SlowestIteration, ...] = ()
    """Of each case its slowest measured iteration; empty unless the records hold their plans."""
    provenance: tuple[tuple[str, str], ...] = ()
    """(what, value) of the run's manifest, for reports to repeat; see `manifest_summary.py`."""
    parity: Parity | None = None
    control: LayoutControl | None = None
    aligned_on: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    profiles: tuple[LaunchProfile, ...] = ()
    """Of launches in which iterations were profiled."""
    refits: tuple[LaunchRefits, ...] = ()
    """Of launches that refitted the cost profile while they ran."""
    aligned: Aligned | None = field(default=None, repr=False)
    mode: Literal["launches", "lockstep"] = "launches"
    lockstep: Lockstep | None = None
    """In lockstep, what only that mode can tell; `interval` then stands on iterations, with few launches."""
    lockstep_control: LockstepControl | None = None
    """What the A/A control of a lockstep run showed."""


def analyze_run(
    folder: Path,
    *,
    tolerances: Tolerances | None = None,
    warmup: int | None = None,
    decision: Decision | None = None,
) -> Analysis:
    """The analysis of a run folder, from its stored files alone; launches and writes nothing.

    Args:
        folder: the run folder.
        tolerances: in place of the spec's.
        warmup: first iterations to leave out, in place of the spec's.
        decision: what is asked of the speed-up, in place of the spec's.

    Raises:
        LogError: the folder is no run folder or cannot be read.
        UsageError: the warm-up leaves nothing to measure.
    """
    source = read_run(folder)
    if source.spec is None:
        raise LogError(f"{folder} has no spec")
    training = source.spec.training
    result = analyze(
        source,
        iterations=training.iterations,
        warmup=training.warmup_iterations if warmup is None else warmup,
        global_batch_size=training.global_batch_size,
        tolerances=tolerances or source.spec.tolerances,
        decision=decision or source.spec.decision,
        disturbed={
            launch.id: disturbances.read(RunFolder(folder).launch(launch.folder_name) / "gpu.csv")
            for launch in source.launches
        },
    )
    refitted = refits.read(folder, source.launches)
    result = replace(result, refits=refitted, cautions=(*result.cautions, *refits.caution(refitted)))
    if result.aligned is not None:
        result = replace(result, slowest=slowest.read(folder, result.aligned, result.warmup))
    return add_predictions(result, folder, source.spec)


def analyze_logs(
    baseline: Sequence[Path],
    dcp: Sequence[Path],
    *,
    format: str = "auto",
    iterations: int | None = None,
    warmup: int | None = None,
    global_batch_size: int | None = None,
    tolerances: Tolerances | None = None,
    decision: Decision | None = None,
) -> Analysis:
    """The analysis of console logs made anywhere; the n-th log of either case are a pair.

    Args:
        baseline: logs of the fixed-CP launches.
        dcp: logs of the dynamic-CP launches, as many.
        format: `auto` or a name in `parse.FORMATS`.
        iterations: how many each launch must have; default: what the logs announce.
        warmup: first iterations to leave out; default: what the logs' headers say, or else 10.
        global_batch_size: samples of one iteration; default: what the logs say.
        tolerances: of loss parity; default: the spec's defaults.
        decision: what is asked of the speed-up; default: nothing.

    Raises:
        LogError: a log cannot be read.
        UsageError: the numbers of logs differ, or the warm-up leaves nothing to measure.
    """
    return analyze(
        read_logs(baseline, dcp, format),
        iterations=iterations,
        warmup=warmup,
        global_batch_size=global_batch_size,
        tolerances=tolerances or Tolerances(),
        decision=decision,
    )


def analyze(
    source: Source,
    *,
    iterations: int | None,
    warmup: int | None,
    global_batch_size: int | None,
    tolerances: Tolerances,
    decision: Decision | None = None,
    disturbed: Mapping[str, Telemetry] | None = None,
) -> Analysis:
    """Align, compute, judge. Faults are part of the result, not exceptions.

    Raises:
        LogError: the records announce an absurd number of iterations.
        UsageError: the warm-up leaves nothing to measure.
    """
    launches = source.launches
    expected = iterations or expected_iterations(launches)
    left_out = _warmup(launches, warmup)
    aligned, faults = align(launches, expected, global_batch_size)
    if aligned is not None and not 0 <= left_out < expected:
        raise UsageError(
            f"a warm-up of {left_out} leaves nothing to measure of {expected} iterations; "
            "give a smaller one (--warmup or WARMUP_ITERS)"
        )
    measured = None if aligned is None else Measured(aligned, left_out, global_batch_size)
    control, told, unusable = _control(source.control, aligned, global_batch_size)
    asked = decision or Decision()
    same = lockstep_control.read(source.lockstep_control, measured, global_batch_size, asked.margin)
    result_parity = None if aligned is None else _parity(aligned, tolerances, control, source.mode, same.sides)
    z, workload = _workload_removed(measured) if measured else (None, None)
    known = disturbed or {}
    results = [launch_result(launch, measured, z, known.get(launch.id)) for launch in launches]
    times = (measured.seconds("baseline"), measured.seconds("dcp")) if measured else None
    both = measured if source.mode == "lockstep" else None
    logs = log_ratios(*times) if times else None
    within = lockstep.within(both) if both else None
    found = within.interval if within else None if times is None else _interval(times, asked)
    speed = None if logs is None else decide_paired(within, asked.margin) if within else decide(found, asked.margin)
    doubts = () if measured is None or speed is None else _doubts(results, measured, both, speed, asked.margin)
    speed = "inconclusive" if doubts else speed
    settling_pairs = (
        pairs_to_settle(logs, asked.margin)
        if logs is not None and speed == "inconclusive" and not doubts and not within
        else None
    )
    more = None if settling_pairs is None or logs is None else settling_pairs - logs.size
    ordered, first = (logs, _baseline_first(launches)) if both is None else lockstep.places(both)
    effect = order_effect(ordered, first) if ordered is not None and first is not None else None
    effect_ends = order_interval(ordered, first) if ordered is not None and first is not None else None
    return Analysis(
        name=source.name,
        pairs=len({launch.pair for launch in launches}),
        iterations=expected,
        warmup=left_out,
        tolerances=tolerances,
        cases={case: case_result(launches, case, measured) for case in CASES},
        launches=tuple(results),
        verdict=judge(
            faults,
            result_parity,
            tolerances.check_loss_parity,
            speed=speed,
            interval=found,
            decision=asked,
            more_pairs=more,
        ),
        speedup=speedup(*times) if times else None,
        decision=asked,
        speed=speed,
        interval=found,
        more_pairs=more,
        order_effect=effect,
        order_interval=effect_ends,
        timing_floor=timing_floor(_controls(results)),
        lengths=_by_longest(measured, both) if measured else (),
        workload=workload,
        parity=result_parity,
        control=told,
        aligned_on=("iteration", *(KEYS[key] for key in aligned.keys)) if aligned else (),
        cautions=cautions(
            launches,
            aligned=aligned,
            baseline_first=first,
            settling={result.id: result.settling for result in results},
            warmup=left_out,
            parity=result_parity,
            check_loss_parity=tolerances.check_loss_parity,
            remarks=(*doubts, *unusable, *same.remarks, *unsteady(results, left_out, known), *source.remarks),
            order_effect=effect,
            order_interval=effect_ends,
            margin=asked.margin,
            mode=source.mode,
            with_control=same.told is not None,
        ),
        faults=faults,
        profiles=source.profiles,
        aligned=aligned,
        mode=source.mode,
        lockstep=lockstep.summary(both, None if doubts else speed, asked.margin) if both else None,
        lockstep_control=same.told,
    )


def _warmup(launches: Sequence[LaunchInput], asked: int | None) -> int:
    """The warm-up to apply: as asked, or as the headers say, or the default."""
    if asked is not None:
        return asked
    headers = [launch.table.header for launch in launches if launch.table.header]
    return max((h.warmup_iterations for h in headers if h.warmup_iterations is not None), default=DEFAULT_WARMUP)


def _baseline_first(launches: Sequence[LaunchInput]) -> NDArray[np.bool_] | None:
    """For each pair, whether its baseline ran first; None where the order is not known."""
    position = {(launch.pair, launch.case): launch.position for launch in launches}
    order: list[bool] = []
    for pair in sorted({launch.pair for launch in launches}):
        baseline, dcp = position.get((pair, "baseline")), position.get((pair, "dcp"))
        if baseline is None or dcp is None:
            return None
        order.append(baseline < dcp)
    return np.array(order)


def _interval(times: tuple[NDArray[np.float64], NDArray[np.float64]], asked: Decision) -> Interval | None:
    return hierarchical_interval(*times) if asked.interval == "hierarchical" else interval(log_ratios(*times))


def _control(
    launch: LaunchInput | None, aligned: Aligned | None, global_batch_size: int | None
) -> tuple[Control | None, LayoutControl | None, tuple[str, ...]]:
    """The layout control as the gates take it and as reports tell it; or why it cannot be used."""
    if launch is None or aligned is None:
        return None, None, ()
    first = next(found for found in aligned.launches if found.case == "baseline")
    both, faults = align((first, launch), aligned.iterations, global_batch_size)
    loss = None if both is None else both.columns["loss"][1]
    if both is None or loss is None:
        why = f"{faults[0].message} ({len(faults)} faults)" if len(faults) > 1 else faults[0].message
        return None, None, (f"The {launch.id} launch cannot be used, and the gates stand without it: {why}.",)
    baseline = aligned.of_case("baseline", "loss")
    assert baseline is not None, "alignment refuses records without losses"
    norms = both.columns.get("grad_norm")
    difference = np.abs(baseline - loss)
    told = LayoutControl(
        id=launch.id,
        scheduler=launch.table.header.scheduler if launch.table.header else None,
        position=launch.position,
        source=launch.table.source,
        records=launch.table.rows,
        max_abs_diff=float(difference.max()),
        first_iteration_diff=float(difference[:, 0].max()),
    )
    return Control(loss, None if norms is None else norms[1]), told, ()


def _parity(aligned: Aligned, tolerances: Tolerances, control: Control | None, mode: str, same: Sides | None) -> Parity:
    baseline, dcp = aligned.of_case("baseline", "loss"), aligned.of_case("dcp", "loss")
    assert baseline is not None, "alignment refuses records without losses"
    assert dcp is not None, "alignment refuses records without losses"
    atol, rtol = tolerances.loss_atol, tolerances.loss_rtol
    float32 = all(launch.table.header and launch.table.header.dtype == "float32" for launch in aligned.launches)
    return parity(
        baseline,
        dcp,
        atol,
        rtol,
        aligned.of_case("baseline", "grad_norm"),
        aligned.of_case("dcp", "grad_norm"),
        float32=float32,
        first_step_rtol=tolerances.first_step_rtol,
        control=control,
        judged=lockstep.judged(aligned, atol, rtol, float32=float32, control=same) if mode == "lockstep" else None,
    )


def _workload_removed(measured: Measured) -> tuple[dict[str, NDArray[np.float64]], str]:
    z, how = {}, ""
    for case in CASES:
        squared = measured.column(case, "squared_lengths")
        z[case], how = workload_removed(measured.seconds(case), measured.tokens(case), squared)
    return z, how


def _controls(results: Sequence[LaunchResult]) -> NDArray[np.float64]:
    """Seconds of launches of the same case that ran one after the other, shape (controls, 2).

    Balanced order makes them, where one pair ends with the case that the next begins with.
    """
    known = sorted((launch for launch in results if launch.position is not None), key=lambda found: found.position or 0)
    totals = [
        (a.total_seconds, b.total_seconds)
        for a, b in pairwise(known)
        if a.case == b.case and a.total_seconds and b.total_seconds and (b.position or 0) == (a.position or 0) + 1
    ]
    return np.array(totals, dtype=np.float64).reshape(-1, 2)


def _by_longest(measured: Measured, both: Measured | None) -> tuple[LengthBin, ...]:
    longest = measured.column("baseline", "longest")
    if longest is None:
        return ()
    seconds = measured.seconds("baseline"), measured.seconds("dcp")
    return by_longest(*seconds, longest[0], None if both is None else functools.partial(lockstep.interval_of, both))


def _doubts(
    results: Sequence[LaunchResult], measured: Measured, both: Measured | None, speed: Speed, margin: float
) -> tuple[str, ...]:
    """Why a speed-up that its interval decides is not decided after all."""
    if speed in ("inconclusive", "indicative"):
        return ()
    found = [launch.steadiness for launch in results if launch.steadiness is not None]
    unstable = sum(launch.label == "unstable" for launch in found)
    # In lockstep a change of level hits both cases alike.
    if 3 * unstable > len(found) and both is None:
        return (f"{unstable} of {len(found)} launches changed level without a direction: nothing is decided on them.",)
    times = measured.seconds("baseline"), measured.seconds("dcp")
    flagged = np.zeros(times[0].shape, dtype=np.bool_)
    rows: dict[str, int] = {}
    for launch in results:
        row = rows.setdefault(launch.case, 0)
        rows[launch.case] += 1
        if launch.steadiness is not None:
            flagged[row, list(launch.steadiness.outliers)] = True
    if not flagged.any():
        return ()
    if both is not None and len(times[0]) < FEWEST_PAIRS:
        other = decide_paired(lockstep.within(both, ~flagged), margin)
    else:
        other = decide(interval(without_outliers(*times, flagged)), margin)
    if other == speed:
        return ()
    return (f"Without the iterations that stand out the speed-up is {other}, with them {speed}: it is not decided.",)
