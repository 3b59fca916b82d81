"""What one rank has to compute in an iteration, prepared on the host behind the iteration before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from dcpbench.data.stream import IGNORE_INDEX, SampleStream
from dcpbench.dcp.packing import RankPack, pack_rank
from dcpbench.dcp.workload import BatchPlan, Job, Scheduler


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


class BatchBuilder:
    """Plans global batches and reads this rank's share of each.

    Every rank plans from the same lengths with the same pure scheduler, so no plan is sent around,
    and each reads only the chunks it holds, so every token is read by exactly one rank.
    """

    def __init__(self, stream: SampleStream, scheduler: Scheduler, rank: int) -> None:
        self._stream, self._scheduler, self._rank = stream, scheduler, rank

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
        return RankBatch(
            iteration,
            plan,
            jobs,
            packs,
            self._stream.batch_digest(iteration),
            lengths,
            int(self._stream.supervised(positions).sum()),
            sum(int((pack.labels != IGNORE_INDEX).sum()) for pack in packs),
            sum(
                padding.pad(int(lengths[sample]), job.size) - int(lengths[sample])
                for job in plan.jobs
                for sample in job.samples
            ),
            scheduling_seconds,
        )


class Prefetcher:
    """Builds the batch of the next iteration in a thread while the current one runs."""

    def __init__(self, build: Callable[[int], RankBatch], iterations: int) -> None:
        self._build, self._last = build, iterations
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._next: Future[RankBatch] = self._pool.submit(build, 1)

    def take(self) -> RankBatch:
        """The next batch; starts on the one after it. Raises what building it raised."""
        batch = self._next.result()
        if batch.iteration < self._last:
            self._next = self._pool.submit(self._build, batch.iteration + 1)
        return batch

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
