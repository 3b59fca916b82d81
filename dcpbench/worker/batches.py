"""What one rank has to compute in an iteration, prepared on the host behind the iteration before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from dcpbench.data.stream import IGNORE_INDEX, SampleStream
from dcpbench.dcp.attention.backend import Attention, Backend
from dcpbench.dcp.attention.layout import to_device
from dcpbench.dcp.groups import CpGroup, RuntimeGroups
from dcpbench.dcp.packing import AttentionLayout, RankPack, pack_rank, padded_lengths, training_layout
from dcpbench.dcp.workload import BatchPlan, Job, Scheduler
from dcpbench.worker.parallel.gradients import reduces_early

T = TypeVar("T")


@dataclass(frozen=True)
class RankBatch:
    """The plan of a global batch and this rank's microbatches of it, in execution order."""

    iteration: int
    plan: BatchPlan
    jobs: tuple[Job, ...]
    packs: tuple[RankPack, ...]
    digest: str
    lengths: np.ndarray
    token_count: int
    """Labelled tokens of the whole global batch, from the data: the divisor of loss and gradients."""
    own_token_count: int
    """Labelled tokens among this rank's rows; over all ranks they must add up to `token_count`."""
    padding_tokens: int
    scheduling_seconds: float
    reduces_early: bool
    """Whether this rank may start to reduce gradients in its last job; see `parallel/gradients.py`."""
    job_tokens: tuple[int, ...]
    """Padded tokens of each job of the plan, all ranks together."""

    def jobs_summary(self) -> tuple[int, ...]:
        """The plan as `records.IterationRecord.jobs` has it."""
        return tuple(
            number
            for job, tokens in zip(self.plan.jobs, self.job_tokens, strict=True)
            for number in (job.first_rank, job.size, tokens, int((self.lengths[list(job.samples)] ** 2).sum()))
        )


class BatchBuilder:
    """Plans global batches and reads this rank's share of each.

    Every rank plans from the same lengths with the same pure scheduler, so no plan is sent around,
    and each reads only the chunks it holds, so every token is read by exactly one rank.
    """

    def __init__(self, stream: SampleStream, scheduler: Scheduler, rank: int) -> None:
        self._stream, self._scheduler, self._rank = stream, scheduler, rank

    def planned_by(self, scheduler: Scheduler) -> BatchBuilder:
        """The same rank's share of the same data, planned by another scheduler."""
        return BatchBuilder(self._stream, scheduler, self._rank)

    def layouts(self, iterations: Iterable[int]) -> Iterator[AttentionLayout]:
        """The attention layouts of this rank's microbatches in these iterations, without reading a token."""
        padding = self._scheduler.padding
        for iteration in iterations:
            lengths = self._stream.lengths(self._stream.batch(iteration))
            plan = self._scheduler.plan(lengths.tolist())
            for job in (plan.jobs[index] for index in plan.jobs_by_rank[self._rank]):
                own = lengths[list(job.samples)]
                padded = padded_lengths(own, padding, job.size)
                yield training_layout(padded, job.size, self._rank - job.first_rank)

    def build(self, iteration: int) -> RankBatch:
        """This rank's share of the global batch of `iteration` (from 1)."""
        positions = self._stream.batch(iteration)
        lengths = self._stream.lengths(positions)
        started = time.perf_counter()
        plan = self._scheduler.plan(lengths.tolist())
        scheduling_seconds = time.perf_counter() - started

        jobs = tuple(plan.jobs[index] for index in plan.jobs_by_rank[self._rank])
        padding = self._scheduler.padding
        packs = tuple(
            pack_rank(
                self._stream,
                positions[list(job.samples)].tolist(),
                lengths[list(job.samples)],
                padding,
                job.size,
                self._rank - job.first_rank,
            )
            for job in jobs
        )
        padded = tuple(sum(padding.pad(int(lengths[sample]), job.size) for sample in job.samples) for job in plan.jobs)
        return RankBatch(
            iteration,
            plan,
            jobs,
            packs,
            self._stream.batch_digest(iteration),
            lengths,
            int(self._stream.supervised(positions).sum()),
            sum(int((pack.labels != IGNORE_INDEX).sum()) for pack in packs),
            sum(padded) - int(lengths.sum()),
            scheduling_seconds,
            reduces_early(plan, self._rank),
            padded,
        )


@dataclass(frozen=True)
class StagedPack:
    """A microbatch on the device: token ids, labels and positions, each (rows,) int64, and its attention."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    attention: Attention


@dataclass(frozen=True)
class StagedBatch:
    """A batch of which everything the device needs is on the device, or on its way."""

    host: RankBatch
    packs: tuple[StagedPack, ...]
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Makes the current stream wait for the copies; the host does not wait."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


class Stager:
    """Copies batches to the device through pinned memory, on a stream of its own.

    The tensors belong to that stream, and the allocator hands their memory out again, to the same
    stream, as soon as they are freed. So a `StagedBatch` must be kept until the device has finished the iteration
    that uses it, as `steps.Steps` does.
    """

    def __init__(self, attention: Backend, groups: RuntimeGroups, device: torch.device) -> None:
        self._attention, self._groups, self._device = attention, groups, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: RankBatch) -> StagedBatch:
        """Starts the copies of all microbatches of `batch`."""
        if self._stream is None:
            return StagedBatch(batch, self._stage_all(batch), None)
        # Device and stream are settings of a thread, and this may be another than the loop's.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            packs = self._stage_all(batch)
            return StagedBatch(batch, packs, self._stream.record_event())

    def _stage_all(self, batch: RankBatch) -> tuple[StagedPack, ...]:
        return tuple(
            stage(pack, self._groups.of(job.first_rank, job.size), self._attention, self._device)
            for job, pack in zip(batch.jobs, batch.packs, strict=True)
        )


def stage(pack: RankPack, group: CpGroup, attention: Backend, device: torch.device) -> StagedPack:
    """Copies one microbatch to `device`, in one piece, and prepares its attention there."""
    rows = to_device(np.stack((pack.tokens, pack.labels, pack.positions)), device)
    return StagedPack(rows[0], rows[1], rows[2], attention.prepare(pack.layout, group))


class Prefetcher(Generic[T]):
    """Makes the batch of the next iteration in a thread while the device works on the current one."""

    def __init__(self, make: Callable[[int], T], iterations: int) -> None:
        self._make, self._last = make, iterations
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._iteration = 1
        self._next: Future[T] = self._pool.submit(make, 1)

    def take(self) -> T:
        """The batch of the next iteration. Raises what making it raised."""
        return self._next.result()

    def prefetch(self) -> None:
        """Starts on the batch after the one that was taken last.

        To be called when the host has queued the work of an iteration: the thread shares Python's lock
        with the loop, and before that every microsecond it holds it, the device may run out of work.
        """
        if self._iteration < self._last:
            self._iteration += 1
            self._next = self._pool.submit(self._make, self._iteration)

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
