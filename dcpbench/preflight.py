"""Refuse before GPU time is spent: everything that can be known beforehand, for both cases at once.

`inspect` lists what it found, `check` raises when anything refuses. Without a `stream` only what
needs no data is looked at, so that a wrong topology is refused before a large file is tokenised.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from dcpbench.checks.findings import Finding, ok, refuse, warn
from dcpbench.checks.gpus import GpuSurvey, survey
from dcpbench.checks.servable import Stream, servable
from dcpbench.dcp import refit_log
from dcpbench.dcp.schedulers import plans_with_costs
from dcpbench.errors import PreflightError
from dcpbench.megatron import checks
from dcpbench.spec import FEWEST_TO_REFIT, Spec

KERNELS = {"flash": True, "cudnn": True, "sdpa": False, "reference": False, "auto": False}
"""Attention kernels by name, and whether one needs CUDA and a 16-bit type. These tables are written out because
the backends themselves import torch; a test compares the two."""
TRANSPORTS = {"symmetric": True, "collective": False, "auto": False}
"""Transports by name, and whether one needs CUDA."""
TE_COMMUNICATIONS = ("p2p", "a2a", "all_gather")
TE_MINIMUM = (2, 9)
"""Transformer Engine's first version without the convergence fault of packed sequences (Megatron-LM refuses older)."""
_RANK_BYTES = 256 * 2**20
"""Memory that one rank needs before it holds a model: an interpreter with torch."""
_LITTLE_SPACE, _ENOUGH_SPACE = 100 * 2**20, 2**30
_IDLE_SHARE = 0.05
"""Share of a GPU's memory that driver and display may hold while it still counts as idle."""


@dataclass(frozen=True)
class PreflightReport:
    """Everything that was looked at, in order."""

    device: Literal["cuda", "cpu"]
    findings: tuple[Finding, ...]

    @property
    def refusals(self) -> tuple[Finding, ...]:
        """The findings that forbid a launch."""
        return tuple(finding for finding in self.findings if finding.level == "refuse")

    def require(self) -> None:
        """Nothing, or the refusals.

        Raises:
            PreflightError: one sentence for each.
        """
        if self.refusals:
            raise PreflightError("\n".join(finding.message for finding in self.refusals))

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def resolve_device(spec: Spec, gpus: GpuSurvey) -> Literal["cuda", "cpu"]:
    """The device of a spec; `auto` is CUDA where the driver shows a GPU that CUDA may use."""
    if spec.topology.device != "auto":
        return spec.topology.device
    return "cuda" if gpus.gpus else "cpu"


def check(
    spec: Spec,
    *,
    environ: Mapping[str, str],
    stream: Stream | None = None,
    folder: Path | None = None,
    gpus: GpuSurvey | None = None,
) -> PreflightReport:
    """`inspect`, and an error if anything refuses.

    Raises:
        PreflightError: every refusal, one sentence a line.
    """
    report = inspect(spec, environ=environ, stream=stream, folder=folder, gpus=gpus)
    report.require()
    return report


def inspect(
    spec: Spec,
    *,
    environ: Mapping[str, str],
    stream: Stream | None = None,
    folder: Path | None = None,
    gpus: GpuSurvey | None = None,
) -> PreflightReport:
    """Look at a spec, its data and this machine. Starts and writes nothing.

    Args:
        spec: what is to run.
        environ: the environment that workers will get.
        stream: the prepared data; None before there are any.
        folder: the run folder; it need not exist.
        gpus: see `gpus.survey`; None asks the driver.
    """
    gpus = survey(environ) if gpus is None else gpus
    device = resolve_device(spec, gpus)
    findings = [*_RUNNERS[spec.runner](spec, device, environ, stream)]
    findings += [*_topology(spec), *_variables(environ), *_tolerances(spec), *_refit(spec)]
    findings += _gpus(spec, gpus) if device == "cuda" else _cpu(spec)
    findings += [*_paths(spec, folder), *servable(spec, stream)]
    return PreflightReport(device, tuple(findings))


