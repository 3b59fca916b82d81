"""Walk the plan: one launch after the other, written down as it happens, resumable.

`walk` knows nothing of processes: an `Executor` makes the launches, so that order and failure are
tested without torchrun and without waiting.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dcpbench import launch as launch_module
from dcpbench import plan, preflight, telemetry
from dcpbench.checks.gpus import GpuSurvey, survey
from dcpbench.data.prepare import prepare
from dcpbench.data.stream import SampleStream
from dcpbench.dcp import cost_profiles
from dcpbench.dcp.cost_profiles import CostProfile
from dcpbench.errors import DcpbenchError, Interrupted, LaunchError, RecordsError
from dcpbench.launch import LaunchOutcome, Listener
from dcpbench.launching import following
from dcpbench.launching.interrupts import Interrupts
from dcpbench.megatron import lengths
from dcpbench.plan import Launch
from dcpbench.records import IterationRecord
from dcpbench.redact import redact_value
from dcpbench.runfolder import layout as runfolder
from dcpbench.runfolder import ledger
from dcpbench.runfolder.layout import RunFolder, write_text
from dcpbench.spec import Spec


class Executor(Protocol):
    """Makes launches."""

    def rest(self, seconds: float) -> None:
        """Let the machine cool down."""

    def run(self, launch: Launch) -> LaunchOutcome:
        """Run one launch to its end, whatever that is."""


@dataclass(frozen=True)
class TorchrunExecutor:
    """Launches for real: torchrun, with telemetry beside it where the ranks are on GPUs."""

    listener: Listener
    environ: Mapping[str, str]
    cpu: bool
    interrupts: Interrupts

    def rest(self, seconds: float) -> None:
        """See `Executor`."""
        self.listener.phase(f"cooling down for {seconds:g} s")
        time.sleep(seconds)

    def run(self, launch: Launch) -> LaunchOutcome:
        """See `Executor`."""
        nvml = None if self.cpu else telemetry.load_nvml()
        ranks = launch.spec.topology.gpus_per_node
        with telemetry.sampling(launch.folder / "gpu.csv", ranks, self.environ, nvml=nvml):
            return launch_module.run(
                launch, listener=self.listener, environ=self.environ, cpu=self.cpu, interrupts=self.interrupts
            )


@dataclass(frozen=True)
class Prepared:
    """A run that is ready for its first launch."""

    folder: RunFolder
    launches: list[Launch]
    cpu: bool
    """Whether the ranks compute on the CPU."""
    gpus: GpuSurvey
    """What the GPUs were, and did, before the first launch."""


def begin(spec: Spec, path: Path, *, resume: bool, environ: Mapping[str, str], listener: Listener) -> Prepared:
    """Everything before the first launch: preflight, the run folder, its plan, the prepared data.

    What needs no data is checked before anything is written, and all data are ready before any rank
    starts: no rank waits in a collective while another one tokenises.

    Raises:
        UsageError, SpecError: the folder cannot be used; see `runfolder.open_for`.
        PreflightError: this spec cannot run here.
        DataError: the data cannot be prepared.
    """
    folder = runfolder.open_for(spec, path, resume=resume)
    gpus = survey(environ)
    preflight.check(spec, environ=environ, folder=path, gpus=gpus)
    launches = plan.build(spec, path, costs_of(spec, folder, gpus, resume=resume))
    # Whether a layout control follows depends on how the launches end; the A/A control of lockstep always does.
    control = plan.lockstep_control(launches)
    planned = [*launches, *([control] if control else [])]
    listener.planned(planned)
    runfolder.describe(folder, spec, planned)
    listener.phase("preparing data")
    prepare(spec, folder.data)
    stream = SampleStream.open(folder.data)
    if spec.runner == "megatron_lm":
        lengths.write(spec, folder.data)
    report = preflight.check(spec, environ=environ, stream=stream, folder=path, gpus=gpus)
    for finding in report.findings:
        if finding.level == "warn":
            listener.note(f"caution: {finding.message}")
    return Prepared(folder, launches, report.device == "cpu", gpus)


def costs_of(spec: Spec, folder: RunFolder, gpus: GpuSurvey, *, resume: bool) -> CostProfile | None:
    """The cost profile of a run: what `schedule.costs` means here, or what the run began with if it is resumed.

    None for a runner that plans by itself.

    Raises:
        SpecError: a named profile cannot be used.
    """
    if spec.runner != "builtin":
        return None
    if resume and folder.costs.is_file():
        return cost_profiles.load(folder.costs)
    return cost_profiles.resolve(spec, device_name(spec, gpus))


def device_name(spec: Spec, gpus: GpuSurvey) -> str:
    """What ranks of this spec compute on: `cpu`, or the GPU's name as the driver has it."""
    cpu = preflight.resolve_device(spec, gpus) == "cpu" or not gpus.gpus
    return "cpu" if cpu else gpus.gpus[0].model


