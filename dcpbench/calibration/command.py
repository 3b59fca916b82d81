"""`dcpbench calibrate`: one launch that times microbatches, or finished runs, made into a cost profile.

What a calibration leaves beside `NAME.json`: the picture `NAME.png`, and the folder `NAME-launch` with the launch's
log, its timings and its records.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from scipy.optimize import least_squares

from dcpbench import campaign, preflight, records
from dcpbench.analysis.predicted import planned
from dcpbench.calibration import fit, from_runs, points
from dcpbench.calibration.fit import Sample, paced
from dcpbench.calibration.from_runs import Agreement
from dcpbench.checks.gpus import survey
from dcpbench.data.prepare import prepare
from dcpbench.data.stream import SampleStream
from dcpbench.dcp import cost_profiles, schedulers
from dcpbench.dcp.cost_profiles import CostProfile, Iteration
from dcpbench.dcp.costs import CostModel, squares_of
from dcpbench.dcp.iterations import PlannedIteration, iteration_times
from dcpbench.dcp.kernel_choice import starting_from
from dcpbench.dcp.refit import Refit
from dcpbench.dcp.timings import FILE, Calibration, Point, Timings
from dcpbench.dcp.workload import PaddingRule
from dcpbench.errors import RecordsError, ScheduleError, SpecError, UsageError
from dcpbench.launch import Listener
from dcpbench.launching.interrupts import Interrupts
from dcpbench.plan import Launch
from dcpbench.runfolder import layout as runfolder
from dcpbench.runfolder.layout import RunFolder, write_bytes, write_text
from dcpbench.spec import Spec

Floats = NDArray[np.float64]

LAUNCH = "calibration"
MEASURED = "default_dynamic_cp"
"""The scheduler whose iterations show what they take beside their microbatches: it uses every size it has."""
ITERATIONS, WARMUP = 16, 4
SECONDS = 8.0
"""How long repetitions may take beyond the least number of them."""
MISS, PACE = 0.01, 0.3
"""All iterations missed by the first count as much as a pace that is off 1 by the second."""


@dataclass(frozen=True)
class Calibrated:
    """A profile that was made, where it lies, and what it rests on."""

    profile: CostProfile
    file: Path | None
    samples: tuple[Sample, ...] = ()
    picture: str | None = None
    """The picture's file, or why there is none."""


def measured_spec(spec: Spec, ranks: int | None = None) -> Spec:
    """The spec of the launch: the same model, data and settings, on so many ranks, for a few iterations.

    Raises:
        SpecError: another runner trains, or ranks are not divided by context parallelism alone.
    """
    if spec.runner != "builtin":
        raise SpecError(f"runner is {spec.runner}: only the built-in worker is calibrated; set runner to builtin")
    # How pairs are compared is nothing to a single launch, and may forbid it.
    changed = spec.model_dump(exclude={"mode", "lockstep", "decision"})
    changed["training"] |= {
        "iterations": ITERATIONS,
        "warmup_iterations": WARMUP,
        "profile_iterations": (),
        "save_path": None,
    }
    changed["cases"] |= {"dcp": {"scheduler": MEASURED}, "min_dynamic_context_parallel_size": 1}
    changed["schedule"] |= {"refit": 0}
    changed["launches"] |= {"pairs": 1}
    if ranks is not None:
        changed["topology"] |= {"nodes": 1, "gpus_per_node": ranks, "cp": ranks, "tp": 1, "pp": 1}
    return Spec.model_validate(changed)


