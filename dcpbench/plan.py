"""A spec as an ordered list of launches. Pure: starts nothing, reads nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dcpbench.dcp.cost_profiles import CostProfile
from dcpbench.dcp.timings import Calibration
from dcpbench.errors import SpecError
from dcpbench.megatron import environment, flags, probe
from dcpbench.spec import Spec

CaseName = Literal["baseline", "dcp"]
LaunchCase = Literal["baseline", "dcp", "lockstep"]
"""What one launch computes; `lockstep` is both cases."""


class Launch(BaseModel):
    """One `torchrun` of one case, or of both in lockstep.

    Its JSON form, `launch.json`, is all the built-in worker is given.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    """`<pair, two digits>-<case>`, or the name of a control; also the name of the launch's folder."""
    case: LaunchCase
    pair: int
    """Counted from 1; of lockstep launches, the number; 0 for a control, which is in no pair."""
    position: int
    """Place in the order of all launches, counted from 1."""
    spec: Spec
    folder: Path
    """The launch's own folder, absolute: `records.jsonl`, `stdout.log`, `launch.json`, `gpu.csv`."""
    data: Path
    """The prepared data, absolute; see `data/stream.py`."""
    costs: CostProfile | None = None
    """The cost profile that every rank plans with; None: the scheduler's own default."""
    calibration: Calibration | None = None
    """What to time before the first iteration; only `dcpbench calibrate` asks for it."""

    @property
    def records(self) -> Path:
        """Where the built-in worker writes its records."""
        return self.folder / "records.jsonl"

    @property
    def log(self) -> Path:
        """Where the console output is captured."""
        return self.folder / "stdout.log"

    @property
    def file(self) -> Path:
        """Where this launch is stored for its workers."""
        return self.folder / "launch.json"


def case_order(pairs: int, order: str) -> list[tuple[int, CaseName]]:
    """(pair, case) in launch order. `balanced` is AB BA AB ... with A the baseline."""
    forward: tuple[CaseName, CaseName] = ("baseline", "dcp")
    backward: tuple[CaseName, CaseName] = ("dcp", "baseline")
    result: list[tuple[int, CaseName]] = []
    for pair in range(1, pairs + 1):
        if order == "balanced":
            first = forward if pair % 2 else backward
        else:
            first = forward if order == "baseline_first" else backward
        result.extend((pair, case) for case in first)
    return result


def places(order: str, launch: int, iteration: int) -> tuple[CaseName, CaseName]:
    """The cases in the order in which a lockstep launch computes an iteration; all numbers count from 1.

    `balanced` alternates, and the next launch begins with the other case. The control, launch 0, has the order of
    launch 1: the same batches lie in the same places.
    """
    baseline_first = (iteration + max(launch, 1)) % 2 == 0 if order == "balanced" else order == "baseline_first"
    return ("baseline", "dcp") if baseline_first else ("dcp", "baseline")


def _cases(spec: Spec) -> Sequence[tuple[int, LaunchCase]]:
    """(pair, case) of every launch of a run."""
    if spec.mode == "lockstep":
        return [(number, "lockstep") for number in range(1, spec.lockstep.launches + 1)]
    return case_order(spec.launches.pairs, spec.launches.order)


def build(spec: Spec, folder: Path, costs: CostProfile | None = None) -> list[Launch]:
    """All launches of a run, in order; each plans with `costs`."""
    root = folder.resolve()
    return [
        Launch(
            id=f"{pair:02d}-{case}",
            case=case,
            pair=pair,
            position=position,
            spec=spec,
            folder=root / "launches" / f"{pair:02d}-{case}",
            data=root / "data",
            costs=costs,
        )
        for position, (pair, case) in enumerate(_cases(spec), start=1)
    ]


LAYOUT_CONTROL = "layout-control"
"""The id of the layout control."""
REVERSED = ":reversed"
"""Suffix of a scheduler's name that makes another layout; see `dcp/schedulers/reordered.py`."""


