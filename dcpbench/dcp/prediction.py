"""What the cost model says of one plan: how long it takes, what is idle, what is padding, what memory must hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcpbench.dcp.costs import CostModel
from dcpbench.dcp.simulation import Execution, simulate
from dcpbench.dcp.workload import BatchPlan, PaddingRule


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


def predict(
    plan: BatchPlan, lengths: Sequence[int], padding: PaddingRule, cost: CostModel
) -> tuple[Prediction, Execution]:
    """Simulate a plan and sum it up. `lengths` are the real token counts of the global batch, in its order."""
    execution = simulate(plan, lengths, padding, cost)
    sizes = np.array([job.size for job in plan.jobs], np.int64)
    owner = np.repeat(np.arange(sizes.size), [len(job.samples) for job in plan.jobs])
    own = np.asarray(lengths, np.int64)[[sample for job in plan.jobs for sample in job.samples]]
    took = np.asarray(execution.finishes) - np.asarray(execution.starts)
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
    made = Prediction(
        makespan=execution.makespan,
        rank_seconds=plan.ranks * execution.makespan,
        busy_seconds=sum(busy_by_size.values()),
        tokens=tokens,
        padding_tokens=tokens - int(own.sum()),
        microbatches=plan.microbatches,
        jobs_by_size=jobs_by_size,
        busy_by_size=busy_by_size,
        peak_tokens=int((-(-held // sizes)).max(initial=0)),
    )
    return made, execution
