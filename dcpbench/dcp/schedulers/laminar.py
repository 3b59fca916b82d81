"""`laminar`: groups of chosen sizes placed so that no rank waits inside the iteration, searched within a fixed budget.

The rule. Samples go longest first. Each gets the smallest group size that holds it and alone finishes within a
share of a target time, so sizes never increase along the order; then all are placed, large groups first, on blocks
of ranks that only ever split (`laminar_placement`). Along each rank the group size therefore never increases, all
members of a job are ready at the same moment, and the iteration takes as long as the most loaded rank.

With few samples per rank there is a second way, in which blocks are filled one after the other (`laminar_cover`).

One such pass depends on the target, the sizes allowed and the rules, so a list of candidates is tried and the
shortest plan kept. The search stops at a budget counted in steps, near the bound, or when candidates run out:
never by a clock, as every rank must arrive at the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from dcpbench.dcp.costs import H200_1B, CostModel
from dcpbench.dcp.ordering import stable_order
from dcpbench.dcp.schedulers.laminar_sizes import Menu, menu_sizes
from dcpbench.dcp.simulation import busiest, is_laminar
from dcpbench.dcp.workload import (
    MINIMAL,
    BatchPlan,
    Domain,
    Ints,
    Jobs,
    PaddingPolicy,
    PaddingRule,
    check_capacity,
    check_plan,
    checked_lengths,
    usable_length,
)
from dcpbench.errors import ScheduleError

if TYPE_CHECKING:
    from dcpbench.dcp.schedulers.laminar_search import Search

_MOST_PADDING = 4
"""Times the ranks of the domain to which every sample may be padded; powers of two want 2."""
UNALIGNED_RANKS = 8
"""The largest domain whose contiguous blocks of all sizes may each have a communicator: 36 of them."""


@dataclass(frozen=True)
class Laminar:
    """Near-optimal plans under a cost model; see the module's text.

    `capacity` is in tokens per rank; `min_size` is the smallest group, one of the menu's sizes; `budget` is the
    number of elementary steps to search, by default about 1 % of the iteration. Communicators exist for aligned blocks
    (`pow2`) or for every contiguous block (`any`, `even`, up to 8 ranks); planning alone works for any domain.

    Raises:
        ScheduleError: the capacity, the smallest size or the menu cannot be used.
    """

    domain: Domain
    capacity: int
    min_size: int = 1
    padding: PaddingRule = MINIMAL
    menu: Menu = "pow2"
    cost: CostModel = H200_1B
    budget: int | None = None

    name: ClassVar[str] = "laminar"

    def __post_init__(self) -> None:
        ranks, node = self.domain.ranks, self.cost.node_size
        if self.menu == "pow2" and ranks > node and node & (node - 1):
            raise ScheduleError(
                f"menu pow2 needs nodes of a power of two ranks, not {node}, so that groups stay aligned; "
                f"use any or even"
            )
        sizes = menu_sizes(self.menu, ranks, node)
        if self.min_size not in sizes:
            raise ScheduleError(
                f"min_dynamic_context_parallel_size {self.min_size} cannot be used with menu {self.menu} on {ranks} "
                f"ranks; possible values are {', '.join(map(str, sizes))}"
            )
        check_capacity(self.capacity, ranks, self.padding)

    @classmethod
    def create(
        cls,
        *,
        domain: Domain,
        capacity: int,
        min_size: int,
        padding_policy: PaddingPolicy,
        menu: Menu = "pow2",
        cost: CostModel = H200_1B,
    ) -> Self:
        """With a padding policy's rule; without more words, aligned groups and the assumed H200 cost model.

        `megatron` pads every sample to the least common multiple of 2k for all sizes k, as `default_dynamic_cp` does.

        Raises:
            ScheduleError: that multiple is out of proportion, as it is for sizes that are no powers of two.
        """
        scheduler = cls(domain, capacity, min_size, menu=menu, cost=cost)
        if padding_policy == "minimal":
            return scheduler
        unit = math.lcm(*map(MINIMAL.multiple, scheduler.group_sizes()))
        if menu != "pow2" and unit > _MOST_PADDING * domain.ranks:
            raise ScheduleError(
                f"schedule.menu {menu} on {domain.ranks} ranks with cases.padding megatron would pad every sample to a "
                f"multiple of {unit} tokens; set cases.padding to minimal, which pads for the group really used"
            )
        return replace(scheduler, padding=PaddingRule(fixed=unit))

    def group_sizes(self) -> tuple[int, ...]:
        """The menu's sizes from the smallest one up."""
        return tuple(k for k in self._menus[self.menu] if k >= self.min_size)

    def groups(self) -> list[tuple[int, int]]:
        """Every block that a plan may use, small sizes first: aligned ones for `pow2`, else all contiguous ones.

        Raises:
            ScheduleError: too many blocks to make a communicator for each.
        """
        ranks = self.domain.ranks
        if self.menu == "pow2":
            return [(first, k) for k in self.group_sizes() for first in range(0, ranks - k + 1, k)]
        if ranks > UNALIGNED_RANKS:
            raise ScheduleError(
                f"menu {self.menu} on {ranks} ranks would need up to {ranks * (ranks + 1) // 2} communicators; "
                f"attention that needs them (te) serves at most {UNALIGNED_RANKS} ranks, use menu pow2 or not te"
            )
        return [(first, k) for k in self.group_sizes() for first in range(ranks - k + 1)]

    def longest_sample(self) -> int:
        """The greatest real length that the whole domain holds."""
        return usable_length(self.capacity * self.domain.ranks, self.domain.ranks, self.padding)

    def plan(self, lengths: Sequence[int]) -> BatchPlan:
        """Jobs in execution order; ranks may have different numbers of them, none if there are few samples.

        Raises:
            ScheduleError: a sample is too long, or there is none.
        """
        # Only planning needs the loops, and numba takes a while to load.
        from dcpbench.dcp.schedulers.laminar_batch import Batch  # noqa: PLC0415
        from dcpbench.dcp.schedulers.laminar_search import Search  # noqa: PLC0415

        ranks = self.domain.ranks
        checked = checked_lengths(lengths, self.capacity * ranks, ranks, self.padding)
        batch = Batch(checked, ranks, self.group_sizes(), self.capacity, self.padding, self.cost)
        search = Search(batch, self._menus, self.budget)
        search.run()
        return self._plan_of(search, checked)

    def _plan_of(self, search: Search, lengths: Ints) -> BatchPlan:
        """The plan that a search found.

        Raises:
            ScheduleError: it breaks a rule, or is not what the search took it for: an error in dcpbench.
        """
        batch, best = search.batch, search.best
        count = int(best.jobs[0])
        job_of = np.asarray(best.job_of, np.int64)
        starts = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(job_of, minlength=count), out=starts[1:])
        sizes = np.array(batch.sizes, np.int64)[np.asarray(best.job_class[:count], np.int64)]
        samples = batch.samples[stable_order(job_of)]
        jobs = Jobs(np.array(best.job_first[:count], np.int64), sizes, starts, samples)
        plan = BatchPlan(self.domain.ranks, jobs, lockstep=False)
        check_plan(plan, lengths, self.padding, self.capacity, self.group_sizes())
        # What `groups` has for pow2, without a look at each of tens of thousands of jobs.
        if self.menu == "pow2" and (jobs.first % jobs.size).any():
            raise ScheduleError("laminar made a plan with a group that is no aligned block; report this batch")
        node, first, last = self.cost.node_size, jobs.first, jobs.first + jobs.size - 1
        if not np.where(jobs.size <= node, first // node == last // node, first % node == 0).all():
            raise ScheduleError("laminar made a plan with a group that crosses nodes without need; report this batch")
        if not is_laminar(plan):
            raise ScheduleError("laminar made a plan in which ranks wait for each other; report this batch")
        simulated = busiest(plan, lengths, self.padding, self.cost)
        if abs(simulated - search.time) > 1e-9 * simulated:
            raise ScheduleError(
                f"laminar predicted {search.time:.9g} s for a plan that takes {simulated:.9g} s; report this batch"
            )
        return plan

    @cached_property
    def _menus(self) -> dict[str, tuple[int, ...]]:
        """The scheduler's own menu, and what of the others lies within it.

        `whole` leaves out sizes of more than half the ranks but not all: one such group leaves the others idle.
        """
        ranks = self.domain.ranks
        own = menu_sizes(self.menu, ranks, self.cost.node_size)
        menus: dict[str, tuple[int, ...]] = {self.menu: own}
        names: tuple[Menu, ...] = ("pow2", "any", "even")
        for name in names if self.menu == "any" else ():
            menus[name] = tuple(k for k in menu_sizes(name, ranks, self.cost.node_size) if k in own)
        first = menus.get("pow2", own)
        whole = tuple(k for k in first if 2 * k <= ranks or k == ranks)
        return menus if whole == first else {**menus, "whole": whole}
