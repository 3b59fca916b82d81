"""Reads one launch.json, trains, and always leaves the process group cleanly."""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from dcpbench import profiles
from dcpbench.data.stream import SampleStream
from dcpbench.dcp import refit_log
from dcpbench.dcp.attention import backend
from dcpbench.dcp.costs import CostModel
from dcpbench.dcp.groups import RuntimeGroups
from dcpbench.dcp.refit_log import Refitted
from dcpbench.dcp.schedulers import create as make_scheduler
from dcpbench.dcp.schedulers import plans_with_costs
from dcpbench.dcp.workload import Domain, Scheduler
from dcpbench.errors import DcpbenchError, PreflightError
from dcpbench.plan import CaseName, Launch
from dcpbench.records import RunHeader
from dcpbench.spec import Spec
from dcpbench.worker import checkpoint, lockstep
from dcpbench.worker.batches import BatchBuilder, Prefetcher, Stager
from dcpbench.worker.calibrate import Timer
from dcpbench.worker.emit import Emitter
from dcpbench.worker.lifetime import end_with_parent, leave
from dcpbench.worker.loop import Trainer, train
from dcpbench.worker.memory import out_of_memory
from dcpbench.worker.model import GPT, flops, initialise
from dcpbench.worker.optimizer import Optimizer
from dcpbench.worker.parallel.gradients import GradientReduction
from dcpbench.worker.parameters import FlatParameters
from dcpbench.worker.profile import Profiler
from dcpbench.worker.refitting import Helper, Refits, RefittedBuilder, store_of
from dcpbench.worker.warming import ITERATIONS, warm