def _builtin(spec: Spec, device: str, _: Mapping[str, str], __: Stream | None) -> Iterator[Finding]:
    top = spec.topology
    for name, words, size in (("tp", "tensor parallelism", top.tp), ("pp", "pipeline parallelism", top.pp)):
        if size > 1:
            yield refuse(name, f"topology.{name} is {size}: the built-in worker has no {words} yet; set it to 1")
    yield from _attention(spec, device)
    if spec.mode == "lockstep":
        sides = f"{spec.cases.baseline.scheduler} with itself (A/A)" if spec.compared_with_itself else "both cases"
        yield ok("mode", f"lockstep: {sides} at the same weights, in {spec.lockstep.launches} launches")
    load = spec.training.load_path
    if load is not None and not (load / ".metadata").is_file():
        yield refuse(
            "load_path",
            f"training.load_path {load} is no torch.distributed.checkpoint folder: it has no .metadata file",
        )


def _megatron(spec: Spec, device: str, environ: Mapping[str, str], stream: Stream | None) -> Iterator[Finding]:
    yield from checks.findings(spec, device=device, environ=environ, stream=stream)
    trouble = _te_version()
    if trouble is not None:
        yield refuse("transformer engine", f"runner megatron_lm: {trouble}")


_RUNNERS: dict[str, Callable[[Spec, str, Mapping[str, str], Stream | None], Iterator[Finding]]] = {
    "builtin": _builtin,
    "megatron_lm": _megatron,
}
"""`runner` of a spec -> what it asks of specs, data and this machine."""


def _topology(spec: Spec) -> Iterator[Finding]:
    top = spec.topology
    if top.nodes > 1:
        yield refuse("nodes", f"topology.nodes is {top.nodes}: only one node is supported yet; set it to 1")
    if top.domain_size < 2:
        yield refuse(
            "domain",
            "DP x CP is 1: one rank leaves nothing for dynamic context parallelism to decide; "
            "raise topology.gpus_per_node",
        )
    elif spec.training.global_batch_size < top.dp:
        yield refuse(
            "global batch",
            f"training.global_batch_size {spec.training.global_batch_size} is below DP {top.dp}: every data-parallel "
            f"rank of the baseline needs a sample; raise it to {top.dp} or more",
        )
    else:
        yield ok("topology", f"{top.world_size} ranks: CP {top.cp} x DP {top.dp}, a domain of {top.domain_size}")


def _attention(spec: Spec, device: str) -> Iterator[Finding]:
    name = spec.cases.attention
    first, slash, second = name.partition("/")
    transport, kernel = (first, second) if slash else ("auto", first)
    half = device == "cuda" and spec.training.dtype != "float32"
    trouble: str | None = None
    if first == "te":
        trouble = _transformer_engine(second or TE_COMMUNICATIONS[0], half)
    elif transport not in TRANSPORTS or kernel not in KERNELS:
        trouble = (
            f"cases.attention {name!r} is not known; choose {', '.join(KERNELS)}, one of these after "
            f"{' or '.join(f'{t}/' for t in TRANSPORTS)}, or te"
        )
    elif (KERNELS[kernel] and not half) or (TRANSPORTS[transport] and device != "cuda"):
        trouble = f"cases.attention {name} needs CUDA and bfloat16; choose auto"
    elif kernel == "cudnn" and _version("nvidia-cudnn-frontend") is None:
        trouble = f"cases.attention {name} needs the package nvidia-cudnn-frontend (pip install 'dcpbench[gpu]')"
    yield refuse("attention", trouble) if trouble else ok("attention", f"attention {name}")


def _transformer_engine(communication: str, half: bool) -> str | None:
    if communication not in TE_COMMUNICATIONS:
        return f"cases.attention: Transformer Engine's communication is {', '.join(TE_COMMUNICATIONS)}; write te/p2p"
    trouble = _te_version()
    if trouble is not None:
        return f"cases.attention te: {trouble}"
    return None if half else "cases.attention te needs CUDA and bfloat16; choose auto"


