"""Predicted figures of a plan: sums that a reader can check by hand, and properties of any plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.dcp.costs import H200_1B
from dcpbench.dcp.prediction import predict
from dcpbench.dcp.schedulers import SCHEDULERS, create
from dcpbench.dcp.simulation import simulate
from dcpbench.dcp.workload import MINIMAL, BatchPlan, Domain, Job, PaddingRule


def test_figures_of_a_plan_small_enough_to_check_by_hand() -> None:
    # Rank 0 and 1 share 1001 tokens (padded to 1004), then rank 0 has 100 more; rank 2 has 600.
    plan = BatchPlan(3, (Job(0, 2, (0,)), Job(0, 1, (1,)), Job(2, 1, (2,))), lockstep=False)
    lengths = [1001, 100, 600]
    found, execution = predict(plan, lengths, MINIMAL, H200_1B)
    shared, short, middle = (H200_1B.job_time([length], size) for length, size in ((1001, 2), (100, 1), (600, 1)))
    assert found.makespan == pytest.approx(max(shared + short, middle))
    assert found.busy_by_size == pytest.approx({1: short + middle, 2: 2 * shared})
    assert found.jobs_by_size == {1: 2, 2: 1}
    assert found.idle_share == pytest.approx(1 - (2 * shared + short + middle) / (3 * found.makespan))
    assert (found.tokens, found.padding_tokens) == (1004 + 100 + 600, 3)
    assert found.padding_share == pytest.approx(3 / 1704)
    assert found.microbatches == 2
    assert found.peak_tokens == 600
    assert execution.makespan == found.makespan


def test_a_fixed_padding_rule_counts_as_padding() -> None:
    plan = BatchPlan(2, (Job(0, 1, (0,)), Job(1, 1, (1,))))
    found, _ = predict(plan, [10, 32], PaddingRule(fixed=16), H200_1B)
    assert (found.tokens, found.padding_tokens, found.peak_tokens) == (48, 6, 32)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULERS)),
    ranks=st.sampled_from([1, 2, 4, 8, 16]),
    lengths=st.lists(st.integers(1, 4000), min_size=16, max_size=60),
    policy=st.sampled_from(["minimal", "megatron"]),
)
def test_any_plan_spends_its_rank_time_busy_or_idle(name: str, ranks: int, lengths: list[int], policy: str) -> None:
    scheduler = create(name, domain=Domain(ranks, 1), capacity=4096, padding_policy=policy)  # type: ignore[arg-type]
    plan = scheduler.plan(lengths)
    found, _ = predict(plan, lengths, scheduler.padding, H200_1B)
    assert found.makespan == pytest.approx(simulate(plan, lengths, scheduler.padding, H200_1B).makespan)
    assert found.rank_seconds == pytest.approx(ranks * found.makespan)
    assert 0 < found.busy_seconds <= found.rank_seconds * (1 + 1e-9)
    assert sum(found.jobs_by_size.values()) == len(plan.jobs)
    assert found.tokens - found.padding_tokens == sum(lengths)
    assert 0 < found.peak_tokens <= 4096
