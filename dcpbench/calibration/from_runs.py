"""A cost profile from finished runs: the jobs and times of their records, no data and no GPU needed.

The records hold what was executed, so the refit stays right when schedulers change. They hold only sums over the
samples of a microbatch, for which attention's rounding to whole tiles is taken at its expected value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from dcpbench import config, records
from dcpbench.analysis.predicted import profile_of
from dcpbench.dcp import cost_profiles, refit
from dcpbench.dcp.cost_profiles import CostProfile, Fit, Iteration, Key
from dcpbench.dcp.iterations import PlannedIteration
from dcpbench.dcp.kernel_choice import starting_from
from dcpbench.dcp.refit import Refit
from dcpbench.errors import UsageError
from dcpbench.records import RunHeader
from dcpbench.runfolder import layout as runfolder
from dcpbench.spec import CASES, Spec


@dataclass(frozen=True)
class Measured:
    """One iteration that every launch of a case executed alike."""

    run: str
    scheduler: str
    number: int
    jobs: PlannedIteration
    seconds: float
    """The median of the launches."""
    launches: int
    ended: float | None
    """When the last of them had finished it, in seconds since 1970 (UTC)."""


@dataclass(frozen=True)
class Agreement:
    """Predicted and measured iterations of one scheduler in one run, after the refit."""

    run: str
    scheduler: str
    iterations: int
    measured_ms: float
    """Mean, as all that follow, over the iterations of a run and over its launches' medians."""
    predicted_ms: float
    mape: float
    """Of iterations that were held out."""


@dataclass(frozen=True)
class _Run:
    """A finished run as a refit needs it."""

    name: str
    profile: CostProfile
    """What it was predicted with."""
    key: Key
    iterations: tuple[Measured, ...]


def profile_from(paths: Sequence[Path], stem: str | None, created: str) -> tuple[CostProfile, Refit, list[Agreement]]:
    """Refit the cost profile of runs of the same model on the same GPUs to all their iterations together.

    Args:
        paths: run folders.
        stem: the profile's name; default: what was measured, and `-refit`.
        created: when, for the profile.

    Raises:
        LogError, SpecError, RecordsError: a folder is no run, or what is needed of it is damaged.
        UsageError: a run has too few measured iterations, no record of its jobs, or is of another model or machine.
    """
    runs = [_read(path) for path in paths]
    key = runs[0].key
    for path, other in zip(paths[1:], runs[1:], strict=True):
        if not key.matches(other.key) or key.ranks != other.key.ranks:
            raise UsageError(f"{path} is not of the same model, settings, GPU and number of ranks as {paths[0]}")
    # What was measured before is nearer than data sheets.
    old = min((run.profile for run in runs), key=lambda profile: profile.kind == "assumed")
    measured = [one for run in runs for one in run.iterations]
    held = np.array([one.number % 2 == 1 for one in measured])
    found = refit.refit(
        starting_from(old.cost, key.backend),
        old.iteration_seconds,
        [one.jobs for one in measured],
        np.array([one.seconds for one in measured]),
        held,
    )
    poor = None
    if found.after > refit.LIMIT:
        poor = (
            f"its refit is poor: iterations held out are missed by {found.after:.1%} on average "
            f"(limit {refit.LIMIT:.0%}); calibrate again on an idle machine"
        )
    local = [(one.jobs.tokens / one.jobs.size).max() for one in measured]
    agreements = list(_agreements(measured, found))
    held_out = "; ".join(f"{one.run}, {one.scheduler}: {one.mape:.1%}" for one in agreements)
    ended = [one.ended for one in measured if one.ended is not None]
    days = f" in runs that ended on {datetime.fromtimestamp(max(ended), UTC):%Y-%m-%d}" if ended else ""
    profile = CostProfile(
        name=stem or f"{key.stem}-refit",
        kind="measured",
        description=(
            f"Refitted to {len(measured)} iterations{days}, medians of up to {max(one.launches for one in measured)} "
            f"launches, on {key.ranks} x {key.gpu}, from {old.basis}. Mean error of iterations held out: {held_out}."
        ),
        created=created,
        key=key,
        coefficients=cost_profiles.coefficients_of(found.cost),
        iteration=Iteration(seconds=found.iteration_seconds, iterations=found.iterations, mape=found.after),
        fit=Fit(
            of="iterations",
            points=int((~held).sum()),
            held_out=int(held.sum()),
            mape=found.after,
            p95=found.p95,
            fitted_mape=found.fitted,
            most_tokens=int(max(local)),
            sizes=tuple(sorted({int(size) for one in measured for size in one.jobs.size})),
            refused=poor,
        ),
    )
    return profile, found, agreements


def _agreements(measured: Sequence[Measured], found: Refit) -> Iterator[Agreement]:
    for run, scheduler in dict.fromkeys((one.run, one.scheduler) for one in measured):
        own = np.array([one.run == run and one.scheduler == scheduler for one in measured])
        seconds = np.array([one.seconds for one in measured])[own]
        errors, held = found.errors[own], found.held_out[own]
        yield Agreement(
            run=run,
            scheduler=scheduler,
            iterations=int(own.sum()),
            measured_ms=1e3 * float(seconds.mean()),
            predicted_ms=1e3 * float((seconds * (1 + errors)).mean()),
            mape=float(np.abs(errors[held]).mean()) if held.any() else float(np.abs(errors).mean()),
        )


def _read(path: Path) -> _Run:
    folder = runfolder.existing(path)
    spec = config.load(folder.spec, environ={}).spec
    if spec.runner != "builtin" or spec.mode != "launches":
        raise UsageError(f"{path} was not made by launches of the built-in worker, whose jobs are recorded")
    header: RunHeader | None = None
    iterations: list[Measured] = []
    for case in CASES:
        times: dict[tuple[int, tuple[int, ...]], list[tuple[float, float | None]]] = {}
        for file in sorted((path / "launches").glob(f"*-{case}/records.jsonl")):
            read = records.read(file)
            header = header or read.header
            for record in read.iterations:
                if record.iteration > spec.training.warmup_iterations and record.seconds and record.jobs:
                    times.setdefault((record.iteration, record.jobs), []).append((record.seconds, record.ended))
        scheduler = (spec.cases.baseline if case == "baseline" else spec.cases.dcp).scheduler
        iterations += [
            Measured(
                run=spec.name,
                scheduler=scheduler,
                number=number,
                jobs=PlannedIteration.recorded(jobs, spec.topology.domain_size),
                seconds=float(np.median([seconds for seconds, _ in found])),
                launches=len(found),
                ended=max((ended for _, ended in found if ended is not None), default=None),
            )
            for (number, jobs), found in sorted(times.items())
        ]
    if len(iterations) < refit.LEAST:
        raise UsageError(
            f"{path} has {len(iterations)} measured iterations with their jobs; a refit needs at least {refit.LEAST}"
        )
    profile = profile_of(path) or cost_profiles.assumed(spec)
    return _Run(spec.name, profile, _key(spec, header), tuple(iterations))


def _key(spec: Spec, header: RunHeader | None) -> Key:
    key = cost_profiles.key_of(spec, (header.device if header else None) or "cpu")
    if header is None:
        return key
    return key.model_copy(update={"backend": header.attention, "versions": dict(header.versions) or key.versions})
