"""`laminar`: every plan valid, laminar, deterministic, and as long as it was predicted to be."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.dcp.bounds import lower_bound
from dcpbench.dcp.costs import H200_1B, CostModel
from dcpbench.dcp.schedulers import create, of_case
from dcpbench.dcp.schedulers.default_dynamic_cp import DefaultDynamicCp
from dcpbench.dcp.schedulers.laminar import Laminar
from dcpbench.dcp.schedulers.laminar_batch import Batch
from dcpbench.dcp.schedulers.laminar_blocks import FILL_ALL, FILL_EVERY, FILL_NONE, FILL_SINGLE
from dcpbench.dcp.schedulers.laminar_exchange import exchange
from dcpbench.dcp.schedulers.laminar_instance import choose, solo
from dcpbench.dcp.schedulers.laminar_placement import place_all
from dcpbench.dcp.schedulers.laminar_search import Search
from dcpbench.dcp.schedulers.laminar_sizes import Menu, menu_sizes
from dcpbench.dcp.simulation import busiest, is_laminar, simulate
from dcpbench.dcp.workload import MINIMAL, BatchPlan, Domain, Job, PaddingRule, check_plan
from dcpbench.errors import ScheduleError
from dcpbench.spec import Spec

MENUS: tuple[Menu, ...] = ("any", "pow2", "even")
SMALL = 20_000


def lengths_of(rng: random.Random, made: Laminar, samples: int) -> list[int]:
    longest = made.longest_sample()
    kind = rng.randrange(4)
    if kind == 0:
        return [rng.randint(1, longest) for _ in range(samples)]
    if kind == 1:
        return [min(longest, max(1, int(rng.lognormvariate(5, 1.5)))) for _ in range(samples)]
    if kind == 2:
        return [rng.randint(1, longest)] * samples
    return [longest, *(rng.randint(1, min(9, longest)) for _ in range(samples - 1))]


def check(made: Laminar, lengths: list[int]) -> BatchPlan:
    plan = made.plan(lengths)
    check_plan(plan, lengths, made.padding, made.capacity, made.group_sizes())
    assert not plan.lockstep
    assert is_laminar(plan)
    node = made.cost.node_size
    for job in plan.jobs:
        if job.size <= node:
            assert job.first_rank // node == (job.first_rank + job.size - 1) // node
        else:
            assert job.first_rank % node == 0
    for own in plan.jobs_by_rank:
        sizes = [plan.jobs[index].size for index in own]
        assert sizes == sorted(sizes, reverse=True)
    done = simulate(plan, lengths, made.padding, made.cost)
    assert done.waited <= 1e-9 * done.makespan
    assert max(done.busy) == pytest.approx(done.makespan, rel=1e-9)
    assert plan.digest() == made.plan(list(lengths)).digest()
    return plan


def test_random_batches_on_any_number_of_ranks() -> None:
    rng = random.Random(11)
    for number in range(300):
        ranks = rng.randint(1, 64)
        menu = MENUS[number % 3]
        made = Laminar(Domain(ranks, 1), rng.choice([2, 3, 17, 64, 500, 1001]), menu=menu, budget=SMALL)
        check(made, lengths_of(rng, made, rng.randint(1, 2 * ranks + 20)))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 20), st.integers(2, 400), st.sampled_from(MENUS), st.integers(0, 60_000))
def test_drawn_batches(data: st.DataObject, ranks: int, capacity: int, menu: Menu, budget: int) -> None:
    made = Laminar(Domain(ranks, 1), capacity, menu=menu, budget=budget)
    lengths = data.draw(st.lists(st.integers(1, made.longest_sample()), min_size=1, max_size=40))
    check(made, lengths)


def batch_of(lengths: list[int], ranks: int, capacity: int, sizes: tuple[int, ...]) -> Batch:
    return Batch(np.array(lengths), ranks, sizes, capacity, MINIMAL, H200_1B)


def chosen(search: Search, menu: Menu, fraction: float, floor: int, target: float) -> list[int]:
    """The size of each place."""
    choose(search.instance, search.space, search.allowed[menu], floor, fraction, target)
    ends, sizes = [int(end) for end in search.space.ends], search.batch.sizes
    counts = [ends[j] - ends[j + 1] for j in range(len(sizes))]
    return [k for k, count in reversed(list(zip(sizes, counts, strict=True))) for _ in range(count)]


@pytest.mark.parametrize("fill", [FILL_NONE, FILL_SINGLE, FILL_ALL, FILL_EVERY])
@pytest.mark.parametrize(("fit", "pack"), [(0, 0), (1, 0), (0, 1), (0, 2)])
@pytest.mark.parametrize("cost", [H200_1B, replace(H200_1B, floor=0.012, floor_shared=0.02, overlap=0.4, node_size=4)])
def test_predicted_time_is_the_simulated_time(fit: int, pack: int, fill: int, cost: CostModel) -> None:
    rng = random.Random(3)
    for _ in range(20):
        ranks, capacity = rng.randint(1, 40), rng.choice([64, 500, 2048])
        made = Laminar(Domain(ranks, 1), capacity, menu="any", cost=cost)
        lengths = lengths_of(rng, made, rng.randint(1, 100))
        batch = Batch(np.array(lengths), ranks, made.group_sizes(), capacity, MINIMAL, cost)
        search = Search(batch, {"any": made.group_sizes()}, 0)
        sizes = chosen(search, "any", 1.0, 0, 1.1 * search.bound)
        assert sizes == sorted(sizes, reverse=True)
        time = place_all(search.instance, search.space, fit, fill, pack, 1.1 * search.bound)
        members: list[list[int]] = [[] for _ in range(int(search.space.counts[0]))]
        for place, job in enumerate(search.space.job_of):
            members[job].append(int(batch.samples[place]))
        jobs = tuple(
            Job(int(search.space.job_first[job]), batch.sizes[int(search.space.job_class[job])], tuple(own))
            for job, own in enumerate(members)
        )
        plan = BatchPlan(ranks, jobs, lockstep=False)
        check_plan(plan, lengths, MINIMAL, capacity, made.group_sizes())
        done = simulate(plan, lengths, MINIMAL, cost)
        assert time == pytest.approx(done.makespan, rel=1e-9)
        assert busiest(plan, lengths, MINIMAL, cost) == pytest.approx(done.makespan, rel=1e-9)
        assert [float(load) for load in search.space.load] == pytest.approx(list(done.busy), rel=1e-9)
        assert time >= lower_bound(lengths, ranks, capacity, made.group_sizes(), cost) * (1 - 1e-9)


def test_sizes_follow_the_rule() -> None:
    search = Search(batch_of([8000, 100, 3000, 500], 8, 2048, (1, 2, 4, 8)), {"pow2": (1, 2, 4, 8)}, 0)
    assert search.batch.samples.tolist() == [0, 2, 3, 1]
    assert chosen(search, "pow2", 1.0, 0, 1e9) == [4, 2, 1, 1]  # as small as memory allows
    assert chosen(search, "pow2", 1.0, 1, 1e9) == [4, 2, 2, 2]  # the floor
    limit = solo(search.instance, 0, 3)
    assert limit == pytest.approx(H200_1B.job_time([8000], 8))
    assert chosen(search, "pow2", 1.0, 0, limit)[0] == 8  # as large as the target demands
    fastest = min((2, 3), key=lambda j: solo(search.instance, 0, j))
    assert chosen(search, "pow2", 1.0, 0, limit / 1e6)[0] == search.batch.sizes[fastest]


def test_bound_of_the_search_is_a_bound() -> None:
    rng = random.Random(6)
    for _ in range(50):
        ranks, capacity = rng.randint(1, 40), rng.choice([64, 500, 2048])
        made = Laminar(Domain(ranks, 1), capacity, menu="any", budget=SMALL)
        lengths = lengths_of(rng, made, rng.randint(1, 60))
        done = simulate(made.plan(lengths), lengths, MINIMAL, H200_1B)
        assert batch_of(lengths, ranks, capacity, made.group_sizes()).fastest() <= done.makespan * (1 + 1e-9)


PLAIN = """
import random
from dcpbench.dcp.compilation import COMPILED
from dcpbench.dcp.schedulers.laminar import Laminar
from dcpbench.dcp.workload import Domain
rng = random.Random(21)
print(COMPILED)
for number in range(24):
    made = Laminar(Domain(rng.randint(1, 40), 1), rng.choice([17, 500, 2048]), menu=("any", "pow2", "even")[number % 3])
    longest = made.longest_sample()
    lengths = [min(longest, max(1, int(rng.lognormvariate(6, 1.5)))) for _ in range(rng.randint(1, 120))]
    print(made.plan(lengths).digest())
