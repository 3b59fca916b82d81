"""What a scheduler plans with: the domain, the padding rule, the jobs, and the rules every plan obeys.

Pure Python and NumPy. A *domain* is the DPxCP ranks that samples are distributed over; a *job* is
one microbatch: a contiguous interval of ranks (its CP group) and the samples they share. A *batch
plan* is an ordered list of jobs; each rank executes its own jobs in that order, so ranks may have
different numbers of jobs unless the scheduler promises lock-step.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from dcpbench.errors import ScheduleError


@dataclass(frozen=True)
class Domain:
    """The ranks of one DPxCP domain; `cp` is the fixed CP size of the baseline.

    Ranks are numbered dp-major: rank = dp_rank * cp + cp_rank.
    """

    ranks: int
    cp: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.cp < 1 or self.ranks % self.cp:
            raise ScheduleError(f"a domain of {self.ranks} ranks cannot be divided into CP groups of {self.cp}")

    @property
    def dp(self) -> int:
        """Data-parallel size of the baseline."""
        return self.ranks // self.cp


@dataclass(frozen=True)
class PaddingRule:
    """To which multiple a sample is padded: the one function that scheduler and worker share.

    `fixed` pads every sample to that multiple whatever group it runs on (as Megatron-LM does);
    None pads to 2k for a group of k > 1 ranks (zigzag needs 2k equal chunks) and not at all for
    one rank. `factor` multiplies either, for sequence parallelism.
    """

    fixed: int | None = None
    factor: int = 1

    def multiple(self, size: int) -> int:
        """The multiple for a group of `size` ranks."""
        if self.fixed is not None:
            return self.fixed * self.factor
        return (2 * size if size > 1 else 1) * self.factor

    def pad(self, length: int, size: int) -> int:
        """`length` rounded up for a group of `size` ranks."""
        unit = self.multiple(size)
        return -(-length // unit) * unit


@dataclass(frozen=True)
class Job:
    """One microbatch: ranks [first_rank, first_rank + size) share `samples` (positions in the global batch)."""

    first_rank: int
    size: int
    samples: tuple[int, ...]

    @property
    def ranks(self) -> range:
        """The ranks of the CP group."""
        return range(self.first_rank, self.first_rank + self.size)


@dataclass(frozen=True)
class BatchPlan:
    """The jobs of one global batch in execution order; `lockstep` promises equal job counts on all ranks."""

    ranks: int
    jobs: tuple[Job, ...]
    lockstep: bool = True

    @cached_property
    def jobs_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """For every rank, the indices of its jobs in execution order."""
        lists: list[list[int]] = [[] for _ in range(self.ranks)]
        for index, job in enumerate(self.jobs):
            for rank in job.ranks:
                lists[rank].append(index)
        return tuple(tuple(own) for own in lists)

    @property
    def microbatches(self) -> int:
        """The largest number of jobs on one rank."""
        return max(len(own) for own in self.jobs_by_rank)

    def rank_lists(self) -> list[list[list[int]]]:
        """Microbatch -> rank -> sample positions: the form of the reference test vectors (lock-step plans)."""
        return [
            [list(self.jobs[own[index]].samples) for own in self.jobs_by_rank] for index in range(self.microbatches)
        ]

    def cp_sizes(self) -> dict[int, int]:
        """How many jobs run on groups of each size."""
        return dict(sorted(Counter(job.size for job in self.jobs).items()))

    def digest(self) -> str:
        """Sixteen hexadecimal digits that equal plans share."""
        text = ";".join(f"{j.first_rank}+{j.size}:{','.join(map(str, j.samples))}" for j in self.jobs)
        return hashlib.sha256(f"{self.ranks}|{text}".encode()).hexdigest()[:16]


class Scheduler(Protocol):
    """Turns the lengths of a global batch into a plan. Pure: equal input, equal plan, on every rank."""

    @property
    def name(self) -> str:
        """Name in specs and reports."""

    @property
    def padding(self) -> PaddingRule:
        """The rule its plans count tokens with, and the worker pads with."""

    def group_sizes(self) -> tuple[int, ...]:
        """Every group size a plan may use, ascending."""

    def longest_sample(self) -> int:
        """The greatest real length that fits the domain after padding."""

    def plan(self, lengths: Sequence[int]) -> BatchPlan:
        """The plan of one global batch; `lengths` are real token counts.

        Raises:
            ScheduleError: the batch cannot be served; names the sample, its length and the limit.
        """


def usable_length(limit: int, size: int, padding: PaddingRule) -> int:
    """The greatest length that still fits `limit` tokens on a group of `size` ranks after padding."""
    unit = padding.multiple(size)
    return limit // unit * unit


def check_plan(
    plan: BatchPlan, lengths: Sequence[int], padding: PaddingRule, capacity: int, sizes: Sequence[int] | None = None
) -> None:
    """Refuse a plan that breaks a rule every plan must obey. Linear in samples and jobs.

    Every sample exactly once; no empty job; groups inside the domain and of an allowed size;
    padded tokens per rank within `capacity`; equal job counts when the plan promises lock-step.

    Raises:
        ScheduleError: the first broken rule.
    """
    seen = [0] * len(lengths)
    for number, job in enumerate(plan.jobs):
        if job.size < 1 or job.first_rank < 0 or job.first_rank + job.size > plan.ranks:
            raise ScheduleError(f"job {number} uses ranks {job.ranks} outside the domain of {plan.ranks}")
        if sizes is not None and job.size not in sizes:
            raise ScheduleError(f"job {number} uses a group of {job.size} ranks; allowed sizes are {tuple(sizes)}")
        if not job.samples:
            raise ScheduleError(f"job {number} has no sample")
        total = 0
        for sample in job.samples:
            if not 0 <= sample < len(seen):
                raise ScheduleError(f"job {number} names sample {sample} of a batch of {len(seen)}")
            seen[sample] += 1
            total += padding.pad(lengths[sample], job.size)
        if total > capacity * job.size:
            raise ScheduleError(
                f"job {number} holds {total / job.size:.0f} tokens per rank after padding; the capacity is {capacity}"
            )
    wrong = next((index for index, count in enumerate(seen) if count != 1), None)
    if wrong is not None:
        raise ScheduleError(f"sample {wrong} is planned {seen[wrong]} times instead of once")
    counts = {len(own) for own in plan.jobs_by_rank}
    if plan.lockstep and len(counts) > 1:
        raise ScheduleError(f"the ranks have different numbers of microbatches: {sorted(counts)}")