def _te_version() -> str | None:
    installed, wanted = _version("transformer-engine"), ".".join(map(str, TE_MINIMUM))
    if installed is None:
        return f"Transformer Engine {wanted} or newer is needed; it is not installed (pip install 'dcpbench[te]')"
    if _leading(installed) < TE_MINIMUM:
        return (
            f"Transformer Engine {installed} is installed; packed sequences need {wanted} or newer, older versions do "
            "not converge on them"
        )
    return None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _leading(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    value = environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    if value not in (None, "0", "1"):
        yield refuse("determinism", "NVTE_ALLOW_NONDETERMINISTIC_ALGO must be 0 or 1; set one of them or unset it")


def _tolerances(spec: Spec) -> Iterator[Finding]:
    limits = spec.tolerances
    if limits.check_loss_parity and limits.loss_atol == 0 and limits.loss_rtol == 0:
        yield warn(
            "tolerances",
            "loss_atol and loss_rtol are both 0: the cases add in another order, so their losses are hardly ever equal",
        )


def _refit(spec: Spec) -> Iterator[Finding]:
    every, training = spec.schedule.refit, spec.training
    if not every:
        return
    sides = (("baseline", spec.cases.baseline), ("dcp", spec.cases.dcp))
    planners = [name for name, case in sides if plans_with_costs(case.scheduler)]
    times = len(refit_log.starts(training, every))
    if not planners:
        yield refuse(
            "refit",
            f"schedule.refit is {every}, but neither case plans with a cost profile; choose laminar for one "
            "(cases.dcp.scheduler), or set schedule.refit to 0",
        )
    elif not times:
        yield refuse(
            "refit",
            f"schedule.refit is {every}, but {training.iterations} iterations, of which {training.warmup_iterations} "
            f"are warm-up, leave no iteration that a refit could apply to: it needs {FEWEST_TO_REFIT} measured ones "
            f"and applies {every} later; raise training.iterations or set schedule.refit to 0",
        )
    else:
        yield ok("refit", f"the cost profile is refitted {times} times in each launch of {' and of '.join(planners)}")


def _gpus(spec: Spec, found: GpuSurvey) -> Iterator[Finding]:
    wanted = spec.topology.gpus_per_node
    if len(found.gpus) < wanted:
        yield refuse(
            "gpus",
            f"topology.gpus_per_node is {wanted}, but CUDA sees {len(found.gpus)} here; lower it, check "
            "CUDA_VISIBLE_DEVICES, or set topology.device=cpu",
        )
    for gpu in found.gpus[:wanted]:
        if gpu.processes:
            noun = "process" if gpu.processes == 1 else "processes"
            yield refuse(
                "idle",
                f"GPU {gpu.name} is busy with {gpu.processes} compute {noun}; a shared GPU "
                "gives no valid times, wait or choose others with CUDA_VISIBLE_DEVICES",
            )
        elif gpu.used_bytes and gpu.memory_bytes and gpu.used_bytes > _IDLE_SHARE * gpu.memory_bytes:
            yield warn(
                "idle",
                f"GPU {gpu.name} holds {gpu.used_bytes / 2**30:.1f} GiB although no process "
                "is visible; another container may be using it",
            )
        else:
            yield ok("idle", f"GPU {gpu.name} ({gpu.model}) is idle")


def _cpu(spec: Spec) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = spec.topology.world_size
    free = psutil.virtual_memory().available
    if ranks * _RANK_BYTES > free:
        yield refuse(
            "memory",
            f"{ranks} ranks on the CPU need about {ranks * _RANK_BYTES / 2**30:.0f} GiB and {free / 2**30:.0f} GiB are "
            "free; lower topology.gpus_per_node",
        )
    elif ranks > cores:
        yield warn("cores", f"{ranks} ranks share {cores} CPU cores: the losses count, the times say little")
    else:
        yield ok("cores", f"{ranks} ranks on {cores} CPU cores")


def _paths(spec: Spec, folder: Path | None) -> Iterator[Finding]:
    for name, path in (("the run folder", folder), ("training.save_path", spec.training.save_path)):
        if path is not None:
            yield from _writable(name, path)


def _writable(name: str, path: Path) -> Iterator[Finding]:
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield refuse("writable", f"{name} {path} cannot be written: {there} is no folder that you may write to")
        return
    free = shutil.disk_usage(there).free
    if free < _ENOUGH_SPACE:
        level = refuse if free < _LITTLE_SPACE else warn
        yield level(
            "space", f"{name} {path}: only {free / 2**20:.0f} MiB are free there; make room or choose another place"
        )
    else:
        yield ok("space", f"{name}: {free / 2**30:.0f} GiB free")
