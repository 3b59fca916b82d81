"""What a scheduler plans with: the domain, the padding rule, the jobs, and the rules every plan obeys.

Pure Python and NumPy. A *domain* is the DPxCP ranks that samples are distributed over; a *job* is
one microbatch: a contiguous interval of ranks (its CP group) and the samples they share. A *batch
plan* is an ordered list of jobs; each rank executes its own jobs in that order, so ranks may have
different numbers of jobs unless the scheduler promises lock-step.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from dcpbench.dcp.ordering import stable_order
from dcpbench.errors import ScheduleError

Ints = NDArray[np.int64]

PaddingPolicy = Literal["megatron", "minimal"]
"""How a scheduler's padding rule is chosen: as Megatron-LM pads, or 2k for the group really used."""


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

    def pad_all(self, lengths: Ints, size: int) -> Ints:
        """Each of the lengths rounded up for a group of `size` ranks."""
        unit = self.multiple(size)
        return -(-lengths // unit) * unit


MINIMAL = PaddingRule()
"""2k for a group of k > 1 ranks, nothing for one rank."""


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


class Jobs(Sequence[Job]):
    """Many jobs as four arrays: job j has ranks [first[j], first[j] + size[j]) and samples[starts[j]:starts[j + 1]].

    A sequence of `Job`s, which are made when they are asked for. Arrays of int64; shapes (jobs,), (jobs,), (jobs + 1,)
    and (samples of all jobs,).
    """

    def __init__(self, first: Ints, size: Ints, starts: Ints, samples: Ints) -> None:
        self.first, self.size, self.starts, self.samples = first, size, starts, samples

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Jobs:
        """The arrays of any jobs."""
        if isinstance(jobs, Jobs):
            return jobs
        starts = np.zeros(len(jobs) + 1, np.int64)
        np.cumsum([len(job.samples) for job in jobs], out=starts[1:])
        return cls(
            np.array([job.first_rank for job in jobs], np.int64),
            np.array([job.size for job in jobs], np.int64),
            starts,
            np.array([sample for job in jobs for sample in job.samples], np.int64),
        )

    @property
    def counts(self) -> Ints:
        """Samples of each job, shape (jobs,)."""
        return np.diff(self.starts)

    def spread(self) -> tuple[Ints, Ints]:
        """Every (job, rank) that belong together, jobs ascending, each job's ranks ascending; two equal shapes."""
        job = np.repeat(np.arange(len(self), dtype=np.int64), self.size)
        ends = np.cumsum(self.size)
        rank = np.arange(len(job), dtype=np.int64) + np.repeat(self.first - (ends - self.size), self.size)
        return job, rank

    def by_rank(self) -> tuple[Ints, Ints]:
        """`spread` sorted by rank, and within a rank by execution order."""
        job, rank = self.spread()
        order = stable_order(rank)
        return job[order], rank[order]

    def __len__(self) -> int:
        return len(self.first)

    @overload
    def __getitem__(self, index: int) -> Job: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Job, ...]: ...

    def __getitem__(self, index: int | slice) -> Job | tuple[Job, ...]:
        if isinstance(index, slice):
            return self._all[index]
        return self._all[index]

    @cached_property
    def _all(self) -> tuple[Job, ...]:
        samples, starts = self.samples.tolist(), self.starts.tolist()
        return tuple(
            Job(first, size, tuple(samples[start:end]))
            for first, size, start, end in zip(
                self.first.tolist(), self.size.tolist(), starts[:-1], starts[1:], strict=True
            )
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, Jobs)):
            return NotImplemented
        return self._all == (other._all if isinstance(other, Jobs) else other)

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        return repr(self._all)