def walk(
    launches: list[Launch],
    *,
    ledger_file: Path,
    executor: Executor,
    listener: Listener,
    interrupts: Interrupts,
) -> list[LaunchOutcome]:
    """Make every launch that is not complete yet, in order.

    Args:
        launches: the whole plan. Those that ledger and records show as complete are passed over; what
            is left of an unfinished one is moved aside to `<id>.failed-N`, never overwritten.
        ledger_file: appended to.
        executor: makes the launches.
        listener: told of what is passed over.
        interrupts: deferred while a launch runs, so that its end is always written down.

    Raises:
        LaunchError, RecordsError: a launch failed; with `launches.keep_going` raised only after the
            last launch, for the first that failed.
        LaunchTimeout: one ran out of time.
        Interrupted: by a signal; no further launch was made.
    """
    outcomes: list[LaunchOutcome] = []
    done = complete_launches(launches, ledger_file)
    for launch in launches:
        if launch.id in done:
            listener.note(f"{launch.id} is complete already")
            outcomes.append(done[launch.id])
            continue
        if launch.spec.launches.cooldown:
            executor.rest(launch.spec.launches.cooldown)
        set_aside(launch.folder)
        outcome = _make(launch, ledger_file, executor, interrupts)
        outcomes.append(outcome)
        if interrupts.count or (outcome.error() and not launch.spec.launches.keep_going):
            break
    _raise_failure(launches, outcomes, interrupts)
    return outcomes


def make_control(
    control: Launch | None,
    launches: list[Launch],
    *,
    ledger_file: Path,
    executor: Executor,
    listener: Listener,
    interrupts: Interrupts,
) -> None:
    """Make the control where it is wanted, after all launches are complete; see `plan.control`.

    One that fails costs the report what it would have shown and the run nothing else: the report says so.

    Raises:
        Interrupted: by a signal.
    """
    if control is None or not control_wanted(control, launches):
        return
    listener.note(f"{_CONTROLS[control.id]}: {control.id}")
    try:
        walk([control], ledger_file=ledger_file, executor=executor, listener=listener, interrupts=interrupts)
    except (LaunchError, RecordsError) as error:
        listener.note(f"caution: {error}")


_CONTROLS = {
    plan.LAYOUT_CONTROL: "one more launch of the baseline, packed in another order",
    plan.LOCKSTEP_CONTROL: "one more lockstep launch, with the baseline on both sides (A/A)",
}
"""Id of a control -> what it is."""


def control_wanted(control: Launch, launches: list[Launch]) -> bool:
    """Whether it is the A/A control of lockstep, or the launches leave the gates without a floor worth the name.

    With two pairs there is one launch pair of each case; with more, all launches of a case may have the same
    losses to the last bit, as deterministic ones do. Either way nothing is known of what another layout changes.
    """
    return not only_where_equal(control) or _equal_within_cases(launches)


def only_where_equal(control: Launch) -> bool:
    """Whether it depends on the other launches' losses that the control is made; else it is made anyway."""
    settings = control.spec.launches
    return control.id == plan.LAYOUT_CONTROL and settings.layout_control == "auto" and settings.pairs > 2


def _equal_within_cases(launches: list[Launch]) -> bool:
    losses: dict[str, set[tuple[float | None, ...]]] = {}
    for launch in launches:
        found = (record for record in following.follow(launch).read() if isinstance(record, IterationRecord))
        losses.setdefault(launch.case, set()).add(tuple(record.loss for record in found))
    return all(len(series) == 1 for series in losses.values())


def _make(launch: Launch, ledger_file: Path, executor: Executor, interrupts: Interrupts) -> LaunchOutcome:
    outcome: LaunchOutcome | None = None
    try:
        with interrupts.deferred():
            launch.folder.mkdir(parents=True)
            # The worker needs real paths; credentials are nothing it could use.
            content = redact_value(launch.model_dump(mode="json"), identity=False)
            write_text(launch.file, json.dumps(content, indent=2, allow_nan=False) + "\n")
            ledger.append(ledger_file, "start", launch.id)
            outcome = executor.run(launch)
            ledger.append(
                ledger_file,
                "end",
                launch.id,
                status=outcome.status,
                exit_code=outcome.exit_code,
                reason=outcome.reason,
            )
    except Interrupted:
        if outcome is None:
            raise
    return outcome


def _raise_failure(launches: list[Launch], outcomes: list[LaunchOutcome], interrupts: Interrupts) -> None:
    failed = [outcome for outcome in outcomes if outcome.status != "completed"]
    if interrupts.count:
        error: DcpbenchError | None = interrupts.error()
        sentences = [str(error)]
        told = outcomes
    elif failed:
        error = failed[0].error()
        sentences = [str(error)]
        told = [outcome for outcome in outcomes if outcome is not failed[0]]
    else:
        return
    assert error is not None
    if told:
        sentences.append(", ".join(f"{outcome.launch} {outcome.status}" for outcome in told))
    if len(outcomes) < len(launches):
        sentences.append(f"not launched: {', '.join(launch.id for launch in launches[len(outcomes) :])}")
    sentences.append(f"records and logs are kept in {launches[0].folder.parent}; --resume goes on")
    raise type(error)("; ".join(sentences))


def complete_launches(launches: list[Launch], ledger_file: Path) -> dict[str, LaunchOutcome]:
    """The launches of a plan that ended well, by the ledger *and* by their records."""
    ends = ledger.last_end(ledger_file)
    done: dict[str, LaunchOutcome] = {}
    for launch in launches:
        end = ends.get(launch.id)
        if end is None or end.status != "completed":
            continue
        if (found := following.complete(launch)) is not None:
            iterations, seconds = found
            done[launch.id] = LaunchOutcome(launch.id, "completed", end.exit_code, None, seconds, iterations)
    return done


def set_aside(folder: Path) -> Path | None:
    """Move what an earlier attempt left to `<folder>.failed-N`; None when there is nothing."""
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.failed-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside
