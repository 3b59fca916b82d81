"""Iterations that the host has queued and the device may not have finished, and what is known of each when.

The host queues the next iteration while the device works on the current one; so the device never waits for
Python at the start of an iteration, as it would if the host waited for the end of each. Results are copied
to the host by the device itself and read one iteration later. What a rank measured is known later still,
and travels to the others in the sum of a later iteration: records follow the training at a distance of a few
iterations, and no synchronisation is there for their sake.

The time of an iteration on a rank is that between its end and the end before it, on the device's own
clock: nothing that happens between two iterations escapes it, and the times add up to those of the launch.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from dcpbench.worker.batches import RankBatch, StagedBatch
from dcpbench.worker.clock import Mark, mark, seconds_between
from dcpbench.worker.emit import Emitter, RankMeasurement, Statistics
from dcpbench.worker.memory import peak_memory, reserved_memory

AHEAD = 1
"""Iterations that may be unfinished when the next one is begun."""


@dataclass(frozen=True)
class _Queued:
    staged: StagedBatch
    """Kept: its memory may be used again only after the device has finished."""
    totals: Tensor
    """What `Statistics.reduce` made, on the host once `end` has been reached."""
    grad_norm: Tensor
    learning_rate: float
    carries: bool
    """Whether the sum brings what the ranks measured in an earlier iteration."""
    end: Mark


class Steps:
    """The iterations of one launch; every rank must call the same methods in the same order."""

    def __init__(self, device: torch.device, emitter: Emitter) -> None:
        self._device, self._emitter = device, emitter
        self._statistics = Statistics(device)
        self._queued: deque[_Queued] = deque()
        self._unsent: deque[RankMeasurement] = deque()
        self._unwritten: deque[tuple[RankBatch, float, int, float, float]] = deque()
        self.restart_clock()
        self._carries = False

    def reduce(self, loss_sum: Tensor, own_token_count: int) -> Tensor:
        """Starts the sum over ranks of loss and tokens; it carries the oldest measurement that has not been sent."""
        self._carries = bool(self._unsent)
        measured = self._unsent.popleft() if self._carries else RankMeasurement()
        return self._statistics.reduce(loss_sum, own_token_count, measured)

    def queued(self, staged: StagedBatch, totals: Tensor, grad_norm: Tensor, learning_rate: float) -> None:
        """An iteration has been queued to its end; `totals` are what `reduce` returned."""
        on_host = self._to_host(totals), self._to_host(grad_norm)
        self._queued.append(_Queued(staged, *on_host, learning_rate, self._carries, mark(self._device)))

    def restart_clock(self) -> None:
        """Leaves out of the next iteration's time what has happened since the last; all must be finished."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._last_end = mark(self._device)
        self._wall = time.time()

    def finish(self, leave: int) -> None:
        """Waits for the oldest iterations until no more than `leave` are unfinished, and writes what is complete."""
        while len(self._queued) > leave:
            step = self._queued.popleft()
            seconds = seconds_between(self._last_end, step.end)
            self._last_end = step.end
            self._wall += seconds
            batch = step.staged.host
            loss_sum, token_count, ranks = self._statistics.unpack(step.totals)
            if step.carries:
                self._emitter.iteration(*self._unwritten.popleft(), ranks)
            self._unwritten.append((batch, loss_sum, token_count, float(step.grad_norm), step.learning_rate))
            self._unsent.append(
                RankMeasurement(
                    seconds,
                    batch.scheduling_seconds,
                    peak_memory(self._device),
                    reserved_memory(self._device),
                    float(int(batch.plan.digest()[:12], 16)),
                    self._wall,
                )
            )

    def close(self) -> None:
        """Finishes and writes all iterations."""
        self.finish(0)
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        while self._unwritten:
            ranks = self._statistics.unpack(self.reduce(nothing, 0))[2]
            self._emitter.iteration(*self._unwritten.popleft(), ranks)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """A copy that is complete when the device has come to the next mark."""
        if self._device.type != "cuda":
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
