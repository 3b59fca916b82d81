"""What `laminar` takes from the dynamic-CP rule: the same jobs, and plans that are never worse."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dcpbench.dcp.compilation import vector
from dcpbench.dcp.costs import H200_1B
from dcpbench.dcp.schedulers.default_dynamic_cp import DefaultDynamicCp
from dcpbench.dcp.schedulers.laminar import Laminar
from dcpbench.dcp.schedulers.laminar_batch import Batch
from dcpbench.dcp.schedulers.laminar_dynamic import loads_of_jobs, make_jobs, rule_of
from dcpbench.dcp.schedulers.laminar_search import Search
from dcpbench.dcp.schedulers.laminar_sizes import MENUS
from dcpbench.dcp.simulation import simulate
from dcpbench.dcp.workload import MINIMAL, Domain, PaddingRule
from dcpbench.errors import ScheduleError


def lengths_of(rng: random.Random, longest: int, samples: int) -> list[int]:
    kind = rng.randrange(3)
    if kind == 0:
        return [rng.randint(1, longest) for _ in range(samples)]
    if kind == 1:
        return [min(longest, max(1, int(rng.lognormvariate(5, 1.5)))) for _ in range(samples)]
    return [longest, *(rng.randint(1, min(9, longest)) for _ in range(samples - 1))]


def test_the_same_jobs_as_the_dynamic_rule() -> None:
    rng = random.Random(31)
    compared = 0
    for _ in range(200):
        ranks = rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64])
        padding = rng.choice([MINIMAL, MINIMAL, PaddingRule(fixed=2 * ranks), PaddingRule(factor=2)])
        capacity = rng.choice([16, 64, 501, 2048])
        smallest = rng.choice([k for k in (1, 2, 4) if ranks % k == 0])
        try:
            greedy = DefaultDynamicCp(Domain(ranks, 1), capacity, smallest, padding)
        except ScheduleError:  # the capacity is less than one unit of padding
            continue
        lengths = lengths_of(rng, greedy.longest_sample(), rng.randint(1, 3 * ranks + 20))
        plan = greedy.plan(lengths)

        sizes = greedy.group_sizes()
        batch = Batch(np.array(lengths), ranks, sizes, capacity, padding, H200_1B)
        search = Search(batch, {"pow2": sizes}, 0)
        found = batch.padded_order(sizes, capacity)
        assert found is not None
        classes = vector(np.arange(len(sizes)))
        order, needs = map(vector, found)
        make_jobs(batch.instance, search.space, rule_of(order, needs, classes, ranks), capacity)
        jobs = int(search.space.counts[0])
        members: list[list[int]] = [[] for _ in range(jobs)]
        for place, job in enumerate(search.space.job_of):
            members[int(job)].append(int(batch.samples[place]))
        ours = Counter(
            (int(search.space.job_first[job]), sizes[int(search.space.job_class[job])], tuple(sorted(members[job])))
            for job in range(jobs)
        )
        assert ours == Counter((job.first_rank, job.size, tuple(sorted(job.samples))) for job in plan.jobs)
        # Larger groups first, nobody waits, so it takes no longer than in the rule's own order.
        own = simulate(plan, lengths, padding, H200_1B).makespan
        assert loads_of_jobs(batch.instance, search.space) <= own * (1 + 1e-9)
        compared += 1
    assert compared > 150


@pytest.mark.parametrize("menu", MENUS)
def test_never_slower_than_the_dynamic_rule_at_its_best_capacity(menu: str) -> None:
    rng = random.Random(17)
    compared = 0
    for _ in range(60):
        ranks = rng.randint(1, 40)
        capacity = rng.choice([3, 6, 17, 40, 300, 2048])
        floor = rng.choice([0.0, 0.01])
        cost = replace(H200_1B, floor=floor, floor_shared=2 * floor, node_size=rng.choice([1, 4, 8]))
        made = Laminar(Domain(ranks, 1), capacity, menu=menu, cost=cost)  # type: ignore[arg-type]
        lengths = lengths_of(rng, made.longest_sample(), rng.randint(1, 3 * ranks + 20))
        ours = simulate(made.plan(lengths), lengths, MINIMAL, cost).makespan
        for divisor in (1, 2, 4, 8):
            try:
                other = DefaultDynamicCp(Domain(ranks, 1), capacity // divisor).plan(lengths)
            except ScheduleError:  # a sample no longer fits
                break
            assert ours <= simulate(other, lengths, MINIMAL, cost).makespan * (1 + 1e-6)
            compared += 1
    assert compared > 60


def test_the_plan_of_the_rule_is_used_with_nodes_of_any_size() -> None:
    # Groups of 4 of the rule's own would cross nodes of 6; placed anew they do not, and the plan is checked.
    rng = random.Random(3)
    cost = replace(H200_1B, node_size=6, floor=0.02, floor_shared=0.02)
    for _ in range(40):
        made = Laminar(Domain(rng.choice([6, 12]), 1), rng.choice([8, 40]), menu="any", cost=cost, budget=0)
        made.plan(lengths_of(rng, made.longest_sample(), rng.randint(1, 60)))