def calibrate(
    spec: Spec, out: Path | None, *, environ: Mapping[str, str], listener: Listener, interrupts: Interrupts
) -> Calibrated:
    """Time microbatches of this spec (see `measured_spec`) on this machine, fit, and write the profile.

    Args:
        spec: what is calibrated.
        out: a `.json` file, or a folder; default: the user's profile folder, where `schedule.costs: auto` finds it.
        environ: the variables of this process.
        listener: told of the launch.
        interrupts: of this process.

    Raises:
        SpecError, PreflightError, DataError: the spec cannot run here.
        LaunchError, LaunchTimeout, RecordsError: the launch failed; names its log.
    """
    gpus = survey(environ)
    key = cost_profiles.key_of(spec, campaign.device_name(spec, gpus))
    # Profiles of one model for short and for long samples lie beside each other.
    file = _file(out, f"{key.stem}-{spec.cases.max_seqlen_per_dp_cp_rank}-tokens")
    folder = RunFolder(file.with_name(f"{file.stem}-launch").resolve())
    report = preflight.check(spec, environ=environ, folder=folder.path, gpus=gpus)
    campaign.set_aside(folder.path)
    folder.path.mkdir(parents=True)
    listener.phase("preparing data")
    prepare(spec, folder.data)
    stream = SampleStream.open(folder.data)
    preflight.check(spec, environ=environ, stream=stream, folder=folder.path, gpus=gpus)

    scheduler = schedulers.of_case(spec, "dcp", None)
    lengths = np.concatenate([stream.lengths(stream.batch(i + 1)) for i in range(ITERATIONS)])
    start = cost_profiles.assumed(spec).cost
    chosen = points.choose(
        lengths.tolist(),
        scheduler.group_sizes(),
        spec.cases.max_seqlen_per_dp_cp_rank,
        scheduler.padding,
        planned_jobs(spec, stream, start),
    )
    launch = Launch(
        id=LAUNCH,
        case="dcp",
        pair=1,
        position=1,
        spec=spec,
        folder=folder.launch(LAUNCH),
        data=folder.data,
        calibration=Calibration(points=chosen, seconds=SECONDS),
    )
    runfolder.describe(folder, spec, [launch])
    listener.planned([launch])
    sizes = ", ".join(map(str, scheduler.group_sizes()))
    listener.note(f"timing {len(chosen)} microbatches on CP sizes {sizes}, then {ITERATIONS} iterations")
    executor = campaign.TorchrunExecutor(listener, environ, report.device == "cpu", interrupts)
    campaign.walk([launch], ledger_file=folder.ledger, executor=executor, listener=listener, interrupts=interrupts)

    timings = _timings(launch.folder / FILE, len(chosen))
    samples = samples_of(chosen, timings, scheduler.padding)
    cost = fit.fit(samples, starting_from(start, timings.backend))
    recorded = records.read(launch.records)
    header = recorded.header
    versions = key.versions | (header.versions if header else {})
    profile = CostProfile(
        name=file.stem,
        kind="measured",
        description=f"Measured by dcpbench calibrate: spec {spec.name}, {spec.topology.world_size} ranks, {key.gpu}.",
        created=_now(),
        key=key.model_copy(update={"backend": timings.backend, "versions": versions}),
        coefficients=cost_profiles.coefficients_of(cost),
        fit=fit.judge(samples, cost),
    )
    executed = list(planned(spec, "dcp", stream, None, range(WARMUP + 1, ITERATIONS + 1)))
    seconds = {record.iteration: record.seconds for record in recorded.iterations if record.seconds}
    if any(iteration not in seconds for iteration in range(WARMUP + 1, ITERATIONS + 1)):
        raise RecordsError(f"{launch.records} lacks the time of an iteration; calibrate again")
    measured = np.array([seconds[iteration] for iteration in range(WARMUP + 1, ITERATIONS + 1)])
    profile = with_iterations(profile, executed, measured)
    write_text(file, cost_profiles.dump(profile))
    return Calibrated(profile, file, tuple(samples), _picture(profile, samples, file.with_suffix(".png")))


def samples_of(chosen: Sequence[Point], timings: Timings, padding: PaddingRule) -> list[Sample]:
    """Points and their timings as what the fit takes."""
    return [
        Sample(
            size=point.size,
            tokens=sum(padding.pad(length, point.size) for length in point.lengths),
            squares=sum(squares_of(length, point.size) for length in point.lengths),
            real=float(sum(length**2 for length in point.lengths)),
            seconds=timing.seconds,
            kind=point.kind,
            held_out=point.held_out,
        )
        for point, timing in zip(chosen, timings.timings, strict=True)
    ]


