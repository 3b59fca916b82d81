"""Fixed-CP packing: the reference vectors, its options, and what every plan guarantees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.dcp.schedulers.dp_balanced import DpBalanced
from dcpbench.dcp.workload import MINIMAL, Domain, Job, PaddingRule
from dcpbench.errors import ScheduleError

ASIS = PaddingRule(fixed=1)


def test_vector_moves_one_sample_to_a_pack_of_its_own() -> None:
    plan = DpBalanced(Domain(4, 2), 4096, ASIS).plan([3000, 4000, 2000, 5000, 1000, 800])
    assert plan.rank_lists() == [[[0, 1], [0, 1], [2, 3], [2, 3]], [[5], [5], [4], [4]]]
    assert plan.jobs == (Job(0, 2, (0, 1)), Job(2, 2, (2, 3)), Job(0, 2, (5,)), Job(2, 2, (4,)))


def test_vector_virtual_pipeline() -> None:
    plan = DpBalanced(Domain(2, 2), 4096, ASIS, microbatch_multiple=2).plan([1000] * 4)
    assert plan.rank_lists() == [[[0, 1, 2]] * 2, [[3]] * 2]


def test_vector_order_of_moving() -> None:
    plan = DpBalanced(Domain(2, 1), 2048, ASIS).plan([1000] * 5)
    assert plan.rank_lists() == [[[0, 1], [2]], [[4], [3]]]


def test_moving_goes_on_in_the_pack_before() -> None:
    plan = DpBalanced(Domain(5, 1), 300, ASIS).plan([100, 100, 100, 250, 250])
    assert [job.samples for job in plan.jobs] == [(0,), (3,), (4,), (2,), (1,)]


def test_no_look_back() -> None:
    plan = DpBalanced(Domain(1, 1), 100, ASIS).plan([60, 50, 40, 10])
    assert [job.samples for job in plan.jobs] == [(0,), (1, 2, 3)]


def test_max_num_seqs_closes_a_pack() -> None:
    plan = DpBalanced(Domain(1, 1), 1000, ASIS, max_num_seqs=2).plan([10] * 5)
    assert [job.samples for job in plan.jobs] == [(0, 1), (2, 3), (4,)]


def test_order_of_packing_is_the_stream_s_whatever_dp_is() -> None:
    lengths = [700, 300, 900, 200, 500, 100, 800, 400]
    packs = [
        sorted(job.samples for job in DpBalanced(Domain(ranks, 1), 1000, ASIS).plan(lengths).jobs) for ranks in (1, 2)
    ]
    assert packs[0] == [(0, 1), (2,), (3, 4, 5), (6,), (7,)]
    assert packs[1] == [(0, 1), (2,), (3, 4), (5,), (6,), (7,)]


def test_not_enough_samples_says_how_many_are_needed() -> None:
    with pytest.raises(ScheduleError, match=r"3 samples into 1 packs.*multiple of 4 \(DP 2 x .*2\).*at least 4"):
        DpBalanced(Domain(4, 2), 4096, microbatch_multiple=2).plan([10, 20, 30])
    assert len(DpBalanced(Domain(4, 2), 4096, microbatch_multiple=2).plan([10, 20, 30, 40]).jobs) == 4


def test_oversize_sample_is_refused_even_where_the_whole_domain_could_hold_it() -> None:
    with pytest.raises(ScheduleError, match="sample 1 has 9000 tokens, but the 2 ranks of a group hold at most 8192"):
        DpBalanced(Domain(8, 2), 4096, ASIS).plan([1000, 9000, 1000])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "max_seqlen_per_dp_cp_rank 0 is too small"),
        ({"capacity": 1}, "pad every sample to a multiple of 8, so it must be at least 2"),
        ({"capacity": 64, "microbatch_multiple": 0}, "microbatch_multiple is 0"),
        ({"capacity": 64, "max_num_seqs": 0}, "max_num_seqs is 0"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        DpBalanced(Domain(8, 4), **options)  # type: ignore[arg-type]


def test_groups_are_the_cp_groups() -> None:
    made = DpBalanced(Domain(6, 3), 64)
    assert made.groups() == [(0, 3), (3, 3)]
    assert made.group_sizes() == (3,)
    assert made.longest_sample() == 192


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=60),
    cp=st.sampled_from([1, 2, 3, 4]),
    dp=st.sampled_from([1, 2, 3, 4, 6]),
    multiple=st.sampled_from([1, 1, 2, 3]),
    most=st.sampled_from([None, None, 1, 2, 5]),
    rule=st.sampled_from([ASIS, MINIMAL, PaddingRule(factor=2), PaddingRule(fixed=24)]),
)
def test_every_plan_keeps_the_guarantees(
    lengths: list[int], cp: int, dp: int, multiple: int, most: int | None, rule: PaddingRule
) -> None:
    made = DpBalanced(Domain(cp * dp, cp), 96, rule, multiple, most)
    try:
        plan = made.plan(lengths)
    except ScheduleError as error:
        if "not enough samples" not in str(error):
            raise
        assert len(lengths) < -(-len(lengths) // (dp * multiple)) * dp * multiple
        return
    assert sorted(s for job in plan.jobs for s in job.samples) == list(range(len(lengths)))
    assert {(job.first_rank, job.size) for job in plan.jobs} == set(made.groups())
    assert [job.first_rank for job in plan.jobs] == [d * cp for d in range(dp)] * plan.microbatches
    assert plan.microbatches % multiple == 0
    for job in plan.jobs:
        assert sum(rule.pad(lengths[s], cp) for s in job.samples) <= 96 * cp
        assert most is None or len(job.samples) <= most
    assert plan == DpBalanced(Domain(cp * dp, cp), 96, rule, multiple, most).plan(tuple(lengths))
