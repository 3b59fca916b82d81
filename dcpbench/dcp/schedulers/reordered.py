"""`<scheduler>:reversed`: another legitimate layout of the same batches, for the layout control.

The samples of each global batch are handed to the scheduler in reversed order, so that microbatches hold other
samples and sums are added up in another order. Mathematically nothing changes; what differs between two launches
is what rounding does (docs/method.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcpbench.dcp.workload import BatchPlan, Jobs, PaddingRule, Scheduler

SUFFIX = ":reversed"


@dataclass(frozen=True)
class Reversed:
    """A scheduler that sees each batch from its end."""

    inner: Scheduler

    @property
    def name(self) -> str:
        """The inner scheduler's, with the suffix."""
        return self.inner.name + SUFFIX

    @property
    def padding(self) -> PaddingRule:
        """See `workload.Scheduler`, as all that follow."""
        return self.inner.padding

    def group_sizes(self) -> tuple[int, ...]:
        """The inner scheduler's."""
        return self.inner.group_sizes()

    def groups(self) -> list[tuple[int, int]]:
        """The inner scheduler's."""
        return self.inner.groups()

    def longest_sample(self) -> int:
        """The inner scheduler's."""
        return self.inner.longest_sample()

    def plan(self, lengths: Sequence[int]) -> BatchPlan:
        """The inner scheduler's plan of the reversed batch, with samples numbered as in `lengths`.

        Raises:
            ScheduleError: the batch cannot be served in that order; it counts samples from the end.
        """
        plan = self.inner.plan(lengths[::-1])
        jobs = plan.arrays
        samples = len(lengths) - 1 - jobs.samples
        return replace(plan, jobs=Jobs(jobs.first, jobs.size, jobs.starts, samples))
