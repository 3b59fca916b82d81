"""Blocks of ranks filled one after the other: valid plans that keep their target, or none."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.dcp.bounds import lower_bound
from dcpbench.dcp.costs import H200_1B, CostModel
from dcpbench.dcp.schedulers.laminar import Laminar
from dcpbench.dcp.schedulers.laminar_batch import Batch
from dcpbench.dcp.schedulers.laminar_cover import cover, longest_joining
from dcpbench.dcp.schedulers.laminar_instance import job_time, pad, squares
from dcpbench.dcp.schedulers.laminar_polish import keep
from dcpbench.dcp.schedulers.laminar_search import Search
from dcpbench.dcp.schedulers.laminar_sizes import Menu
from dcpbench.dcp.simulation import simulate
from dcpbench.dcp.workload import MINIMAL, Domain

COSTS = [
    H200_1B,
    replace(H200_1B, floor=0.012, floor_shared=0.02, overlap=0.4, node_size=4),
    replace(H200_1B, node_size=1),
]


@settings(max_examples=120, deadline=None)
@given(
    st.data(),
    st.integers(1, 40),
    st.sampled_from([64, 500, 2048]),
    st.sampled_from(["any", "pow2", "even"]),
    st.sampled_from(COSTS),
    st.floats(1.0, 3.0),
)
def test_plans_are_valid_and_keep_the_target(
    data: st.DataObject, ranks: int, capacity: int, menu: Menu, cost: CostModel, multiple: float
) -> None:
    made = Laminar(Domain(ranks, 1), capacity, menu=menu, cost=cost)
    lengths = data.draw(st.lists(st.integers(1, made.longest_sample()), min_size=1, max_size=60))
    sizes = made.group_sizes()
    search = Search(Batch(np.array(lengths), ranks, sizes, capacity, MINIMAL, made.cost), {menu: sizes}, 0)
    target = multiple * search.bound
    time = cover(search.instance, search.space, target, menu == "pow2")
    if time == float("inf"):
        return
    assert time <= target * (1 + 1e-12)
    keep(search.space, search.best)
    search.time = time
    plan = made._plan_of(search, np.array(lengths))  # checks every rule, and the predicted time
    assert simulate(plan, lengths, MINIMAL, made.cost).makespan == pytest.approx(time, rel=1e-9)
    # Blocks are never split: a rank has one group.
    for own in plan.jobs_by_rank:
        assert len({(plan.jobs[job].first_rank, plan.jobs[job].size) for job in own}) <= 1


def test_a_generous_target_is_always_kept_where_single_ranks_do() -> None:
    rng = random.Random(3)
    for _ in range(30):
        ranks = rng.randint(1, 30)
        lengths = [rng.randint(1, 2048) for _ in range(ranks)]
        made = Laminar(Domain(ranks, 1), 2048, menu="any")
        search = Search(
            Batch(np.array(lengths), ranks, made.group_sizes(), 2048, MINIMAL, H200_1B),
            {"any": made.group_sizes()},
            0,
        )
        longest = H200_1B.job_time([max(lengths)], 1)
        # One sample a rank takes no longer than the longest; blocks only ever take more samples than that.
        assert cover(search.instance, search.space, longest, False) <= longest * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(COSTS), st.integers(0, 4000), st.floats(0.0, 0.2))
def test_the_longest_sample_that_joins_a_job(data: st.DataObject, cost: CostModel, held: int, left: float) -> None:
    made = Laminar(Domain(8, 1), 4096, menu="any", cost=cost)
    lengths = sorted(data.draw(st.lists(st.integers(1, 9000), min_size=1, max_size=30)), reverse=True)
    instance = Batch(np.array(lengths), 8, made.group_sizes(), 4096, MINIMAL, made.cost).instance
    j = data.draw(st.integers(0, len(made.group_sizes()) - 1))
    size, unit = made.group_sizes()[j], int(instance.units[j])
    tokens = pad(held, unit)
    total = squares(held, size) if held else 0.0
    now = made.cost.time(size, tokens, total) if tokens else made.cost.base
    device = replace(made.cost, floor=0.0, floor_shared=0.0).time(size, tokens, total) if tokens else now

    def joins(length: int) -> bool:
        more = tokens + pad(length, unit)
        time = job_time(instance.rates, j, more, total + squares(length, size))
        return more <= size * 4096 and time <= left

    fits = [place for place, length in enumerate(lengths) if joins(length)]
    found = longest_joining(instance, 0, j, tokens, total, device, left)
    assert found == (fits[0] if fits else len(lengths))


def test_few_samples_per_rank_are_planned_close_to_the_bound() -> None:
    # A long tail with one sample per rank: 8 % above the bound before blocks were filled one by one.
    rng = random.Random(0)
    lengths = []
    for _ in range(64):
        tail = rng.random() < 0.03
        drawn = 8000 * rng.paretovariate(1.0) if tail else rng.lognormvariate(np.log(940), 1.0)
        lengths.append(min(max(int(drawn), 64), 131072))
    made = Laminar(Domain(64, 1), 16384, menu="any")
    time = simulate(made.plan(lengths), lengths, MINIMAL, H200_1B).makespan
    assert time <= 1.03 * lower_bound(lengths, 64, 16384, made.group_sizes(), H200_1B)
