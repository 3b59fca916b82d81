"""`default_dynamic_cp`: Megatron-LM's dynamic-CP rule. Each microbatch gets groups of the sizes its samples need.

The rule. Samples go longest first. The longest one opens a group of the smallest size that holds it;
each next sample tries, for every size from its smallest up, first the groups of that size and then a new
group, and among the choices with room takes the one with the least maximum of sum(s^2 / k) over the ranks
(the earliest one among equals). A sample that has room nowhere waits for the next microbatch. Ranks left empty
are filled by doubling the smallest groups, and when that is impossible the microbatch is given up for one
group over all ranks.

Sizes are powers of two from `min_size` up, and the whole domain. For a domain that is a power of two this
is exactly Megatron-LM's result. For other domains Megatron-LM fails on many batches; here the whole
domain takes what the largest power of two cannot hold, and a fill that would run past the last rank falls
back to the whole domain, so every batch whose samples fit is served.

Group sizes never increase from rank 0 upward, so a group of 2^n ranks starts at a multiple of 2^n: whenever a
sample was given size k, a new group of k is a choice at no cost to the maximum for all later, shorter ones.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

from dcpbench.dcp.schedulers.placement import Batch, Block, Microbatch
from dcpbench.dcp.workload import (
    MINIMAL,
    BatchPlan,
    Domain,
    Job,
    PaddingPolicy,
    PaddingRule,
    check_capacity,
    check_lengths,
    check_plan,
    usable_length,
)
from dcpbench.errors import ScheduleError


@dataclass(frozen=True)
class DefaultDynamicCp:
    """Dynamic CP by Megatron-LM's rule; see the module's text.

    `capacity` is in tokens per rank; `min_size` is the smallest group, a power of two that divides the
    domain, or the whole domain; `microbatch_multiple` is the multiple that the number of
    microbatches must have (virtual pipelining).

    Raises:
        ScheduleError: the capacity, the smallest size or the multiple cannot be used.
    """

    domain: Domain
    capacity: int
    min_size: int = 1
    padding: PaddingRule = MINIMAL
    microbatch_multiple: int = 1

    name: ClassVar[str] = "default_dynamic_cp"

    def __post_init__(self) -> None:
        ranks, smallest = self.domain.ranks, self.min_size
        possible = [k for k in sizes_of(ranks, 1) if ranks % k == 0]
        if smallest not in possible:
            if smallest > ranks:
                reason = f"the domain has only {ranks} ranks"
            elif smallest < 1 or smallest & (smallest - 1):
                reason = "it must be a power of two or the whole domain"
            else:
                reason = f"{ranks} ranks cannot be divided into groups of {smallest}"
            raise ScheduleError(
                f"min_dynamic_context_parallel_size {smallest} cannot be used: {reason}; "
                f"possible values are {', '.join(map(str, possible))}"
            )
        check_capacity(self.capacity, ranks, self.padding)
        if self.microbatch_multiple < 1:
            raise ScheduleError(f"microbatch_multiple is {self.microbatch_multiple}; it must be at least 1")

    @classmethod
    def create(cls, *, domain: Domain, capacity: int, min_size: int, padding_policy: PaddingPolicy) -> Self:
        """With a padding policy's rule.

        `megatron` pads every sample to 2xDPxCP whatever group it runs on; for a domain that is no power of
        two, to the least common multiple of 2k for all sizes k, as zigzag needs 2k equal chunks on each.
        """
        scheduler = cls(domain, capacity, min_size)
        if padding_policy == "minimal":
            return scheduler
        unit = math.lcm(*map(MINIMAL.multiple, scheduler.group_sizes()))
        return replace(scheduler, padding=PaddingRule(fixed=unit))

    def group_sizes(self) -> tuple[int, ...]:
        """Powers of two from the smallest size up, and the whole domain."""
        return sizes_of(self.domain.ranks, self.min_size)

    def groups(self) -> list[tuple[int, int]]:
        """The aligned blocks of each size, small sizes first; blocks that would be cut short do not exist."""
        ranks = self.domain.ranks
        return [(first, k) for k in self.group_sizes() for first in range(0, ranks - k + 1, k)]

    def longest_sample(self) -> int:
        """The greatest real length that the whole domain holds."""
        return usable_length(self.capacity * self.domain.ranks, self.domain.ranks, self.padding)

    def plan(self, lengths: Sequence[int]) -> BatchPlan:
        """Jobs by microbatch, then by first rank.

        Raises:
            ScheduleError: a sample is too long, or the microbatches cannot be split to the multiple asked for.
        """
        ranks = self.domain.ranks
        checked = check_lengths(lengths, self.capacity * ranks, ranks, self.padding)
        batch = Batch(checked, self.group_sizes(), self.capacity, self.padding)
        microbatches: list[list[Block]] = []
        while batch.next(0) < len(checked):
            blocks = self._fill(Microbatch(batch, ranks, self.capacity).blocks, batch)
            microbatches.append(blocks or [self._whole_domain(batch)])
            batch.remove(microbatches[-1])
        self._align(microbatches, batch)

        jobs: list[Job] = []
        for blocks in microbatches:
            first = 0
            for size, members in blocks:
                jobs.append(Job(first, size, tuple(batch.samples[place] for place in members)))
                first += size
        plan = BatchPlan(ranks, tuple(jobs))
        check_plan(plan, checked, self.padding, self.capacity, self.group_sizes(), self._known_groups)
        return plan

    @cached_property
    def _known_groups(self) -> frozenset[tuple[int, int]]:
        return frozenset(self.groups())

    def _fill(self, blocks: list[Block], batch: Batch) -> list[Block] | None:
        """Double the smallest blocks, leftmost first, until no rank is empty; None when that is impossible.

        A block that padding for twice the ranks would make too full is passed over, and the block that
        grows instead moves before it, so that sizes still never increase.
        """
        ranks, blocks = self.domain.ranks, list(blocks)
        used = sum(size for size, _ in blocks)
        while used < ranks:
            size = blocks[-1][0]
            grown = min(2 * size, ranks)
            used += grown - size
            first = bisect_left(blocks, -size, key=lambda block: -block[0])
            growing = (at for at in range(first, len(blocks)) if self._holds(grown, blocks[at][1], batch))
            at = next(growing, None)
            if used > ranks or at is None:
                return None
            blocks.insert(first, (grown, blocks.pop(at)[1]))
        return blocks

    def _holds(self, size: int, members: list[int], batch: Batch) -> bool:
        tokens = batch.tokens[size]
        return sum(tokens[place] for place in members) <= size * self.capacity

    def _whole_domain(self, batch: Batch) -> Block:
        """One group over all ranks with every sample that still fits, longest first."""
        ranks = self.domain.ranks
        tokens, room = batch.tokens[ranks], ranks * self.capacity
        members: list[int] = []
        place = batch.next(0)
        while place < len(tokens):
            members.append(place)
            room -= tokens[place]
            place = batch.next(bisect_left(tokens, -room, place + 1, key=operator.neg))
        return ranks, members

    def _align(self, microbatches: list[list[Block]], batch: Batch) -> None:
        """Split microbatches, from the last one leftwards and round again, until their number is a multiple."""
        at, failures = len(microbatches) - 1, 0
        while len(microbatches) % self.microbatch_multiple:
            halves = self._split(microbatches[at], batch)
            if halves is None:
                failures += 1
                if failures == len(microbatches):
                    raise ScheduleError(
                        f"default_dynamic_cp planned {len(batch.samples)} samples in {len(microbatches)} microbatches, "
                        f"none of which has enough samples to be split further towards a multiple of "
                        f"{self.microbatch_multiple}; use a larger global batch"
                    )
            else:
                failures = 0
                head, microbatches[at] = halves
                microbatches.append(head)
            at = (at or len(microbatches)) - 1

    def _split(self, blocks: list[Block], batch: Batch) -> tuple[list[Block], list[Block]] | None:
        """Two microbatches of the blocks before and after the first boundary at or past the middle rank."""
        if len(blocks) < 2:
            return None
        cut = boundary = 0
        while 2 * boundary < self.domain.ranks:
            boundary += blocks[cut][0]
            cut += 1
        head, tail = self._refill(blocks[:cut], batch), self._refill(blocks[cut:], batch)
        return (head, tail) if head and tail else None

    def _refill(self, blocks: list[Block], batch: Batch) -> list[Block] | None:
        """The blocks on all ranks: doubled where possible, else their samples on the whole domain if they fit."""
        filled = self._fill(blocks, batch)
        if filled is None:
            members = sorted(place for _, own in blocks for place in own)
            if self._holds(self.domain.ranks, members, batch):
                filled = [(self.domain.ranks, members)]
        return filled


def sizes_of(ranks: int, smallest: int) -> tuple[int, ...]:
    """Powers of two from `smallest` up that are below `ranks`, then `ranks`."""
    sizes = []
    while smallest < ranks:
        sizes.append(smallest)
        smallest *= 2
    return (*sizes, ranks)