"""


def test_compiled_and_plain_loops_plan_the_same() -> None:
    pytest.importorskip("numba")
    found = {}
    for plain in ("0", "1"):
        environment = {**os.environ, "NUMBA_DISABLE_JIT": plain}
        done = subprocess.run(
            [sys.executable, "-c", PLAIN], capture_output=True, text=True, check=True, env=environment
        )
        compiled, *digests = done.stdout.split()
        found[compiled] = digests
    assert found["True"] == found["False"]
    assert len(set(found["True"])) == 24


def test_a_group_never_crosses_nodes_without_need() -> None:
    rng = random.Random(9)
    cost = replace(H200_1B, node_size=4)
    for _ in range(30):
        made = Laminar(Domain(rng.randint(1, 30), 1), 64, menu="any", cost=cost, budget=SMALL)
        check(made, lengths_of(rng, made, rng.randint(1, 60)))


def test_plans_within_the_promised_share_of_the_bound() -> None:
    # The targets of docs/scheduling.md; benchmarks/scheduling.py has all sizes.
    rng = random.Random(12)
    for ranks, capacity in ((2, 8192), (8, 2048), (32, 2048)):
        lengths = [min(8192, max(128, int(rng.lognormvariate(5.8, 1.5)))) for _ in range(16 * ranks)]
        made = Laminar(Domain(ranks, 1), capacity, menu="any")
        done = simulate(made.plan(lengths), lengths, MINIMAL, H200_1B)
        assert done.makespan <= 1.035 * lower_bound(lengths, ranks, capacity, made.group_sizes(), H200_1B)


def test_menus() -> None:
    assert menu_sizes("any", 6, 8) == (1, 2, 3, 4, 5, 6)
    assert menu_sizes("pow2", 6, 8) == (1, 2, 4, 6)
    assert menu_sizes("even", 7, 8) == (1, 2, 4, 6, 7)
    assert menu_sizes("any", 27, 8) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 27)
    assert menu_sizes("pow2", 27, 8) == (1, 2, 4, 8, 16, 27)
    assert menu_sizes("even", 24, 8) == (1, 2, 4, 6, 8, 16, 24)


def test_the_spec_chooses_the_menu() -> None:
    spec = Spec.model_validate({"cases": {"dcp": {"scheduler": "laminar"}}, "schedule": {"menu": "any"}})
    made = of_case(spec, "dcp")
    assert made.group_sizes() == (1, 2, 3, 4)
    default = Spec.model_validate({"cases": {"dcp": {"scheduler": "laminar"}}})
    assert of_case(default, "dcp").group_sizes() == (1, 2, 4)
    padded = create("laminar", domain=Domain(3, 1), capacity=64, padding_policy="megatron", menu="any")
    assert padded.padding == PaddingRule(fixed=12)  # 1, 2, 4 and 6


def test_groups_are_those_that_plans_use() -> None:
    for ranks in range(1, 9):
        aligned = Laminar(Domain(ranks, 1), 64)
        assert aligned.groups() == DefaultDynamicCp(Domain(ranks, 1), 64).groups()
        assert len(Laminar(Domain(ranks, 1), 64, menu="any").groups()) == ranks * (ranks + 1) // 2
        rng = random.Random(ranks)
        for menu in MENUS:
            made = Laminar(Domain(ranks, 1), 64, menu=menu, budget=SMALL)
            for _ in range(10):
                plan = made.plan(lengths_of(rng, made, 20))
                assert {(job.first_rank, job.size) for job in plan.jobs} <= set(made.groups())


def test_unaligned_groups_of_many_ranks_are_planned_but_not_executed() -> None:
    made = Laminar(Domain(9, 1), 64, menu="any")
    check(made, [500, 64, 3])
    with pytest.raises(ScheduleError, match=r"menu any on 9 ranks would need up to 45 communicators.* at most 8 ranks"):
        made.groups()


def test_smallest_group_and_fixed_padding_are_kept() -> None:
    rng = random.Random(5)
    for _ in range(20):
        made = Laminar(Domain(8, 1), 128, min_size=2, padding=PaddingRule(fixed=16), budget=SMALL)
        plan = check(made, lengths_of(rng, made, 40))
        assert min(job.size for job in plan.jobs) >= 2
    with pytest.raises(ScheduleError, match=r"min_dynamic_context_parallel_size 3 .* possible values are 1, 2, 4, 8"):
        Laminar(Domain(8, 1), 128, min_size=3)


def test_what_cannot_be_planned_is_refused() -> None:
    made = Laminar(Domain(5, 1), 100, menu="any")
    assert check(made, [500]).jobs[0].size == 5
    with pytest.raises(ScheduleError, match=r"sample 1 has 501 tokens, but the 5 ranks of a group hold at most 500"):
        made.plan([3, 501])
    with pytest.raises(ScheduleError, match="no sample"):
        made.plan([])


def test_a_larger_budget_never_makes_the_plan_longer() -> None:
    rng = random.Random(8)
    lengths = [rng.randint(128, 16384) for _ in range(64)]
    times = []
    for budget in (0, 30_000, 300_000):
        made = Laminar(Domain(16, 1), 8192, menu="any", budget=budget)
        times.append(simulate(made.plan(lengths), lengths, MINIMAL, H200_1B).makespan)
    assert times[0] >= times[2]
    assert times[2] <= 1.1 * lower_bound(lengths, 16, 8192, made.group_sizes(), H200_1B)


@pytest.mark.parametrize("menu", MENUS)
@pytest.mark.parametrize(("ranks", "samples", "length", "capacity"), [(7, 52, 53318, 13799), (29, 40, 111361, 10426)])
def test_no_ranks_left_idle_beside_a_group_of_more_than_half(
    menu: Menu, ranks: int, samples: int, length: int, capacity: int
) -> None:
    made, greedy = Laminar(Domain(ranks, 1), capacity, menu=menu), DefaultDynamicCp(Domain(ranks, 1), capacity)
    lengths = [length] * samples
    ours = simulate(made.plan(lengths), lengths, MINIMAL, H200_1B).makespan
    assert ours <= 1.01 * simulate(greedy.plan(lengths), lengths, MINIMAL, H200_1B).makespan


def test_few_microbatches_where_the_host_is_the_limit() -> None:
    # 40 samples fit six microbatches, two on each rank; one more would cost half as much again.
    rng = random.Random(2)
    cost = replace(H200_1B, floor=0.05, floor_shared=0.05)
    lengths = [rng.randint(20, 60) for _ in range(40)]
    capacity = -(-sum(lengths) // 6) + 4
    plan = Laminar(Domain(3, 1), capacity, cost=cost).plan(lengths)
    assert len(plan.jobs) == 6
    assert simulate(plan, lengths, MINIMAL, cost).makespan == pytest.approx(0.1)


def test_exchanged_samples_leave_a_plan_that_takes_what_was_predicted() -> None:
    rng = random.Random(14)
    better = 0
    for number in range(60):
        ranks, capacity = rng.randint(2, 40), rng.choice([64, 500, 2048])
        made = Laminar(Domain(ranks, 1), capacity, menu=MENUS[number % 3])
        lengths = lengths_of(rng, made, rng.randint(ranks, 4 * ranks))
        sizes = made.group_sizes()
        search = Search(Batch(np.array(lengths), ranks, sizes, capacity, MINIMAL, H200_1B), {"any": sizes}, 0)
        search.run()
        before = search.time
        time = exchange(search.instance, search.space, search.best, search.bound, 10**7)
        assert time <= before * (1 + 1e-12)
        better += time < before * (1 - 1e-6)
        search.time = time
        plan = made._plan_of(search, np.array(lengths))  # checks every rule, and the predicted time
        assert time == pytest.approx(simulate(plan, lengths, MINIMAL, H200_1B).makespan, rel=1e-9)
    assert better > 10


def test_an_exchange_that_empties_a_job_takes_it_out() -> None:
    batch = batch_of([1000, 900, 100], 2, 2048, (1, 2))
    search = Search(batch, {"any": (1, 2)}, 0)
    best = search.best
    best.jobs[0] = 3
    for place, rank in enumerate([0, 1, 1]):  # one microbatch on rank 0, two on rank 1
        best.job_of[place], best.job_first[place], best.job_class[place] = place, rank, 0
    time = exchange(batch.instance, search.space, best, 0.0, 10**6)
    assert int(best.jobs[0]) == 2
    assert [int(job) for job in best.job_of] == [0, 1, 1]
    assert time == pytest.approx(H200_1B.job_time([1000], 1))  # the other rank takes less now


def test_shorter_than_the_dynamic_rule_on_a_long_tail() -> None:
    rng = random.Random(4)
    lengths = [min(16384, max(64, int(rng.lognormvariate(7, 1.4)))) for _ in range(64)]
    greedy = DefaultDynamicCp(Domain(8, 1), 2048)
    made = Laminar(Domain(8, 1), 2048)
    ours = simulate(made.plan(lengths), lengths, MINIMAL, H200_1B).makespan
    theirs = simulate(greedy.plan(lengths), lengths, MINIMAL, H200_1B).makespan
    assert ours < theirs
