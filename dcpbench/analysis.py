"""Records -> analysis: the one pipeline behind `run`, `analyze` and every report.

`analyze_run` and `analyze_logs` read, align, compute and judge. An `Analysis` holds every number
that a report shows, and `report.write` writes it to a run's `analysis/` folder. It depends on the
stored files only, so that folder can be deleted and rebuilt with the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dcpbench.align import KEYS, Aligned, align, expected_iterations
from dcpbench.cautions import cautions
from dcpbench.errors import LogError, UsageError
from dcpbench.faults import Fault, LaunchInput
from dcpbench.profiles import LaunchProfile
from dcpbench.results import CaseResult, LaunchResult, Measured, case_result, launch_result
from dcpbench.sources import Source, read_logs, read_run
from dcpbench.spec import CASES, Tolerances
from dcpbench.stats.parity import Parity, parity
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
    order_effect: float | None = None
    """How many times as long a case takes for coming second in its pair."""
    parity: Parity | None = None
    aligned_on: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    profiles: tuple[LaunchProfile, ...] = ()
    """Of launches in which iterations were profiled."""
    aligned: Aligned | None = field(default=None, repr=False)


def analyze_run(folder: Path, *, tolerances: Tolerances | None = None, warmup: int | None = None) -> Analysis:
    """The analysis of a run folder, from its stored files alone; launches and writes nothing.

    Args:
        folder: the run folder.
        tolerances: in place of the spec's.
        warmup: first iterations to leave out, in place of the spec's.

    Raises:
        LogError: the folder is no run folder or cannot be read.
        UsageError: the warm-up leaves nothing to measure.
    """
    source = read_run(folder)
    if source.spec is None:
        raise LogError(f"{folder} has no spec")
    training = source.spec.training
    return analyze(
        source,
        iterations=training.iterations,
        warmup=training.warmup_iterations if warmup is None else warmup,
        global_batch_size=training.global_batch_size,
        tolerances=tolerances or source.spec.tolerances,
    )


def analyze_logs(
    baseline: Sequence[Path],
    dcp: Sequence[Path],
    *,
    format: str = "auto",
    iterations: int | None = None,
    warmup: int | None = None,
    global_batch_size: int | None = None,
    tolerances: Tolerances | None = None,
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
    )


def analyze(
    source: Source, *, iterations: int | None, warmup: int | None, global_batch_size: int | None, tolerances: Tolerances
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
    result_parity = None if aligned is None else _parity(aligned, tolerances)
    results = [launch_result(launch, measured) for launch in launches]
    times = (measured.seconds("baseline"), measured.seconds("dcp")) if measured else None
    first = _baseline_first(launches)
    return Analysis(
        name=source.name,
        pairs=len({launch.pair for launch in launches}),
        iterations=expected,
        warmup=left_out,
        tolerances=tolerances,
        cases={case: case_result(launches, case, measured) for case in CASES},
        launches=tuple(results),
        verdict=judge(faults, result_parity, tolerances.check_loss_parity),
        speedup=speedup(*times) if times else None,
        order_effect=order_effect(log_ratios(*times), first) if times and first is not None else None,
        parity=result_parity,
        aligned_on=("iteration", *(KEYS[key] for key in aligned.keys)) if aligned else (),
        cautions=cautions(
            launches,
            aligned=aligned,
            baseline_first=first,
            settling={result.id: result.settling for result in results},
            warmup=left_out,
            parity=result_parity,
            check_loss_parity=tolerances.check_loss_parity,
            remarks=source.remarks,
        ),
        faults=faults,
        profiles=source.profiles,
        aligned=aligned,
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


def _parity(aligned: Aligned, tolerances: Tolerances) -> Parity:
    baseline, dcp = aligned.of_case("baseline", "loss"), aligned.of_case("dcp", "loss")
    assert baseline is not None, "alignment refuses records without losses"
    assert dcp is not None, "alignment refuses records without losses"
    return parity(
        baseline,
        dcp,
        tolerances.loss_atol,
        tolerances.loss_rtol,
        aligned.of_case("baseline", "grad_norm"),
        aligned.of_case("dcp", "grad_norm"),
    )
