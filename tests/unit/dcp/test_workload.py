"""The contract of schedulers: padding, plans, and the check that every plan must pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.dcp.schedulers import SCHEDULERS, create
from dcpbench.dcp.workload import (
    MINIMAL,
    BatchPlan,
    Domain,
    Job,
    PaddingRule,
    check_capacity,
    check_lengths,
    check_plan,
    usable_length,
)
from dcpbench.errors import ScheduleError, SpecError

RULES = st.builds(PaddingRule, st.one_of(st.none(), st.integers(1, 200)), st.sampled_from([1, 2, 4, 16]))


@given(rule=RULES, length=st.integers(1, 10_000), size=st.integers(1, 64))
def test_padding_is_the_next_multiple(rule: PaddingRule, length: int, size: int) -> None:
    padded = rule.pad(length, size)
    assert padded % rule.multiple(size) == 0
    assert length <= padded < length + rule.multiple(size)


def test_minimal_padding_by_group_size() -> None:
    assert [MINIMAL.multiple(size) for size in (1, 2, 3, 4, 6, 8)] == [1, 4, 6, 8, 12, 16]
    assert PaddingRule(factor=2).multiple(1) == 2
    assert PaddingRule(fixed=12, factor=2).multiple(5) == 24


@given(rule=RULES, limit=st.integers(1, 5000), size=st.integers(1, 64))
def test_usable_length_is_the_greatest_that_fits(rule: PaddingRule, limit: int, size: int) -> None:
    usable = usable_length(limit, size, rule)
    assert usable == max((n for n in range(limit + 1) if rule.pad(n, size) <= limit), default=0)


def test_domain_numbers_ranks_dp_major() -> None:
    assert Domain(8, 2).dp == 4
    with pytest.raises(ScheduleError, match="6 ranks cannot be divided into CP groups of 4"):
        Domain(6, 4)


def test_plan_by_rank() -> None:
    plan = BatchPlan(4, (Job(0, 2, (0,)), Job(2, 1, (1, 3)), Job(3, 1, (2,)), Job(0, 4, (4,))))
    assert plan.jobs_by_rank == ((0, 3), (0, 3), (1, 3), (2, 3))
    assert plan.microbatches == 2
    assert plan.rank_lists() == [[[0], [0], [1, 3], [2]], [[4]] * 4]
    assert plan.cp_sizes() == {1: 2, 2: 1, 4: 1}
    assert BatchPlan(2, ()).microbatches == 0


def test_digest_tells_plans_apart_and_only_plans() -> None:
    plan = BatchPlan(4, (Job(0, 4, (0, 1)),))
    assert plan.digest() == BatchPlan(4, (Job(0, 4, (0, 1)),)).digest()
    assert len(plan.digest()) == 16
    others = [
        BatchPlan(4, (Job(0, 4, (1, 0)),)),
        BatchPlan(4, (Job(0, 4, (0,)), Job(0, 4, (1,)))),
        BatchPlan(8, (Job(0, 4, (0, 1)),)),
        BatchPlan(4, (Job(0, 2, (0, 1)),)),
        BatchPlan(4, (Job(2, 2, (0, 1)),)),
        BatchPlan(4, (Job(0, 4, (0, 11)),)),
    ]
    assert len({plan.digest(), *(other.digest() for other in others)}) == 7


# --- check_plan -------------------------------------------------------------------------------------------------------

GOOD = (Job(0, 2, (0, 1)), Job(2, 1, (2,)), Job(3, 1, (3,)))


def check(
    jobs: tuple[Job, ...],
    lockstep: bool = True,
    sizes: tuple[int, ...] | None = (1, 2, 4),
    groups: set[tuple[int, int]] | None = None,
) -> None:
    check_plan(BatchPlan(4, jobs, lockstep), [5, 3, 4, 2], MINIMAL, 8, sizes, groups)


def test_a_good_plan_passes() -> None:
    check(GOOD)
    check(GOOD, groups={(0, 2), (2, 1), (3, 1)})


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ((Job(3, 2, (0, 1)), *GOOD[1:]), "job 0 .*outside the domain of 4"),
        ((Job(-1, 2, (0, 1)), *GOOD[1:]), "job 0 .*outside the domain"),
        ((Job(0, 0, (0, 1)), *GOOD[1:]), "job 0 .*outside the domain"),
        ((Job(0, 3, (0, 1)), Job(3, 1, (2, 3))), "job 0 uses a group of 3 ranks; allowed sizes are"),
        ((GOOD[0], Job(2, 1, ()), Job(3, 1, (2, 3))), "job 1 has no sample"),
        ((GOOD[0], Job(2, 1, (4,)), Job(3, 1, (3,))), "job 1 names sample 4 of a batch of 4"),
        ((GOOD[0], Job(2, 1, (-1,)), Job(3, 1, (3,))), "job 1 names sample -1"),
        ((GOOD[0], Job(2, 1, (2, 2)), Job(3, 1, (3,))), "sample 2 is planned 2 times"),
        ((GOOD[0], Job(2, 1, (2,)), Job(3, 1, (2,))), "sample 2 is planned 2 times"),
        ((GOOD[0], Job(2, 1, (2,))), "sample 3 is planned 0 times"),
        ((Job(0, 1, (0, 1, 2)), Job(1, 1, (3,))), "job 0 holds 12 tokens per rank after padding; the capacity is 8"),
        ((Job(0, 2, (0, 1, 2)), Job(2, 2, (3,))), None),
        ((Job(0, 2, (0, 1, 2, 3)),), "job 0 holds 10 tokens per rank"),
        ((Job(0, 1, (0,)), Job(0, 2, (1,)), Job(2, 2, (2, 3))), "job 1 is microbatch 1 on rank 0 but 0 on rank 1"),
        ((GOOD[0], Job(2, 1, (2, 3))), r"different numbers of microbatches: \[0, 1\]"),
    ],
)
def test_each_broken_rule_is_named(jobs: tuple[Job, ...], message: str | None) -> None:
    if message is None:
        check(jobs)
        return
    with pytest.raises(ScheduleError, match=message):
        check(jobs)


def test_ranks_may_have_different_job_counts_without_lockstep() -> None:
    check((Job(0, 1, (0,)), Job(0, 2, (1,)), Job(2, 1, (2, 3))), lockstep=False)


def test_job_on_ranks_without_a_communicator() -> None:
    jobs = (Job(0, 1, (0,)), Job(1, 2, (1, 2)), Job(3, 1, (3,)))
    check(jobs)
    with pytest.raises(ScheduleError, match="job 1 uses 2 ranks from rank 1, for which no group is created"):
        check(jobs, groups={(0, 1), (0, 2), (2, 2), (3, 1)})


# --- check_lengths, check_capacity ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "no sample"),
        ([5, 0], "sample 1 has 0 tokens"),
        ([5, 5, -3], "sample 2 has -3 tokens"),
        ([5.0], "sample 0 has the length 5.0"),
        ([17], "sample 0 has 17 tokens, but the 2 ranks of a group hold at most 16 .*shorten or drop"),
    ],
)
def test_lengths_that_cannot_be_scheduled(lengths: list[int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_lengths(lengths, 16, 2, MINIMAL)


def test_numpy_lengths_become_plain_integers() -> None:
    checked = check_lengths(np.array([3, 16], dtype=np.int32), 16, 2, MINIMAL)  # type: ignore[arg-type]
    assert checked == [3, 16]
    assert {type(length) for length in checked} == {int}


def test_capacity_must_hold_one_padding_unit() -> None:
    check_capacity(2, 8, MINIMAL)
    check_capacity(1, 1, MINIMAL)
    with pytest.raises(ScheduleError, match=r"max_seqlen_per_dp_cp_rank 3 .* multiple of 32, so it must be at least 4"):
        check_capacity(3, 8, PaddingRule(factor=2))
    with pytest.raises(ScheduleError, match="at least 1"):
        check_capacity(0, 1, MINIMAL)


# --- the table of schedulers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("policy", ["minimal", "megatron"])
@pytest.mark.parametrize(("ranks", "cp"), [(1, 1), (2, 2), (4, 2), (6, 3), (8, 8)])
def test_every_scheduler_serves_through_the_table(name: str, policy: str, ranks: int, cp: int) -> None:
    made = create(name, domain=Domain(ranks, cp), capacity=64, padding_policy=policy)  # type: ignore[arg-type]
    assert made.name == name
    longest = made.longest_sample()
    lengths = [longest, *range(1, 41), longest]
    plan = made.plan(lengths)
    assert plan.ranks == ranks
    assert {job.size for job in plan.jobs} <= set(made.group_sizes())
    assert {(job.first_rank, job.size) for job in plan.jobs} <= set(made.groups())
    assert list(made.group_sizes()) == sorted({size for _, size in made.groups()})
    assert len(set(made.groups())) == len(made.groups())
    with pytest.raises(ScheduleError, match=f"sample 2 has {longest + 1} tokens"):
        made.plan([1, 2, longest + 1])


@pytest.mark.parametrize(
    ("name", "nearest"), [("dp_balance", "dp_balanced"), ("dynamic_cp", "default_dynamic_cp"), ("", "")]
)
def test_unknown_scheduler_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(SpecError, match=f"no scheduler '{name}'; did you mean '{nearest}"):
        create(name, domain=Domain(2, 2), capacity=64)


def test_padding_policies() -> None:
    domain = Domain(8, 4)
    fixed = {name: create(name, domain=domain, capacity=64, padding_policy="megatron").padding for name in SCHEDULERS}
    assert fixed["dp_balanced"] == PaddingRule(fixed=8)
    assert fixed["default_dynamic_cp"] == PaddingRule(fixed=16)
    assert create("dp_balanced", domain=Domain(4, 1), capacity=64, padding_policy="megatron").padding.multiple(1) == 1
    assert all(create(name, domain=domain, capacity=64).padding == MINIMAL for name in SCHEDULERS)
