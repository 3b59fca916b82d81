"""What the cost model says of one plan: how long it takes, what is idle, what is padding, what memory must hold.

Where the cost model knows how long the host needs to queue a microbatch, the host gets ahead of the device
(`hostlead.py`), and what the device waits for it is idle time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dcpbench.dcp import hostlead
from dcpbench.dcp.costs import CostModel
from dcpbench.dcp.simulation import simulate
from dcpbench.dcp.workload import BatchPlan, PaddingRule


class Timeline(NamedTuple):
    """When each job of a plan computes, in plan order: seconds from the start of the iteration."""

    starts: tuple[float, ...]
    finishes: tuple[float, ...]


@dataclass(frozen=True)
class Prediction:
    """One plan of one global batch. Times in seconds, tokens with padding unless they say otherwise."""

    makespan: float
    """From the first microbatch until the last rank is done."""
    rank_seconds: float
    """Ranks times makespan: what the iteration costs."""
    busy_seconds: float
    """Of that, what ranks spend in microbatches."""
    tokens: int
    padding_tokens: int
    """Of `tokens`, those that are padding."""
    microbatches: int
    """The largest number on one rank."""
    jobs_by_size: dict[int, int]
    """CP size -> microbatches of groups of that size."""
    busy_by_size: dict[int, float]
    """CP size -> rank-seconds in them."""
    peak_tokens: int
    """The most that one rank holds in one microbatch."""

    @property
    def idle_share(self) -> float:
        """Of ranks times makespan."""
        return 1.0 - self.busy_seconds / self.rank_seconds if self.rank_seconds else 0.0

    @property
    def padding_share(self) -> float:
        """Of all tokens."""
        return self.padding_tokens / self.tokens if self.tokens else 0.0


class Machine:
    """Ranks that execute the plans of one batch after the other."""

    def __init__(self, ranks: int, cost: CostModel) -> None:
        self._cost = cost
        self._device = replace(cost, floor=0.0, floor_shared=0.0)
        self._hosts = hostlead.Timeline(ranks) if cost.floor or cost.floor_shared else None
        self._ahead = False

    def execute(self, plan: BatchPlan, lengths: Sequence[int], padding: PaddingRule) -> Timeline:
        """When the devices compute. `lengths` are the real token counts of the global batch, in its order."""
        execution = simulate(plan, lengths, padding, self._device)
        if self._hosts is None:
            return Timeline(execution.starts, execution.finishes)
        first, size = [job.first_rank for job in plan.jobs], [job.size for job in plan.jobs]
        took = [finish - start for start, finish in zip(execution.starts, execution.finishes, strict=True)]
        host = [self._cost.floor_shared if k > 1 else self._cost.floor for k in size]
        if not self._ahead:  # no iteration that is measured is the first of its launch
            self._hosts.iteration(first, size, took, host)
            self._ahead = True
        self._hosts.iteration(first, size, took, host)
        ends = self._hosts.ends
        return Timeline(tuple(max(0.0, end - device) for end, device in zip(ends, took, strict=True)), tuple(ends))


def predict(plan: BatchPlan, lengths: Sequence[int], padding: PaddingRule, times: Timeline) -> Prediction:
    """Sum up an executed plan. `lengths` are the real token counts of the global batch, in its order."""
    makespan = max(times.finishes, default=0.0)
    sizes = np.array([job.size for job in plan.jobs], np.int64)
    owner = np.repeat(np.arange(sizes.size), [len(job.samples) for job in plan.jobs])
    own = np.asarray(lengths, np.int64)[[sample for job in plan.jobs for sample in job.samples]]
    took = np.asarray(times.finishes) - np.asarray(times.starts)
    held = np.zeros(sizes.size, np.int64)
    jobs_by_size: dict[int, int] = {}
    busy_by_size: dict[int, float] = {}
    for size in np.unique(sizes).tolist():
        mine, multiple = sizes == size, padding.multiple(size)
        jobs_by_size[size] = int(mine.sum())
        busy_by_size[size] = size * float(took[mine].sum())
        samples = mine[owner]
        np.add.at(held, owner[samples], -(-own[samples] // multiple) * multiple)
    tokens = int(held.sum())
    return Prediction(
        makespan=makespan,
        rank_seconds=plan.ranks * makespan,
        busy_seconds=sum(busy_by_size.values()),
        tokens=tokens,
        padding_tokens=tokens - int(own.sum()),
        microbatches=plan.microbatches,
        jobs_by_size=jobs_by_size,
        busy_by_size=busy_by_size,
        peak_tokens=int((-(-held // sizes)).max(initial=0)),
    )