def main() -> None:
    """Entry point of every rank."""
    end_with_parent()
    launch = Launch.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank = int(os.environ.get("RANK", "0"))
    try:
        run(launch)
    except torch.OutOfMemoryError as error:
        # One inside a microbatch has been named by the loop.
        advice = ("set training.optimizer_sharding to true", "choose a smaller model")
        _fail(rank, out_of_memory("making or updating weights, gradients and optimizer state", error, *advice))
    except DcpbenchError as error:
        _fail(rank, error)
    except BaseException as error:
        traceback.print_exc()
        print(f"dcpbench worker: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        leave(1)
    dist.destroy_process_group()
    leave(0)


def _fail(rank: int, error: DcpbenchError) -> NoReturn:
    print(f"dcpbench worker: rank {rank}: {error}", file=sys.stderr, flush=True)  # noqa: T201
    leave(int(error.exit_code))


def run(launch: Launch) -> None:
    """One launch, on this rank."""
    spec = launch.spec
    device = _device(spec.topology.device)
    dtype = _dtype(spec.training.dtype, device)
    if spec.training.deterministic:
        # cuBLAS repeats its results only with a fixed workspace, which it reads at its first call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # Everything that may take long on one rank only comes before the first collective can wait for it.
    stream = SampleStream.open(launch.data)
    transport, _ = backend.check(spec.cases.attention, device, dtype, spec.model.dim)
    cost = None if launch.costs is None else launch.costs.cost
    schedulers = {case: scheduler_of(spec, case, cost) for case in cases_of(launch)}
    sizes = sorted({size for scheduler in schedulers.values() for size in scheduler.group_sizes()})
    # Only Transformer Engine communicates through a process group for each block; in an order that all ranks share.
    wanting = schedulers.values() if transport == "te" else ()
    blocks = list(dict.fromkeys(block for scheduler in wanting for block in scheduler.groups()))

    timeout = timedelta(seconds=spec.launches.collective_timeout)
    if device.type == "cpu" and Path("/sys/class/net/lo").exists():
        # All ranks are on this machine: loopback needs no host name and no route.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    groups = RuntimeGroups(sizes, device, timeout, blocks=blocks)
    attention = backend.create(
        spec.cases.attention,
        groups,
        backend.Sizes(spec.model.attention_heads, spec.model.kv, spec.model.dim, spec.cases.max_seqlen_per_dp_cp_rank),
        device,
        dtype,
        deterministic=spec.training.deterministic,
    )

    # Begins to load now, and is ready before iteration 1.
    refits = _refits(launch, attention.name)

    with torch.device("meta"):
        model = GPT(spec.model, spec.model.max_position_embeddings or stream.longest, spec.training.recompute)
    shards = dist.get_world_size() if spec.training.optimizer_sharding else 1
    flat = FlatParameters(model, dtype, device, torch.float32, shards=shards, shard=dist.get_rank() % shards)
    if spec.training.load_path is None:
        flat.fill(lambda weights: initialise(weights, spec.model, spec.training.seed))
    else:
        flat.fill(functools.partial(checkpoint.load, spec.training.load_path))

    optimizer = Optimizer(flat, spec.training)
    reduction = GradientReduction(
        flat,
        overlap=spec.training.overlap_gradient_reduction,
        own_group=groups.on_parent,
        timeout=timeout,
    )

    headers = {
        case: _header(launch, case, scheduler, dtype, device, attention.name, flat, optimizer.memory_bytes,
                      groups.memory_bytes + reduction.memory_bytes)
        for case, scheduler in schedulers.items()
    }  # fmt: skip
    builders = {case: BatchBuilder(stream, scheduler, dist.get_rank()) for case, scheduler in schedulers.items()}
    stager = Stager(attention, groups, device)
    # The shapes of a run are known before it starts.
    for builder in builders.values():
        warm(model, attention, builder.layouts(range(1, min(spec.training.iterations, ITERATIONS) + 1)))
    profiler = Profiler(launch.folder / profiles.FOLDER, dist.get_rank(), spec.training.profile_iterations, device)
    trainer = Trainer(model, reduction, optimizer, profiler, device)
    if launch.calibration is not None:
        timer = Timer(model, attention, groups, schedulers["dcp"].padding, device)
        timer.time_all(launch.calibration, launch.folder)
        flat.grad.zero_()
    if launch.case == "lockstep":
        _lockstep(launch, trainer, flat, headers, builders, stager)
    else:
        _one_case(launch, trainer, flat, headers[launch.case], builders[launch.case], stager, refits)


def _refits(launch: Launch, backend: str) -> Refits | None:
    """The refits of the cost profile in this launch; None where there are none, or no plan depends on it."""
    if launch.case == "lockstep" or not _refitted(launch, scheduler_of(launch.spec, launch.case)):
        return None
    return Refits(launch, store_of(launch), Helper.of(launch, backend) if dist.get_rank() == 0 else None)


def _refitted(launch: Launch, scheduler: Scheduler) -> bool:
    spec = launch.spec
    return plans_with_costs(scheduler.name) and bool(refit_log.starts(spec.training, spec.schedule.refit))


def _one_case(
    launch: Launch,
    trainer: Trainer,
    flat: FlatParameters,
    header: RunHeader,
    builder: BatchBuilder,
    stager: Stager,
    refits: Refits | None,
) -> None:
    emitter = Emitter(launch.records, header)
    source: BatchBuilder | RefittedBuilder = builder
    if refits is not None:
        refits.ready()
        source = RefittedBuilder(builder, refits, lambda found: _replanned(launch, builder, found))
    batches = Prefetcher(lambda iteration: stager(source.build(iteration)), launch.spec.training.iterations)
    started = time.perf_counter()
    try:
        train(trainer, launch.spec.training, batches, emitter)
        _save(launch, flat)
        emitter.end(time.perf_counter() - started)
    finally:
        if refits is not None:
            refits.close()
        batches.close()
        emitter.close()


def _replanned(launch: Launch, builder: BatchBuilder, found: Refitted) -> BatchBuilder:
    assert launch.case != "lockstep", "it has no refits"
    return builder.planned_by(scheduler_of(launch.spec, launch.case, found.cost))


def _lockstep(
    launch: Launch,
    trainer: Trainer,
    flat: FlatParameters,
    headers: dict[CaseName, RunHeader],
    builders: dict[CaseName, BatchBuilder],
    stager: Stager,
) -> None:
    emitter = lockstep.LockstepEmitter(launch, headers)
    batches = Prefetcher(
        lambda iteration: {case: stager(builder.build(iteration)) for case, builder in builders.items()},
        launch.spec.training.iterations,
    )
    started = time.perf_counter()
    try:
        lockstep.train(trainer, flat, launch, batches, emitter)
        _save(launch, flat)
        emitter.end(time.perf_counter() - started)
    finally:
        batches.close()
        emitter.close()


def _save(launch: Launch, flat: FlatParameters) -> None:
    if launch.spec.training.save_path is not None:
        checkpoint.save(launch.spec.training.save_path / launch.id, flat.named_master())


def _header(
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
        costs=_planned_with(launch, scheduler),
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
        versions=_versions(device),
    )


def _planned_with(launch: Launch, scheduler: Scheduler) -> str | None:
    if launch.costs is None or not plans_with_costs(scheduler.name):
        return None
    every = f", refitted every {launch.spec.schedule.refit} iterations" if _refitted(launch, scheduler) else ""
    return launch.costs.basis + every


def cases_of(launch: Launch) -> tuple[CaseName, ...]:
    """What a launch computes."""
    return ("baseline", "dcp") if launch.case == "lockstep" else (launch.case,)


def scheduler_of(spec: Spec, case: CaseName, cost: CostModel | None = None) -> Scheduler:
    """The scheduler of a case on the launch's domain, planning with `cost` where it plans with a cost model."""
    chosen = spec.cases.baseline if case == "baseline" else spec.cases.dcp
    return make_scheduler(
        chosen.scheduler,
        domain=Domain(spec.topology.domain_size, spec.topology.cp),
        capacity=spec.cases.max_seqlen_per_dp_cp_rank,
        min_size=spec.cases.min_dynamic_context_parallel_size,
        padding_policy=spec.cases.padding,
        cost=cost,
        menu=spec.schedule.menu,
    )


def _device(wanted: str) -> torch.device:
    """The rank's device.

    Raises:
        PreflightError: a GPU is asked for, or there is one to be used, and torch cannot use it.
    """
    # One that is there and that torch was not built for must not become a run on CPUs without a word.
    there = wanted == "cuda" or (Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "")
    if there and wanted != "cpu" and not torch.backends.cuda.is_built():
        raise PreflightError(
            f"topology.device is {wanted}, but torch {torch.__version__} is built without CUDA; install a build "
            "with it, or set topology.device to cpu"
        )
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PreflightError("topology.device is cuda, but torch sees no GPU; set topology.device to cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]


def _versions(device: torch.device) -> dict[str, str]:
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


if __name__ == "__main__":
    main()
