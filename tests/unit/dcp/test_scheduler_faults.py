"""Known faults of packers and schedulers; each test is named after the fault it rules out."""

from __future__ import annotations

import random

import pytest

from dcpbench.dcp.schedulers import SCHEDULERS, create
from dcpbench.dcp.schedulers.default_dynamic_cp import DefaultDynamicCp
from dcpbench.dcp.schedulers.dp_balanced import DpBalanced
from dcpbench.dcp.workload import MINIMAL, BatchPlan, Domain, PaddingRule, Scheduler, check_lengths, usable_length
from dcpbench.errors import ScheduleError


def both(ranks: int, cp: int, capacity: int) -> list[Scheduler]:
    return [create(name, domain=Domain(ranks, cp), capacity=capacity) for name in SCHEDULERS]


def samples(plan: BatchPlan) -> list[int]:
    return [sample for job in plan.jobs for sample in job.samples]


def test_a01_sample_no_group_can_hold() -> None:
    for made in both(8, 8, 4096):
        with pytest.raises(ScheduleError, match=r"sample 1 has 40000 tokens.*32768"):
            made.plan([100, 40000])
        assert samples(made.plan([100, 32768])) in ([0, 1], [1, 0])


def test_a02_fits_before_padding_not_after() -> None:
    made = DpBalanced(Domain(6, 6), 2048, PaddingRule(fixed=96))
    packs = [job.samples for job in made.plan([1024] * 12).jobs]
    assert [len(pack) for pack in packs] == [11, 1]
    dynamic = DefaultDynamicCp(Domain(6, 6), 2048, 6, PaddingRule(fixed=96)).plan([1024] * 12)
    assert [len(job.samples) for job in dynamic.jobs] == [11, 1]


def test_a03_packer_and_worker_round_differently() -> None:
    for rule in (PaddingRule(fixed=4), PaddingRule(fixed=2, factor=2)):
        assert [job.samples for job in DpBalanced(Domain(1, 1), 502, rule).plan([251, 251]).jobs] == [(0,), (1,)]
    for length in range(1, 601):  # what the scheduler counts is what the one padding function gives the worker
        for made in both(4, 4, 150):
            for job in made.plan([length, 1, 1, 1]).jobs:
                held = sum(made.padding.pad([length, 1, 1, 1][sample], job.size) for sample in job.samples)
                assert held <= 150 * job.size
                assert held % (2 * job.size if job.size > 1 else 1) == 0


def test_a04_limit_not_a_multiple_of_the_alignment() -> None:
    assert usable_length(1001, 4, MINIMAL) == 1000
    assert check_lengths([1000], 1001, 4, MINIMAL) == [1000]
    with pytest.raises(ScheduleError, match=r"sample 0 has 1001 tokens.*usable length is 1000 .*multiple of 8"):
        check_lengths([1001], 1001, 4, MINIMAL)
    for ranks, capacity in [(2, 501), (4, 333), (6, 7)]:
        for made in both(ranks, ranks, capacity):  # what is promised to fit, fits; one token more is refused
            made.plan([made.longest_sample()])
            with pytest.raises(ScheduleError, match=f"usable length is {made.longest_sample()}"):
                made.plan([made.longest_sample() + 1])


def test_a05_group_of_four_with_two_members() -> None:
    made = DefaultDynamicCp(Domain(6, 6), 1024)
    for first, size in made.groups():
        assert len(range(first, min(first + size, 6))) == size
    assert (4, 4) not in made.groups()
    for job in made.plan([4000, 1000, 900, 800, 10, 2000]).jobs:
        assert len(job.ranks) == job.size
        assert job.ranks.stop <= 6
    with pytest.raises(ScheduleError, match="6 ranks cannot be divided into groups of 4"):
        DefaultDynamicCp(Domain(6, 6), 1024, min_size=4)


def test_a06_ranks_left_empty_when_no_group_can_grow() -> None:
    plan = DefaultDynamicCp(Domain(6, 6), 1024).plan([2000, 500])
    assert plan.rank_lists() == [[[0]] * 4 + [[1]] * 2]
    rng = random.Random(6)
    for ranks in range(1, 41):
        for _ in range(10):
            made = DefaultDynamicCp(Domain(ranks, 1), 1024)
            lengths = [rng.randint(1, made.longest_sample()) for _ in range(rng.randint(1, 2 * ranks))]
            for microbatch in made.plan(lengths).rank_lists():
                assert all(microbatch)


