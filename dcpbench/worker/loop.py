"""The training step, timed in plain sight."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dcpbench.spec import Training
from dcpbench.worker.batches import Prefetcher, RankBatch, StagedBatch, StagedPack
from dcpbench.worker.emit import Emitter, RankMeasurement, Statistics
from dcpbench.worker.memory import out_of_memory, peak_memory, reserved_memory, settle
from dcpbench.worker.model import GPT
from dcpbench.worker.optimizer import Optimizer, learning_rate
from dcpbench.worker.parallel.gradients import GradientReduction
from dcpbench.worker.profile import Profiler


@dataclass
class Trainer:
    """Everything a step works with."""

    model: GPT
    reduction: GradientReduction
    optimizer: Optimizer
    profiler: Profiler
    device: torch.device


def train(trainer: Trainer, training: Training, batches: Prefetcher[StagedBatch], emitter: Emitter) -> None:
    """Runs every iteration of a launch.

    The time of an iteration is from asking for its batch to the end of its last kernel, on each
    rank; the slowest rank's is the iteration's. There is no barrier: ranks meet in the gradient
    reduction, as in any data-parallel trainer. Between start and end the host waits for nothing
    that the device does.
    """
    reduction, device = trainer.reduction, trainer.device
    statistics = Statistics(device)
    measured = RankMeasurement()
    pending: tuple[RankBatch, float, int, float, float] | None = None
    settle(device)
    # What exists now stays: no later search for garbage need look at it, in the middle of an iteration.
    gc.collect()
    gc.freeze()

    for iteration in range(1, training.iterations + 1):
        trainer.profiler.start(iteration)
        start = time.perf_counter()

        # Planned, read and copied to the device while the iteration before was computed.
        staged = batches.take()
        staged.wait()
        batch = staged.host

        loss_sum = compute(trainer, training, staged)

        # The device still has work to do, which is the time to get the next batch ready.
        batches.prefetch()

        # One sum over all ranks, whatever CP sizes the microbatches had; then one division by the
        # labelled tokens of the global batch: the result does not depend on the plan.
        reduction.finish()
        totals = statistics.reduce(loss_sum, batch.own_token_count, measured)
        lr = learning_rate(training, iteration)
        grad_norm = trainer.optimizer.step(batch.token_count, lr)

        # The step ends when the device has finished it, not when the host has queued it.
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        seconds = time.perf_counter() - start
        trainer.profiler.stop(iteration, batch.scheduling_seconds)

        total_loss, token_count, previous = statistics.unpack(totals)
        if pending is not None:
            emitter.iteration(*pending, previous)
        pending = (batch, total_loss, token_count, float(grad_norm), lr)
        measured = RankMeasurement(
            seconds,
            batch.scheduling_seconds,
            peak_memory(device),
            reserved_memory(device),
            float(int(batch.plan.digest()[:12], 16)),
            time.time(),
        )

    if pending is not None:
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        emitter.iteration(*pending, statistics.unpack(statistics.reduce(nothing, 0, measured))[2])


def compute(trainer: Trainer, training: Training, staged: StagedBatch) -> Tensor:
    """Queues every microbatch of a batch on this rank: its gradients are added to the flat buffer.

    Returns this rank's summed loss (float64, on the device). What may be reduced early has been started;
    `reduction.finish` has to follow.

    Raises:
        LaunchError: out of GPU memory, with the microbatch it happened in.
    """
    reduction, batch = trainer.reduction, staged.host
    loss_sum = torch.zeros((), dtype=torch.float64, device=trainer.device)
    for number, pack in enumerate(staged.packs):
        # Gradients are whole only in the last microbatch; from there on each part is summed when it is.
        early = reduction.overlaps and batch.reduces_early and number + 1 == len(staged.packs)
        try:
            loss_sum += forward_backward(trainer.model, pack, reduction.ready if early else None)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(_microbatch(batch, number), error, *_lower(training)) from None
    return loss_sum


def forward_backward(model: GPT, pack: StagedPack, finished: Callable[[str], None] | None) -> Tensor:
    """One microbatch: adds the gradients of this rank's summed loss, returns that loss (float64, on the device)."""
    loss_sum = model(pack.tokens, pack.labels, pack.positions, pack.attention, finished)
    loss_sum.backward()
    pack.attention.finish()
    return loss_sum.detach()


def _microbatch(batch: RankBatch, number: int) -> str:
    job = batch.jobs[number]
    tokens = int(batch.lengths[list(job.samples)].sum())
    return (
        f"iteration {batch.iteration}, microbatch {number + 1} of {len(batch.jobs)}: {len(job.samples)} samples of "
        f"{tokens} tokens on a CP group of {job.size} ({batch.packs[number].layout.rows} rows on this rank)"
    )


def _lower(training: Training) -> list[str]:
    """What would need less memory than this training."""
    advice = ["lower cases.max_seqlen_per_dp_cp_rank"]
    if training.recompute != "full":
        advice.append(f"set training.recompute to {'selective or ' if training.recompute == 'none' else ''}full")
    if not training.optimizer_sharding:
        advice.append("set training.optimizer_sharding to true")
    return advice
