"""`dcpbench calibrate`: one launch that times microbatches, or a finished run, made into a cost profile.

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
from pydantic import ValidationError

from dcpbench import campaign, config, preflight, records, runfolder
from dcpbench.calibration import fit, points, refit
from dcpbench.calibration.fit import Sample
from dcpbench.data.prepare import prepare
from dcpbench.data.stream import SampleStream
from dcpbench.dcp import cost_profiles
from dcpbench.dcp.cost_profiles import CostProfile, Fit, Iteration
from dcpbench.dcp.costs import squares_of
from dcpbench.dcp.timings import FILE, Calibration, Point, Timings
from dcpbench.dcp.workload import PaddingRule
from dcpbench.errors import RecordsError, SpecError, UsageError
from dcpbench.gpus import survey
from dcpbench.interrupts import Interrupts
from dcpbench.launch import Listener
from dcpbench.plan import Launch
from dcpbench.predicted import PlannedIteration, iteration_times, planned, profile_of, scheduler_of
from dcpbench.runfolder import RunFolder, write_bytes, write_text
from dcpbench.spec import Spec

LAUNCH = "calibration"
MEASURED = "default_dynamic_cp"
"""The scheduler whose iterations show what they take beside their microbatches: it uses every size it has."""
ITERATIONS, WARMUP = 10, 3
SECONDS = 15.0
"""How long repetitions may take beyond the least number of them."""


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
    file = _file(out, key.stem)
    folder = RunFolder(file.with_name(f"{file.stem}-launch").resolve())
    report = preflight.check(spec, environ=environ, folder=folder.path, gpus=gpus)
    campaign.set_aside(folder.path)
    folder.path.mkdir(parents=True)
    listener.phase("preparing data")
    prepare(spec, folder.data)
    stream = SampleStream.open(folder.data)
    preflight.check(spec, environ=environ, stream=stream, folder=folder.path, gpus=gpus)

    scheduler = scheduler_of(spec, "dcp", None)
    lengths = np.concatenate([stream.lengths(stream.batch(i + 1)) for i in range(ITERATIONS)])
    chosen = points.choose(
        lengths.tolist(), scheduler.group_sizes(), spec.cases.max_seqlen_per_dp_cp_rank, scheduler.padding
    )
    launch = Launch(
        id=LAUNCH,
        case="dcp",
        pair=1,
        position=1,
        spec=spec,
        folder=folder.path / "launches" / LAUNCH,
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
    cost = fit.fit(samples, cost_profiles.assumed(spec).cost)
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
    profile = profile.model_copy(update={"iteration": iteration_of(profile, executed, measured)})
    write_text(file, cost_profiles.dump(profile))
    return Calibrated(profile, file, tuple(samples), _picture(profile, samples, file.with_suffix(".png")))


def samples_of(chosen: Sequence[Point], timings: Timings, padding: PaddingRule) -> list[Sample]:
    """Points and their timings as what the fit takes."""
    return [
        Sample(
            size=point.size,
            tokens=sum(padding.pad(length, point.size) for length in point.lengths),
            squares=sum(squares_of(length, point.size) for length in point.lengths),
            seconds=timing.seconds,
            kind=point.kind,
            held_out=point.held_out,
        )
        for point, timing in zip(chosen, timings.timings, strict=True)
    ]


def iteration_of(profile: CostProfile, executed: Sequence[PlannedIteration], measured: refit.Floats) -> Iteration:
    """What the executed iterations took beyond their predicted microbatches: the median, at least 0."""
    makespans = iteration_times(executed, profile.cost)
    seconds = max(0.0, float(np.median(measured - makespans)))
    errors = np.abs((makespans + seconds) / measured - 1)
    return Iteration(seconds=seconds, iterations=len(executed), mape=float(errors.mean()))


def refit_run(path: Path, out: Path | None) -> tuple[Calibrated, refit.Refit]:
    """Refit a finished run's cost profile to its iterations, and write the new profile where `out` says.

    Raises:
        LogError, SpecError, DataError: the folder is no run, or what is needed of it is damaged.
        UsageError: the run has too few measured iterations, or they cannot be planned again.
    """
    folder = runfolder.existing(path)
    spec = config.load(folder.spec, environ={}).spec
    if spec.runner != "builtin" or spec.mode != "launches":
        raise UsageError(f"{path} was not made by launches of the built-in worker, whose plans are known")
    old = profile_of(path) or cost_profiles.assumed(spec)
    stream = SampleStream.open(folder.data)
    window = range(spec.training.warmup_iterations + 1, spec.training.iterations + 1)
    executed: list[PlannedIteration] = []
    measured: list[float] = []
    header: records.RunHeader | None = None
    for case in ("baseline", "dcp"):
        again = list(planned(spec, case, stream, old.cost, window))
        for file in sorted((path / "launches").glob(f"*-{case}/records.jsonl")):
            found = records.read(file)
            header = header or found.header
            times = {record.iteration: record.seconds for record in found.iterations if record.seconds}
            for iteration, one in zip(window, again, strict=True):
                if iteration in times:
                    executed.append(one)
                    measured.append(times[iteration])
    if len(measured) < 8:
        raise UsageError(f"{path} has {len(measured)} measured iterations; a refit needs at least 8")
    found_refit = refit.refit(old.cost, old.iteration_seconds, executed, np.array(measured))
    poor = None
    if found_refit.after > refit.LIMIT:
        poor = (
            f"its refit is poor: iterations held out are missed by {found_refit.after:.1%} on average "
            f"(limit {refit.LIMIT:.0%}); calibrate again on an idle machine"
        )
    key = old.key or cost_profiles.key_of(spec, (header.device if header else None) or "cpu")
    profile = CostProfile(
        name=f"{key.stem}-refit" if out is None else _file(out, f"{key.stem}-refit").stem,
        kind="measured",
        description=f"Refitted to the iterations of run {spec.name}, from {old.basis}.",
        created=_now(),
        key=key,
        coefficients=cost_profiles.coefficients_of(found_refit.cost),
        iteration=Iteration(
            seconds=found_refit.iteration_seconds, iterations=found_refit.iterations, mape=found_refit.after
        ),
        fit=Fit(
            points=(found_refit.iterations + 1) // 2,
            held_out=found_refit.iterations // 2,
            mape=found_refit.after,
            p95=found_refit.p95,
            fitted_mape=found_refit.fitted,
            refused=poor,
        ),
    )
    written = None if out is None else _file(out, profile.name)
    if written is not None:
        write_text(written, cost_profiles.dump(profile))
    return Calibrated(profile, written), found_refit


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
