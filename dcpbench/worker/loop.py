"""The training step, timed in plain sight."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dcpbench.spec import Training
from dcpbench.worker.batches import Prefetcher, RankBatch, StagedBatch, StagedPack
from dcpbench.worker.emit import Emitter
from dcpbench.worker.memory import out_of_memory, settle
from dcpbench.worker.model import GPT
from dcpbench.worker.optimizer import Optimizer, learning_rate
from dcpbench.worker.parallel.gradients import GradientReduction
from dcpbench.worker.profile import Profiler
from dcpbench.worker.steps import AHEAD, Steps


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

    The time of an iteration is that between its end and the end of the one before, on each rank;
    the slowest rank's is the iteration's. There is no barrier: ranks meet in the gradient reduction,
    as in any data-parallel trainer. The host queues an iteration while the device works on the one
    before, and waits for nothing else that the device does.
    """
    reduction, profiler, device = trainer.reduction, trainer.profiler, trainer.device
    settle(device)
    # What exists now stays: no later search for garbage need look at it, in the middle of an iteration.
    gc.collect()
    gc.freeze()
    steps = Steps(device, emitter)

    for iteration in range(1, training.iterations + 1):
        profiled = profiler.wants(iteration)
        if profiled:
            # A profile shows one iteration: it begins and ends with an idle device.
            steps.finish(leave=0)
            profiler.start(iteration)
            steps.restart_clock()

        # Planned, read and copied to the device while earlier iterations were computed.
        staged = batches.take()
        staged.wait()
        batch = staged.host

        loss_sum = compute(trainer, training, staged)

        # The device still has work to do, which is the time to get the next batch ready.
        batches.prefetch()

        # One sum over all ranks, whatever CP sizes the microbatches had; then one division by the
        # labelled tokens of the global batch: the result does not depend on the plan.
        reduction.finish()
        totals = steps.reduce(loss_sum, batch.own_token_count)
        lr = learning_rate(training, iteration)
        grad_norm = trainer.optimizer.step(batch.token_count, lr)
        steps.queued(staged, totals, grad_norm, lr)

        if profiled:
            steps.finish(leave=0)
            profiler.stop(iteration, batch.scheduling_seconds)
            steps.restart_clock()
        else:
            steps.finish(leave=AHEAD)

    steps.close()


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