def test_a07_one_list_shared_by_all_ranks() -> None:
    for made in both(8, 8, 1024):
        plan = made.plan([8000, 100, 200, 300])
        if not plan.lockstep:
            continue  # its samples are tuples of jobs, which nobody can share and change
        lists = plan.rank_lists()
        before = plan.rank_lists()
        lists[0][3].append(99)
        assert [own for rank, own in enumerate(lists[0]) if rank != 3] == [
            own for rank, own in enumerate(before[0]) if rank != 3
        ]
        assert plan.rank_lists() == before
    full_first = DefaultDynamicCp(Domain(4, 1), 100, padding=PaddingRule(fixed=1)).plan([200, 100, 60, 40])
    assert full_first.rank_lists() == [[[0], [0], [1], [2, 3]]]


def test_a08_fewer_samples_than_ranks_switches_cp_off() -> None:
    plan = DefaultDynamicCp(Domain(4, 1), 2048).plan([7000])
    assert plan.rank_lists() == [[[0]] * 4]
    assert MINIMAL.pad(7000, plan.jobs[0].size) / plan.jobs[0].size == 1750


def test_a09_ceil_splitting_starves_the_last_ranks() -> None:
    for made in both(6, 1, 1000):
        for length in (10, 100):
            plan = made.plan([length] * 10)
            assert sorted(set(samples(plan))) == list(range(10))
            counts = [len(own) for own in plan.jobs_by_rank]
            assert min(counts) == max(counts) >= 1
            assert all(all(microbatch) for microbatch in plan.rank_lists())


def test_a10_cap_used_as_an_average() -> None:
    for made in both(1, 1, 16):
        assert [len(job.samples) for job in made.plan([11] * 6).jobs] == [1] * 6


def test_a11_sample_count_not_divisible() -> None:
    for made in both(4, 1, 1000):
        for count in (29, 30, 31):
            plan = made.plan([100] * count)
            assert sorted(samples(plan)) == list(range(count))
            assert len({len(own) for own in plan.jobs_by_rank}) == 1


def test_a12_one_document_in_the_pack() -> None:
    for made in both(1, 1, 1024):
        assert made.plan([777]).rank_lists() == [[[0]]]
    for made in both(4, 4, 1024):
        assert made.plan([777]).rank_lists() == [[[0]] * 4]


def test_a13_sample_that_overflowed_is_lost() -> None:
    packs = [job.samples for job in DpBalanced(Domain(1, 1), 100).plan([60, 50, 30, 40]).jobs]
    assert packs == [(0,), (1, 2), (3,)]  # sample 1, which closed the first pack, opens the second
    dynamic = DefaultDynamicCp(Domain(1, 1), 100).plan([60, 50, 30, 40])
    assert sorted(samples(dynamic)) == [0, 1, 2, 3]


def test_a14_ranks_disagree_about_the_tail() -> None:
    lengths = [100] * 13
    planned = []
    for made in both(3, 1, 200):  # two samples of a microbatch on each of three ranks
        plan = made.plan(lengths)
        assert not plan.lockstep or len({len(own) for own in plan.jobs_by_rank}) == 1
        assert plan.digest() == made.plan(list(lengths)).digest()
        planned.append(sorted(set(samples(plan))))
    assert planned == [list(range(13))] * len(SCHEDULERS)


@pytest.mark.parametrize(("menu", "unit"), [("any", 1680), ("even", 48)])
def test_sizes_that_would_pad_every_sample_out_of_proportion_are_refused(menu: str, unit: int) -> None:
    domain = Domain(8, 4)
    with pytest.raises(ScheduleError, match=f"a multiple of {unit} tokens; set cases.padding to minimal"):
        create("laminar", domain=domain, capacity=2048, padding_policy="megatron", menu=menu)  # type: ignore[arg-type]
    create("laminar", domain=domain, capacity=2048, padding_policy="minimal", menu=menu)  # type: ignore[arg-type]
    create("laminar", domain=Domain(3, 1), capacity=2048, padding_policy="megatron", menu=menu)  # type: ignore[arg-type]