def with_iterations(profile: CostProfile, executed: Sequence[PlannedIteration], measured: Floats) -> CostProfile:
    """The profile brought to the pace of executed iterations, with what they took beyond their microbatches.

    Two numbers are fitted: a factor for all that the device does, since clocks under lasting load are not those of
    short bursts, and the constant of an iteration. Each iteration judges a fit to all the others: half of a few
    iterations tell the two numbers badly apart, and the other half would judge the luck of the draw.
    """
    scale = float(np.median(measured))

    def predicted(values: Floats) -> Floats:
        return iteration_times(executed, paced(profile.cost, float(values[0]))) + scale * float(values[1])

    def fitted(used: NDArray[np.bool_]) -> Floats:
        def residuals(values: Floats) -> Floats:
            errors = (predicted(values) / measured - 1)[used]
            return np.append(errors / np.sqrt(len(errors)) / MISS, (values[0] - 1) / PACE)

        found: Floats = least_squares(
            residuals,
            np.array([1.0, 0.05]),
            bounds=([0.5, 0.0], [2.0, 1.0]),
            loss="soft_l1",
            diff_step=[1e-4, 1e-3],
            max_nfev=100,
        ).x
        return found

    every = np.ones(len(measured), np.bool_)
    others = ~np.eye(len(measured), dtype=np.bool_)
    mape = float(np.mean([abs((predicted(fitted(used)) / measured - 1)[~used][0]) for used in others]))
    found = fitted(every)
    assert profile.fit is not None
    refused = profile.fit.refused
    if refused is None and mape > fit.ITERATION_LIMIT:
        refused = (
            f"its fit is poor: whole iterations held out one at a time are missed by {mape:.1%} on average (limit "
            f"{fit.ITERATION_LIMIT:.0%}), though microbatches are not; calibrate again on an idle machine"
        )
    pace = float(found[0])
    return profile.model_copy(
        update={
            "coefficients": cost_profiles.coefficients_of(paced(profile.cost, pace)),
            "iteration": Iteration(seconds=scale * float(found[1]), iterations=len(measured), mape=mape, pace=pace),
            "fit": profile.fit.model_copy(update={"refused": refused}),
        }
    )


def planned_jobs(spec: Spec, stream: SampleStream, cost: CostModel) -> list[tuple[int, tuple[int, ...]]]:
    """(CP size, real lengths) of every microbatch that the schedulers make of the first batches."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for name in schedulers.SCHEDULERS:
        changed = spec.model_copy(
            update={
                "cases": spec.cases.model_copy(update={"dcp": spec.cases.dcp.model_copy(update={"scheduler": name})})
            }
        )
        try:
            scheduler = schedulers.of_case(changed, "dcp", cost)
            for number in range(1, ITERATIONS + 1):
                lengths = stream.lengths(stream.batch(number)).tolist()
                jobs = scheduler.plan(lengths).jobs
                found += [(job.size, tuple(lengths[sample] for sample in job.samples)) for job in jobs]
        except (ScheduleError, SpecError):
            continue  # one that cannot serve this spec shows nothing about what will be run
    return found


def refit_runs(paths: Sequence[Path], out: Path | None) -> tuple[Calibrated, Refit, list[Agreement]]:
    """Refit the cost profile of finished runs to their iterations, and write the new profile where `out` says.

    Raises:
        LogError, SpecError, RecordsError, UsageError: see `from_runs.profile_from`.
    """
    stem = None if out is None or out.suffix != ".json" else _file(out, "").stem
    profile, found, agreements = from_runs.profile_from(paths, stem, _now())
    written = None if out is None else _file(out, profile.name)
    if written is not None:
        write_text(written, cost_profiles.dump(profile))
    return Calibrated(profile, written), found, agreements


def _file(out: Path | None, stem: str) -> Path:
    """The profile's file; its folder is made.

    Raises:
        UsageError: a name that profiles cannot have.
    """
    file = cost_profiles.user_folder(os.environ) / f"{stem}.json" if out is None else out
    if out is not None and out.suffix != ".json":
        file = out / f"{stem}.json"
    if not file.stem[:1].isalnum() or not all(c.isalnum() or c in "._-" for c in file.stem) or not file.stem.isascii():
        raise UsageError(
            f"--out {file.name}: a profile's name begins with a letter or digit and holds letters, digits, . _ -"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _timings(file: Path, wanted: int) -> Timings:
    try:
        found = Timings.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise RecordsError(f"the launch ended well, but {file} cannot be read: {type(error).__name__}") from None
    if len(found.timings) != wanted:
        raise RecordsError(f"{file} holds {len(found.timings)} timings of {wanted}")
    return found


def _picture(profile: CostProfile, samples: Sequence[Sample], file: Path) -> str:
    try:
        from dcpbench.calibration import picture  # noqa: PLC0415 - matplotlib, half a second

        write_bytes(file, picture.png(profile, samples))
    except ImportError:
        return "no picture: matplotlib is not installed"
    return str(file)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
