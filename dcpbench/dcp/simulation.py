"""What a plan's execution takes: each rank runs its own jobs in order, a job starts when all its ranks are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcpbench.dcp.costs import CostModel
from dcpbench.dcp.workload import BatchPlan, PaddingRule


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


def simulate(plan: BatchPlan, lengths: Sequence[int], padding: PaddingRule, cost: CostModel) -> Execution:
    """Run the plan in the model: start = the latest of the members' ready times, finish = start + job time.

    Jobs are taken in plan order, which every rank follows, so one pass is enough. There is no barrier
    between microbatches. `lengths` are real token counts.
    """
    ready = [0.0] * plan.ranks
    busy = [0.0] * plan.ranks
    starts, finishes = [], []
    waited = 0.0
    for job in plan.jobs:
        own = ready[job.first_rank : job.first_rank + job.size]
        start = max(own)
        took = cost.job_time([lengths[sample] for sample in job.samples], job.size, padding)
        waited = max(waited, start - min(own))
        for rank in job.ranks:
            ready[rank] = start + took
            busy[rank] += took
        starts.append(start)
        finishes.append(start + took)
    return Execution(tuple(starts), tuple(finishes), tuple(busy), waited)


def is_laminar(plan: BatchPlan) -> bool:
    """Whether each job's group is whole within every earlier group that it meets, so that nobody waits.

    Along each rank the group size then never increases, and members of a group always arrive together.
    """
    block = [(0, plan.ranks)] * plan.ranks
    for job in plan.jobs:
        own = (job.first_rank, job.first_rank + job.size)
        if any(not (block[rank][0] <= own[0] and own[1] <= block[rank][1]) for rank in job.ranks):
            return False
        block[own[0] : own[1]] = [own] * job.size
    return True