@dataclass(frozen=True)
class BatchPlan:
    """The jobs of one global batch in execution order; `lockstep` promises equal job counts on all ranks."""

    ranks: int
    jobs: Sequence[Job]
    lockstep: bool = True

    @cached_property
    def arrays(self) -> Jobs:
        """The jobs as arrays."""
        return Jobs.of(self.jobs)

    @cached_property
    def jobs_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """For every rank, the indices of its jobs in execution order."""
        job, rank = self.arrays.by_rank()
        ends = np.cumsum(np.bincount(rank, minlength=self.ranks)).tolist()
        every = job.tolist()
        return tuple(tuple(every[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True))

    @property
    def microbatches(self) -> int:
        """The largest number of jobs on one rank."""
        change = np.zeros(self.ranks + 1, np.int64)
        np.add.at(change, self.arrays.first, 1)
        np.subtract.at(change, self.arrays.first + self.arrays.size, 1)
        return int(np.cumsum(change).max())

    def rank_lists(self) -> list[list[list[int]]]:
        """Microbatch -> rank -> sample positions: the form of the reference test vectors (lock-step plans)."""
        return [
            [list(self.jobs[own[index]].samples) for own in self.jobs_by_rank] for index in range(self.microbatches)
        ]

    def cp_sizes(self) -> dict[int, int]:
        """How many jobs run on groups of each size."""
        sizes, counts = np.unique(self.arrays.size, return_counts=True)
        return dict(zip(sizes.tolist(), counts.tolist(), strict=True))

    def digest(self) -> str:
        """Sixteen hexadecimal digits that equal plans share."""
        jobs = self.arrays
        found = hashlib.sha256(f"{self.ranks},{len(jobs)},{len(jobs.samples)}".encode())
        for part in (jobs.first, jobs.size, jobs.starts, jobs.samples):
            found.update(part.astype("<i8").tobytes())
        return found.hexdigest()[:16]


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

    def groups(self) -> list[tuple[int, int]]:
        """Every (first rank, size) a plan may use, in the one order in which communicators are created."""

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


def check_lengths(lengths: Sequence[int], limit: int, size: int, padding: PaddingRule) -> list[int]:
    """`checked_lengths` as plain integers."""
    checked: list[int] = checked_lengths(lengths, limit, size, padding).tolist()
    return checked


def checked_lengths(lengths: Sequence[int], limit: int, size: int, padding: PaddingRule) -> Ints:
    """The lengths as an array, when each of them alone fits `limit` tokens on a group of `size` ranks.

    Raises:
        ScheduleError: no sample, a length that is no positive whole number, or a sample that does
            not fit after padding; names the sample, its length and the limit.
    """
    usable = usable_length(limit, size, padding)
    try:
        array = np.asarray(lengths)
    except (ValueError, OverflowError):  # a ragged list, a number beyond 64 bits
        array = np.empty(0)
    if array.ndim == 1 and array.dtype.kind in "iu" and array.size and array.min() >= 1 and array.max() <= usable:
        return array.astype(np.int64)
    checked = []
    for sample, length in enumerate(lengths):
        try:
            tokens = operator.index(length)
        except TypeError:
            raise ScheduleError(f"sample {sample} has the length {length!r}; lengths are whole tokens") from None
        if tokens < 1:
            raise ScheduleError(f"sample {sample} has {tokens} tokens; drop it, a sample needs at least one")
        if tokens > usable:
            padded = (
                f", of which the usable length is {usable} because samples are padded to a multiple of "
                f"{padding.multiple(size)}"
                if usable < limit
                else ""
            )
            raise ScheduleError(
                f"sample {sample} has {tokens} tokens, but {_ranks(size)} hold at most {limit} in one "
                f"microbatch{padded}; shorten or drop the sample, or raise max_seqlen_per_dp_cp_rank"
            )
        checked.append(tokens)
    if not checked:
        raise ScheduleError("the global batch has no sample, so there is nothing to schedule")
    return np.array(checked, np.int64)


def check_capacity(capacity: int, size: int, padding: PaddingRule) -> None:
    """Refuse a capacity below one padding unit of the largest group: it could not hold even one token.

    Raises:
        ScheduleError: names the capacity, the unit and the smallest capacity that works.
    """
    unit = padding.multiple(size)
    if capacity < 1 or capacity * size < unit:
        raise ScheduleError(
            f"max_seqlen_per_dp_cp_rank {capacity} is too small: {_ranks(size)} pad every sample to a multiple of "
            f"{unit}, so it must be at least {max(1, -(-unit // size))}"
        )


def _ranks(size: int) -> str:
    return f"the {size} ranks of a group" if size > 1 else "groups of one rank"


def check_plan(
    plan: BatchPlan,
    lengths: Sequence[int] | Ints,
    padding: PaddingRule,
    capacity: int,
    sizes: Sequence[int] | None = None,
    groups: Collection[tuple[int, int]] | None = None,
) -> None:
    """Refuse a plan that breaks a rule every plan must obey. Linear in samples and in ranks x jobs per rank, in NumPy.

    Every sample exactly once; no empty job; groups inside the domain, of an allowed size and, where
    `groups` is given, among the (first rank, size) that have a communicator; padded tokens per rank
    within `capacity`. A plan that promises lock-step gives every rank the same number of jobs, and all
    members of a job have done equally many before it, so its m-th jobs are one microbatch of the domain.

    Jobs have one global order and ranks follow it, so no plan that passes can dead-lock.

    Raises:
        ScheduleError: the first broken rule.
    """
    if not _obeys(plan, lengths, padding, capacity, sizes, groups):
        _name_broken_rule(plan, lengths, padding, capacity, sizes, groups)


def _obeys(
    plan: BatchPlan,
    lengths: Sequence[int] | Ints,
    padding: PaddingRule,
    capacity: int,
    sizes: Sequence[int] | None,
    groups: Collection[tuple[int, int]] | None,
) -> bool:
    """Whether a plan keeps all rules of `check_plan`."""
    jobs, own = plan.arrays, np.asarray(lengths, np.int64)
    first, size, counts, samples = jobs.first, jobs.size, jobs.counts, jobs.samples
    if not len(jobs) or len(samples) != len(own):
        return False
    if size.min() < 1 or first.min() < 0 or (first + size).max() > plan.ranks or counts.min() < 1:
        return False
    if samples.min() < 0 or samples.max() >= len(own) or np.bincount(samples, minlength=len(own)).max() > 1:
        return False
    used = np.flatnonzero(np.bincount(size)).tolist()
    known = groups is None or all(group in groups for group in zip(first.tolist(), size.tolist(), strict=True))
    if (sizes is not None and not set(used) <= set(sizes)) or not known:
        return False
    units = np.zeros(max(used) + 1, np.int64)
    units[used] = [padding.multiple(k) for k in used]
    unit = np.repeat(units[size], counts)
    tokens = np.add.reduceat(-(-own[samples] // unit) * unit, jobs.starts[:-1])
    return bool((tokens <= capacity * size).all()) and (not plan.lockstep or _in_step(plan))


def _in_step(plan: BatchPlan) -> bool:
    """Whether all ranks have equally many jobs and each job is the m-th of all its ranks, for one m."""
    job, rank = plan.arrays.by_rank()
    per_rank = np.bincount(rank, minlength=plan.ranks)
    if per_rank.min() != per_rank.max():
        return False
    turn = np.arange(len(job)) % max(1, int(per_rank[0]))
    earliest, latest = np.full(len(plan.arrays), len(job)), np.zeros(len(plan.arrays), np.int64)
    np.minimum.at(earliest, job, turn)
    np.maximum.at(latest, job, turn)
    return bool((earliest == latest).all())


def _name_broken_rule(
    plan: BatchPlan,
    lengths: Sequence[int] | Ints,
    padding: PaddingRule,
    capacity: int,
    sizes: Sequence[int] | None,
    groups: Collection[tuple[int, int]] | None,
) -> None:
    """Raise for the first broken rule, one job after the other."""
    seen = [0] * len(lengths)
    done = [0] * plan.ranks
    for number, job in enumerate(plan.jobs):
        if job.size < 1 or job.first_rank < 0 or job.first_rank + job.size > plan.ranks:
            raise ScheduleError(f"job {number} uses ranks {job.ranks} outside the domain of {plan.ranks}")
        if sizes is not None and job.size not in sizes:
            raise ScheduleError(f"job {number} uses a group of {job.size} ranks; allowed sizes are {tuple(sizes)}")
        if groups is not None and (job.first_rank, job.size) not in groups:
            raise ScheduleError(
                f"job {number} uses {job.size} ranks from rank {job.first_rank}, for which no group is created"
            )
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
                f"job {number} holds {total / job.size:g} tokens per rank after padding; the capacity is {capacity}"
            )
        before = done[job.first_rank]
        for rank in job.ranks:
            if plan.lockstep and done[rank] != before:
                raise ScheduleError(
                    f"job {number} is microbatch {before} on rank {job.first_rank} but {done[rank]} on rank {rank}"
                )
            done[rank] += 1
    wrong = next((index for index, count in enumerate(seen) if count != 1), None)
    if wrong is not None:
        raise ScheduleError(f"sample {wrong} is planned {seen[wrong]} times instead of once")
    if plan.lockstep and len(set(done)) > 1:
        raise ScheduleError(f"the ranks have different numbers of microbatches: {sorted(set(done))}")
