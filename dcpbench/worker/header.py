"""What a launch says of itself before its first iteration: the header of its records."""

from __future__ import annotations

import sys
from importlib import metadata

import torch
import torch.distributed as dist

from dcpbench.dcp import refit_log
from dcpbench.dcp.schedulers import plans_with_costs
from dcpbench.dcp.workload import Scheduler
from dcpbench.plan import CaseName, Launch
from dcpbench.records import RunHeader
from dcpbench.worker.model import flops
from dcpbench.worker.parameters import FlatParameters


def header_of(
    launch: Launch,
    case: CaseName,
    scheduler: Scheduler,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    flat: FlatParameters,
    optimizer_bytes: int,
    group_bytes: int,
) -> RunHeader:
    """The header of a case's records.

    Args:
        launch: what is run.
        case: of which case.
        scheduler: the case's.
        dtype: the compute type.
        device: the rank's.
        attention: name of the backend in use.
        flat: weights and gradients.
        optimizer_bytes: memory of the optimizer's state on this rank.
        group_bytes: memory that communication holds on this rank.
    """
    spec = launch.spec
    per_token, per_square = flops(spec.model)
    return RunHeader(
        case=case,
        launch=launch.id,
        mode="lockstep" if launch.case == "lockstep" else None,
        world_size=dist.get_world_size(),
        domain_size=spec.topology.domain_size,
        cp=spec.topology.cp,
        global_batch_size=spec.training.global_batch_size,
        iterations=spec.training.iterations,
        warmup_iterations=spec.training.warmup_iterations,
        scheduler=scheduler.name,
        costs=planned_with(launch, scheduler),
        padding=spec.cases.padding,
        capacity=spec.cases.max_seqlen_per_dp_cp_rank,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(dtype).removeprefix("torch."),
        attention=attention,
        flops_per_token=per_token,
        flops_per_squared_length=per_square,
        parameters=flat.count,
        cp_sizes=scheduler.group_sizes(),
        group_memory_bytes=group_bytes,
        parameter_bytes=flat.weight_bytes,
        gradient_bytes=flat.grad.nbytes,
        optimizer_bytes=optimizer_bytes,
        versions=versions_of(device),
    )


def refitted(launch: Launch, scheduler: Scheduler) -> bool:
    """Whether the coefficients that a scheduler plans with are refitted in this launch."""
    spec = launch.spec
    return plans_with_costs(scheduler.name) and bool(refit_log.starts(spec.training, spec.schedule.refit))


def planned_with(launch: Launch, scheduler: Scheduler) -> str | None:
    """The cost profile that a scheduler plans with, in words."""
    if launch.costs is None or not plans_with_costs(scheduler.name):
        return None
    every = f", refitted every {launch.spec.schedule.refit} iterations" if refitted(launch, scheduler) else ""
    return launch.costs.basis + every


def versions_of(device: torch.device) -> dict[str, str]:
    """Versions of what decides numbers and speed."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda or "unknown"
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for name in ("numpy", "triton", "transformer-engine", "flash-attn"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
