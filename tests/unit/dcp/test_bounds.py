"""The lower bound of a menu against every placement of small batches, and against plans of larger ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.dcp import bounds
from dcpbench.dcp.bounds import lower_bound
from dcpbench.dcp.costs import H200_1B, CostModel, Link, LongKernel
from dcpbench.dcp.schedulers.laminar import Laminar
from dcpbench.dcp.schedulers.laminar_sizes import Menu, menu_sizes
from dcpbench.dcp.simulation import simulate
from dcpbench.dcp.workload import Domain

DEAR_HOPS = replace(H200_1B, within=Link(2e-4, 4e9), between=Link(1e-3, 1e9), node_size=2)
"""Ring hops that take about as long as what they send is worked on."""
COSTS = [
    H200_1B,
    DEAR_HOPS,
    replace(DEAR_HOPS, overlap=0.3, floor=0.004, floor_shared=0.02),
    replace(DEAR_HOPS, long=LongKernel(2e-10, 700.0, 16e6)),
]
SMALL = 20_000


def partitions(samples: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to make microbatches of the samples."""
    if not samples:
        yield []
        return
    first, rest = samples[0], samples[1:]
    for found in partitions(rest):
        yield [[first], *found]
        for at in range(len(found)):
            yield [*found[:at], [first, *found[at]], *found[at + 1 :]]


def least_makespan(lengths: list[int], ranks: int, capacity: int, sizes: Sequence[int], cost: CostModel) -> float:
    """Seconds of the most loaded rank, the least of all microbatches on all contiguous groups of these sizes.

    No order of them is quicker.
    """
    best = float("inf")
    groups = [range(first, first + k) for k in sizes for first in range(ranks - k + 1)]
    for made in partitions(range(len(lengths))):
        choices = []
        for job in made:
            own = [lengths[sample] for sample in job]
            # Group sizes above 1 pad to multiples of 2k.
            padded = {k: sum(own) if k == 1 else sum(-(-length // (2 * k)) * 2 * k for length in own) for k in sizes}
            choices.append([(g, cost.job_time(own, len(g))) for g in groups if padded[len(g)] <= len(g) * capacity])
        for placed in product(*choices):
            loads = [0.0] * ranks
            for group, time in placed:
                for rank in group:
                    loads[rank] += time
            best = min(best, max(loads))
    return best


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 12_000) | st.integers(1, 300), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([3_000, 6_000, 16_000]),
    st.sampled_from(["any", "pow2", "even"]),
    st.sampled_from(COSTS),
)
def test_no_placement_of_few_samples_beats_the_bound_of_its_menu(
    lengths: list[int], ranks: int, capacity: int, menu: Menu, cost: CostModel
) -> None:
    sizes = menu_sizes(menu, ranks, cost.node_size)
    bound = lower_bound(lengths, ranks, capacity, sizes, cost)
    assert bound <= least_makespan(lengths, ranks, capacity, sizes, cost) * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 24), st.sampled_from([200, 2000, 16_000]), st.sampled_from(COSTS), st.booleans())
def test_no_plan_beats_the_bound_of_its_menu(
    data: st.DataObject, ranks: int, capacity: int, cost: CostModel, giant: bool
) -> None:
    menu = data.draw(st.sampled_from(["any", "pow2", "even"]))
    made = Laminar(Domain(ranks, 1), capacity, menu=menu, cost=cost.planning(capacity), budget=SMALL)
    longest = made.longest_sample()
    lengths = data.draw(st.lists(st.integers(1, min(longest, 3 * capacity)), min_size=1, max_size=40))
    if giant:
        lengths[0] = longest
    done = simulate(made.plan(lengths), lengths, made.padding, cost).makespan
    assert lower_bound(lengths, ranks, capacity, made.group_sizes(), cost) <= done * (1 + 1e-9)


def test_bound_knows_that_powers_of_two_are_too_coarse_for_one_long_sample() -> None:
    # On 64 ranks the long sample leaves no time for the others; on 32 it is slower than on 40, which `any` has.
    lengths, capacity = [131_072, *([1_088] * 511)], 16_384
    every, powers = (menu_sizes(menu, 64, 8) for menu in ("any", "pow2"))
    wide = lower_bound(lengths, 64, capacity, every, H200_1B)
    narrow = lower_bound(lengths, 64, capacity, powers, H200_1B)
    alone = {k: H200_1B.job_time([131_072], k) for k in powers if k >= 8}
    assert narrow == pytest.approx(alone[32], rel=1e-3)
    assert narrow > 1.1 * wide
    found = Laminar(Domain(64, 1), capacity).plan(lengths)
    assert simulate(found, lengths, Laminar(Domain(64, 1), capacity).padding, H200_1B).makespan < 1.01 * narrow


def test_exposed_hops_count() -> None:
    lengths = [8_000] * 4
    with_hops = lower_bound(lengths, 8, 4_096, (2, 4), DEAR_HOPS)
    free = lower_bound(lengths, 8, 4_096, (2, 4), replace(DEAR_HOPS, within=Link(0.0, 1e15), between=Link(0.0, 1e15)))
    hop = DEAR_HOPS.job_time([8_000], 2) - replace(DEAR_HOPS, within=Link(0.0, 1e15)).job_time([8_000], 2)
    assert with_hops >= free + 0.5 * hop > free


def test_a_longest_sample_pays_its_microbatch_alone() -> None:
    # Two ranks, one sample that both serve together: its base is of all that it takes, and nothing can share it.
    cost = replace(H200_1B, base=1.0)
    bound = lower_bound([4_000, 10, 10], 2, 2_000, (2,), cost)
    assert bound >= cost.job_time([4_000], 2)
    assert bounds.LONGEST in bounds.THRESHOLDS
