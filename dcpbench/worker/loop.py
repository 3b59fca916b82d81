"""The training step, timed in plain sight."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from dcpbench.dcp.attention.backend import Attention, Backend
from dcpbench.dcp.attention.layout import to_device
from dcpbench.dcp.groups import RuntimeGroups
from dcpbench.dcp.packing import RankPack
from dcpbench.spec import Training
from dcpbench.worker.batches import Prefetcher, RankBatch
from dcpbench.worker.emit import Emitter, RankMeasurement, Statistics
from dcpbench.worker.memory import peak_memory
from dcpbench.worker.model import GPT
from dcpbench.worker.optimizer import Optimizer, learning_rate
from dcpbench.worker.parameters import FlatParameters


@dataclass
class Trainer:
    """Everything a step works with."""

    model: GPT
    flat: FlatParameters
    optimizer: Optimizer
    attention: Backend
    groups: RuntimeGroups
    device: torch.device


def train(trainer: Trainer, training: Training, batches: Prefetcher, emitter: Emitter) -> None:
    """Runs every iteration of a launch.

    The time of an iteration is from asking for its batch to the end of its last kernel, on each
    rank; the slowest rank's is the iteration's. There is no barrier: ranks meet in the gradient
    reduction, as in any data-parallel trainer.
    """
    flat, device = trainer.flat, trainer.device
    statistics = Statistics(device)
    measured = RankMeasurement()
    pending: tuple[RankBatch, float, int, float, float] | None = None

    for iteration in range(1, training.iterations + 1):
        start = time.perf_counter()

        # Planned and read while the iteration before was computed.
        batch = batches.take()

        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        for job, pack in zip(batch.jobs, batch.packs, strict=True):
            loss_sum += forward_backward(
                trainer, pack, trainer.attention.prepare(pack.layout, trainer.groups.of(job.first_rank, job.size))
            )

        # One sum over all ranks, whatever CP sizes the microbatches had; then one division by the
        # labelled tokens of the global batch: the result does not depend on the plan.
        flat.reduce()
        totals = statistics.reduce(loss_sum, batch.own_token_count, measured)
        lr = learning_rate(training, iteration)
        grad_norm = trainer.optimizer.step(batch.token_count, lr)

        # The step ends when the device has finished it, not when the host has queued it.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start

        total_loss, token_count, previous = statistics.unpack(totals)
        if pending is not None:
            emitter.iteration(*pending, previous)
        pending = (batch, total_loss, token_count, float(grad_norm), lr)
        measured = RankMeasurement(
            seconds, batch.scheduling_seconds, peak_memory(device), float(int(batch.plan.digest()[:12], 16))
        )

    if pending is not None:
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        emitter.iteration(*pending, statistics.unpack(statistics.reduce(nothing, 0, measured))[2])


def forward_backward(trainer: Trainer, pack: RankPack, attention: Attention) -> Tensor:
    """One microbatch: adds the gradients of this rank's summed loss, returns that loss (float64, on the device)."""
    device = trainer.device
    loss_sum = trainer.model(
        to_device(pack.tokens, device),
        to_device(pack.labels, device),
        to_device(pack.positions, device),
        attention,
    )
    loss_sum.backward()
    attention.finish()
    return loss_sum.detach()
