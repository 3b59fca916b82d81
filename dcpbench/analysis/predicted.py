"""Predicted against measured iteration times of a finished run, from its data, its schedulers and its cost profile.

Every rank plans the same from the same lengths, so what the launches executed can be planned again here. Where the
profile was refitted while they ran, each launch has plans of its own: then the jobs that it recorded are taken, and the
coefficients that were in force, which never knew the iterations they are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dcpbench import records
from dcpbench.data.stream import SampleStream
from dcpbench.dcp import cost_profiles, schedulers
from dcpbench.dcp.cost_profiles import CostProfile
from dcpbench.dcp.costs import CostModel
from dcpbench.dcp.iterations import PlannedIteration, iteration_times
from dcpbench.errors import DataError, ScheduleError, SpecError
from dcpbench.runfolder.layout import RunFolder
from dcpbench.spec import CASES, Spec

if TYPE_CHECKING:
    from dcpbench.analysis.pipeline import Analysis

_BUDGET = 4_000_000
"""Samples x ranks that are planned again at most, a matter of seconds; further iterations are left out."""


@dataclass(frozen=True)
class Predicted:
    """How the measured iterations of a case compare with what the cost model says of them."""

    basis: str
    """The profile, in words."""
    iterations: int
    """Measured iterations of each launch that were predicted."""
    mean_ms: float
    ratio: float
    """Total predicted over total measured time."""
    mape: float
    """Mean absolute relative error of single iterations."""


def planned(
    spec: Spec, case: str, stream: SampleStream, cost: CostModel | None, iterations: range
) -> Iterator[PlannedIteration]:
    """The iterations (from 1) as the launches of a case plan them.

    Raises:
        SpecError, ScheduleError, DataError: they cannot be planned again.
    """
    scheduler = schedulers.of_case(spec, case, cost)
    for iteration in iterations:
        lengths = stream.lengths(stream.batch(iteration)).tolist()
        yield PlannedIteration.of(scheduler.plan(lengths), lengths, scheduler.padding)


def profile_of(folder: Path) -> CostProfile | None:
    """The cost profile of a run; None where it has none.

    Raises:
        SpecError: the file is damaged.
    """
    file = RunFolder(folder).costs
    return cost_profiles.load(file) if file.is_file() else None


def add_predictions(result: Analysis, folder: Path, spec: Spec) -> Analysis:
    """The analysis with a prediction for each case, where the run's profile is a measured one and can be used."""
    if result.aligned is None or spec.runner != "builtin" or spec.mode != "launches":
        return result
    try:
        profile = profile_of(folder)
        if profile is None or profile.kind != "measured" or profile.refused:
            return result
        stream = SampleStream.open(RunFolder(folder).data)
        most = max(1, _BUDGET // (spec.training.global_batch_size * spec.topology.world_size))
        window = range(result.warmup + 1, min(result.iterations, result.warmup + most) + 1)
        cases = dict(result.cases)
        for case in CASES:
            measured = result.aligned.of_case(case, "seconds", result.warmup)
            assert measured is not None, "alignment refuses records without times"
            basis = profile.basis
            if any(refits.log.adopted for refits in result.refits if refits.case == case):
                seconds = _in_force(result, folder, spec, case, profile, window)
                basis += ", refitted while running"
            else:
                executed = list(planned(spec, case, stream, profile.cost, window))
                seconds = iteration_times(executed, profile.cost) + profile.iteration_seconds
            if seconds is not None:
                predicted = compare(basis, seconds, measured[:, : len(window)].astype(np.float64))
                cases[case] = replace(cases[case], predicted=predicted)
    except (DataError, ScheduleError, SpecError):
        # Data that were moved away leave a run that can be judged, but not predicted.
        return result
    return replace(result, cases=cases)


def _in_force(
    result: Analysis, folder: Path, spec: Spec, case: str, profile: CostProfile, window: range
) -> NDArray[np.float64] | None:
    """Predicted seconds of each launch of a case with what it was planned with at the time, shape (launches, window).

    None where a launch did not record its jobs.
    """
    assert result.aligned is not None
    logs = {refits.launch: refits.log for refits in result.refits}
    rows = []
    for launch in result.aligned.launches:
        if launch.case != case:
            continue
        read = records.read(RunFolder(folder).launch(launch.folder_name) / "records.jsonl")
        jobs = {record.iteration: record.jobs for record in read.iterations if record.jobs}
        if any(number not in jobs for number in window):
            return None
        log = logs.get(launch.id)
        used = [
            (profile.cost, profile.iteration_seconds) if log is None else log.in_force(number, profile)
            for number in window
        ]
        executed = [PlannedIteration.recorded(jobs[number], spec.topology.domain_size) for number in window]
        constants = np.array([seconds for _, seconds in used])
        rows.append(iteration_times(executed, [cost for cost, _ in used]) + constants)
    return np.array(rows)


def compare(basis: str, predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> Predicted:
    """Predicted against measured seconds.

    Args:
        basis: what was predicted with, in words.
        predicted: shape (iterations,), the same for all launches, or (launches, iterations).
        measured: shape (launches, iterations).
    """
    of_each = np.broadcast_to(predicted, measured.shape)
    return Predicted(
        basis=basis,
        iterations=measured.shape[1],
        mean_ms=1e3 * float(of_each.mean()),
        ratio=float(of_each.sum() / measured.sum()),
        mape=float(np.abs(of_each / measured - 1).mean()),
    )
