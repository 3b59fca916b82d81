"""Reads one launch.json, trains, and always leaves the process group cleanly."""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from dcpbench import profiles
from dcpbench.data.stream import SampleStream
from dcpbench.dcp import schedulers
from dcpbench.dcp.attention import backend
from dcpbench.dcp.groups import RuntimeGroups
from dcpbench.dcp.refit_log import Refitted
from dcpbench.errors import DcpbenchError
from dcpbench.plan import CaseName, Launch
from dcpbench.records import RunHeader
from dcpbench.worker import checkpoint, lockstep
from dcpbench.worker.batches import BatchBuilder, Prefetcher, Stager
from dcpbench.worker.calibrate import Timer
from dcpbench.worker.device import device_of, dtype_of
from dcpbench.worker.emit import Emitter
from dcpbench.worker.header import header_of, refitted
from dcpbench.worker.lifetime import end_with_parent, leave
from dcpbench.worker.loop import Trainer, train
from dcpbench.worker.memory import out_of_memory
from dcpbench.worker.model import GPT, initialise
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
    device = device_of(spec.topology.device)
    dtype = dtype_of(spec.training.dtype, device)
    if spec.training.deterministic:
        # cuBLAS repeats its results only with a fixed workspace, which it reads at its first call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # Everything that may take long on one rank only comes before the first collective can wait for it.
    stream = SampleStream.open(launch.data)
    transport, _ = backend.check(spec.cases.attention, device, dtype, spec.model.dim)
    cost = None if launch.costs is None else launch.costs.cost
    by_case = {case: schedulers.of_case(spec, case, cost) for case in cases_of(launch)}
    sizes = sorted({size for scheduler in by_case.values() for size in scheduler.group_sizes()})
    # Only Transformer Engine communicates through a process group for each block; in an order that all ranks share.
    wanting = by_case.values() if transport == "te" else ()
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
        case: header_of(launch, case, scheduler, dtype, device, attention.name, flat, optimizer.memory_bytes,
                      groups.memory_bytes + reduction.memory_bytes)
        for case, scheduler in by_case.items()
    }  # fmt: skip
    builders = {case: BatchBuilder(stream, scheduler, dist.get_rank()) for case, scheduler in by_case.items()}
    stager = Stager(attention, groups, device)
    # The shapes of a run are known before it starts.
    for builder in builders.values():
        warm(model, attention, builder.layouts(range(1, min(spec.training.iterations, ITERATIONS) + 1)))
    profiler = Profiler(launch.folder / profiles.FOLDER, dist.get_rank(), spec.training.profile_iterations, device)
    trainer = Trainer(model, reduction, optimizer, profiler, device)
    if launch.calibration is not None:
        timer = Timer(model, attention, groups, by_case["dcp"].padding, device)
        timer.time_all(launch.calibration, launch.folder)
        flat.grad.zero_()
    if launch.case == "lockstep":
        _lockstep(launch, trainer, flat, headers, builders, stager)
    else:
        _one_case(launch, trainer, flat, headers[launch.case], builders[launch.case], stager, refits)


def _refits(launch: Launch, backend: str) -> Refits | None:
    """The refits of the cost profile in this launch; None where there are none, or no plan depends on it."""
    if launch.case == "lockstep" or not refitted(launch, schedulers.of_case(launch.spec, launch.case)):
        return None
    return Refits(launch, store_of(launch), Helper.of(launch, backend) if dist.get_rank() == 0 else None)


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
    return builder.planned_by(schedulers.of_case(launch.spec, launch.case, found.cost))


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


def cases_of(launch: Launch) -> tuple[CaseName, ...]:
    """What a launch computes."""
    return ("baseline", "dcp") if launch.case == "lockstep" else (launch.case,)


if __name__ == "__main__":
    main()
