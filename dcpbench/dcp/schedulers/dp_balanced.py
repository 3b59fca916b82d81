"""`dp_balanced`: the fixed-CP baseline. Samples are packed in stream order, packs are dealt to the DP ranks.

The rule is Megatron-LM's: next-fit packing up to CP x capacity tokens, then the last samples of the
last packs become packs of their own until every DP rank gets equally many. "Balanced" refers to that
number only; no cost is considered. Two things differ from Megatron-LM on purpose: samples are packed in
the order of the stream, which does not depend on DP, and a sample that fits no pack is refused instead of
producing an empty pack and an overfull one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

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
class DpBalanced:
    """Every microbatch on a fixed CP group; see the module's text for the rule.

    `capacity` is in tokens per rank; `microbatch_multiple` is the multiple that each rank's number of
    microbatches must have (virtual pipelining); `max_num_seqs` limits the samples of one pack.

    Raises:
        ScheduleError: the capacity, the multiple or the limit cannot be used.
    """

    domain: Domain
    capacity: int
    padding: PaddingRule = MINIMAL
    microbatch_multiple: int = 1
    max_num_seqs: int | None = None

    name: ClassVar[str] = "dp_balanced"

    def __post_init__(self) -> None:
        check_capacity(self.capacity, self.domain.cp, self.padding)
        if self.microbatch_multiple < 1:
            raise ScheduleError(f"microbatch_multiple is {self.microbatch_multiple}; it must be at least 1")
        if self.max_num_seqs is not None and self.max_num_seqs < 1:
            raise ScheduleError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")

    @classmethod
    def create(cls, *, domain: Domain, capacity: int, min_size: int, padding_policy: PaddingPolicy) -> Self:
        """With a padding policy's rule: `megatron` pads to 2xCP, which is what `minimal` means for a fixed group.

        `min_size` is there because all schedulers are made alike; a fixed CP size has no use for it.
        """
        fixed = PaddingRule(fixed=MINIMAL.multiple(domain.cp))
        return cls(domain, capacity, fixed if padding_policy == "megatron" else MINIMAL)

    def group_sizes(self) -> tuple[int, ...]:
        """The CP size."""
        return (self.domain.cp,)

    def groups(self) -> list[tuple[int, int]]:
        """The CP group of every DP rank."""
        return [(dp_rank * self.domain.cp, self.domain.cp) for dp_rank in range(self.domain.dp)]

    def longest_sample(self) -> int:
        """The greatest real length that one CP group holds."""
        return usable_length(self.capacity * self.domain.cp, self.domain.cp, self.padding)

    def plan(self, lengths: Sequence[int]) -> BatchPlan:
        """Pack m x DP + d is microbatch m of DP rank d.

        Raises:
            ScheduleError: a sample is too long, or there are fewer samples than packs needed.
        """
        cp, dp = self.domain.cp, self.domain.dp
        checked = check_lengths(lengths, self.capacity * cp, cp, self.padding)
        packs = self._level(self._pack(checked), len(checked))
        jobs = tuple(Job(number % dp * cp, cp, tuple(pack)) for number, pack in enumerate(packs))
        plan = BatchPlan(self.domain.ranks, jobs)
        check_plan(plan, checked, self.padding, self.capacity, self.group_sizes(), set(self.groups()))
        return plan

    def _pack(self, lengths: list[int]) -> list[list[int]]:
        """Next-fit: a pack is closed for good by the first sample it cannot take."""
        limit = self.capacity * self.domain.cp
        packs: list[list[int]] = []
        room = 0
        for sample, length in enumerate(lengths):
            tokens = self.padding.pad(length, self.domain.cp)
            if not packs or tokens > room or len(packs[-1]) == self.max_num_seqs:
                packs.append([])
                room = limit
            packs[-1].append(sample)
            room -= tokens
        return packs

    def _level(self, packs: list[list[int]], samples: int) -> list[list[int]]:
        """Give the last samples of the last packs packs of their own until the number of packs is a multiple."""
        multiple = self.domain.dp * self.microbatch_multiple
        missing = -len(packs) % multiple
        if missing > samples - len(packs):
            raise ScheduleError(
                f"not enough samples to move: dp_balanced packed {samples} samples into {len(packs)} packs and needs "
                f"a multiple of {multiple} (DP {self.domain.dp} x microbatch multiple {self.microbatch_multiple}), "
                f"which takes at least {len(packs) + missing} samples; use a larger global batch or a smaller DP"
            )
        singles: list[list[int]] = []
        for pack in reversed(packs):
            while len(pack) > 1 and len(singles) < missing:
                singles.append([pack.pop()])
        return packs + singles