def layout_control(launches: Sequence[Launch], *, cpu: bool) -> Launch | None:
    """One more launch of the baseline, after all of a plan, that packs each batch in reversed order; None without one.

    In float32 the gates' absolute limits lie far above rounding and all count, so there it has to be asked for.
    Whether it takes place may also depend on how the others end; see `campaign.control_wanted`.
    """
    first = next((launch for launch in launches if launch.case == "baseline"), None)
    if first is None or first.spec.runner != "builtin":
        return None
    spec = first.spec
    float32 = spec.training.dtype == "float32" or (spec.training.dtype == "auto" and cpu)
    asked = spec.launches.layout_control
    if asked == "never" or (asked == "auto" and (spec.launches.pairs < 2 or float32)):
        return None
    other = spec.cases.baseline.model_copy(update={"scheduler": spec.cases.baseline.scheduler + REVERSED})
    return first.model_copy(
        update={
            "id": LAYOUT_CONTROL,
            "pair": 0,
            "position": len(launches) + 1,
            "spec": spec.model_copy(update={"cases": spec.cases.model_copy(update={"baseline": other})}),
            "folder": first.folder.with_name(LAYOUT_CONTROL),
        }
    )


LOCKSTEP_CONTROL = "aa-lockstep"
"""The id of the A/A control of lockstep."""


def lockstep_control(launches: Sequence[Launch]) -> Launch | None:
    """One more lockstep launch, after all of a plan, with the baseline on both sides; None without one."""
    first = next((launch for launch in launches if launch.case == "lockstep"), None)
    if first is None:
        return None
    spec = first.spec
    asked = spec.lockstep.control
    if asked == "never" or (asked == "auto" and spec.compared_with_itself):
        return None
    changed = {
        "cases": spec.cases.model_copy(update={"dcp": spec.cases.baseline}),
        # Its weights are those of the other launches once more.
        "training": spec.training.model_copy(update={"save_path": None}),
    }
    return first.model_copy(
        update={
            "id": LOCKSTEP_CONTROL,
            "pair": 0,
            "position": len(launches) + 1,
            "spec": spec.model_copy(update=changed),
            "folder": first.folder.with_name(LOCKSTEP_CONTROL),
        }
    )


def control(launches: Sequence[Launch], *, cpu: bool) -> Launch | None:
    """The control that a plan may have: in lockstep the A/A control, else the layout control."""
    return lockstep_control(launches) or layout_control(launches, cpu=cpu)


@dataclass(frozen=True)
class Command:
    """What one launch starts. `environment` is set on top of what every launch gets; see `launch.environment`."""

    argv: list[str]
    folder: Path | None = None
    """The working directory; None: that of dcpbench."""
    environment: Mapping[str, str] = field(default_factory=dict)


def command(launch: Launch, environ: Mapping[str, str] | None = None) -> Command:
    """What starts a launch.

    Args:
        launch: one of a plan.
        environ: the variables of this process, where they matter to the launch's own.

    Raises:
        SpecError: the spec lacks what its runner needs.
    """
    return RUNNERS[launch.spec.runner](launch, environ or {})


def torchrun(launch: Launch) -> list[str]:
    """The argument list of a launch."""
    return command(launch).argv


def _builtin(launch: Launch, _: Mapping[str, str]) -> Command:
    return Command([*_ranks(launch), "-m", "dcpbench.worker", str(launch.file)])


def _megatron_lm(launch: Launch, environ: Mapping[str, str]) -> Command:
    spec = launch.spec
    if spec.megatron.checkout is None:
        raise SpecError("megatron.checkout is not set: runner megatron_lm needs the root of a Megatron-LM checkout")
    checkout = spec.megatron.checkout.absolute()
    arguments = flags.arguments(spec, launch.case, folder=launch.folder, data=launch.data)
    return Command(
        [*_ranks(launch), str(checkout / probe.SCRIPT), *arguments],
        folder=checkout,
        environment=environment.variables(spec, checkout, environ),
    )


RUNNERS: dict[str, Callable[[Launch, Mapping[str, str]], Command]] = {
    "builtin": _builtin,
    "megatron_lm": _megatron_lm,
}
"""`runner` of a spec -> what makes its command."""


def _ranks(launch: Launch) -> list[str]:
    """torchrun with an own rendezvous on a free local port."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={launch.spec.topology.world_size}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        f"--rdzv-id={launch.id}",
        "--max-restarts=0",
    ]
