"""What a plan's execution takes: each rank runs its own jobs in order, a job starts when all its ranks are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcpbench.dcp.costs import CostModel, squares_of_all
from dcpbench.dcp.workload import BatchPlan, Ints, PaddingRule


@dataclass(frozen=True)
class Execution:
    """Times in seconds from the start of the iteration."""

    starts: tuple[float, ...]
    """Per job."""
    finishes: tuple[float, ...]
    """Per job."""
    busy: tuple[float, ...]
    """Per rank: the sum of its jobs' times. What a rank spends waiting for others is not in it."""
    waited: float
    """The most that any rank waits between two of its jobs."""

    @property
    def makespan(self) -> float:
        """When the last rank is done."""
        return max(self.finishes, default=0.0)


def job_times(
    plan: BatchPlan, lengths: Sequence[int] | Ints, padding: PaddingRule, cost: CostModel
) -> NDArray[np.float64]:
    """Seconds of each job, shape (jobs,). `lengths` are real token counts."""
    jobs = plan.arrays
    own = np.asarray(lengths, np.int64)[jobs.samples]
    sizes = np.repeat(jobs.size, jobs.counts)
    tokens, squares = np.zeros(len(own), np.int64), np.zeros(len(own))
    used = np.flatnonzero(np.bincount(jobs.size)).tolist()
    for k in used:
        mine = slice(None) if len(used) == 1 else sizes == k
        tokens[mine] = padding.pad_all(own[mine], k)
        squares[mine] = squares_of_all(own[mine], k)
    times = np.zeros(len(jobs))
    if len(jobs):
        job_tokens = np.add.reduceat(tokens, jobs.starts[:-1])
        job_squares = np.add.reduceat(squares, jobs.starts[:-1])
        real = None if cost.long is None else np.add.reduceat(own.astype(np.float64) ** 2, jobs.starts[:-1])
        for k in used:
            on = jobs.size == k
            times[on] = cost.times(k, job_tokens[on], job_squares[on], None if real is None else real[on])
    return times


def busiest(plan: BatchPlan, lengths: Sequence[int] | Ints, padding: PaddingRule, cost: CostModel) -> float:
    """The most seconds that one rank spends in its jobs: the makespan of a plan in which nobody waits."""
    times = job_times(plan, lengths, padding, cost)
    job, rank = plan.arrays.spread()
    return float(np.bincount(rank, weights=times[job], minlength=plan.ranks).max())


def simulate(plan: BatchPlan, lengths: Sequence[int] | Ints, padding: PaddingRule, cost: CostModel) -> Execution:
    """Run the plan in the model: start = the latest of the members' ready times, finish = start + job time.

    Jobs are taken in plan order, which every rank follows, so one pass is enough. There is no barrier
    between microbatches. `lengths` are real token counts.
    """
    jobs = plan.arrays
    times = job_times(plan, lengths, padding, cost).tolist()
    ready = [0.0] * plan.ranks
    busy = [0.0] * plan.ranks
    starts, finishes = [], []
    waited = 0.0
    for first, size, took in zip(jobs.first.tolist(), jobs.size.tolist(), times, strict=True):
        if size == 1:
            start = ready[first]
            ready[first] = start + took
            busy[first] += took
        else:
            end = first + size
            own = ready[first:end]
            start = max(own)
            waited = max(waited, start - min(own))
            ready[first:end] = [start + took] * size
            busy[first:end] = [before + took for before in busy[first:end]]
        starts.append(start)
        finishes.append(start + took)
    return Execution(tuple(starts), tuple(finishes), tuple(busy), waited)


def is_laminar(plan: BatchPlan) -> bool:
    """Whether each job's group is whole within every earlier group that it meets, so that nobody waits.

    Along each rank the group size then never increases, and members of a group always arrive together.
    """
    jobs = plan.arrays
    job, rank = jobs.by_rank()
    earlier, later = job[:-1], job[1:]
    within = (jobs.first[earlier] <= jobs.first[later]) & (
        jobs.first[later] + jobs.size[later] <= jobs.first[earlier] + jobs.size[earlier]
    )
    # A group that lies in the last group of each of its ranks lies in all earlier ones.
    return bool((within | (rank[:-1] != rank[1:])).all())
