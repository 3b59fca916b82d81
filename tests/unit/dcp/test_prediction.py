"""Predicted figures of a plan: sums that a reader can check by hand, and properties of any plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.dcp.costs import H200_1B
from dcpbench.dcp.prediction import Machine, Prediction, Timeline, predict
from dcpbench.dcp.schedulers import SCHEDULERS, create
from dcpbench.dcp.simulation import simulate
from dcpbench.dcp.workload import MINIMAL, BatchPlan, Domain, Job, PaddingRule


def run(plan: BatchPlan, lengths: list[int], padding: PaddingRule) -> tuple[Prediction, Timeline]:
    times = Machine(plan.ranks, H200_1B).execute(plan, lengths, padding)
    return predict(plan, lengths, padding, times), times


def test_figures_of_a_plan_small_enough_to_check_by_hand() -> None:
    # Rank 0 and 1 share 1001 tokens (padded to 1004), then rank 0 has 100 more; rank 2 has 600.
    plan = BatchPlan(3, (Job(0, 2, (0,)), Job(0, 1, (1,)), Job(2, 1, (2,))), lockstep=False)
    lengths = [1001, 100, 600]
    found, times = run(plan, lengths, MINIMAL)
    shared, short, middle = (H200_1B.job_time([length], size) for length, size in ((1001, 2), (100, 1), (600, 1)))
    assert found.makespan == pytest.approx(max(shared + short, middle))
    assert found.busy_by_size == pytest.approx({1: short + middle, 2: 2 * shared})
    assert found.jobs_by_size == {1: 2, 2: 1}
    assert found.idle_share == pytest.approx(1 - (2 * shared + short + middle) / (3 * found.makespan))
    assert (found.tokens, found.padding_tokens) == (1004 + 100 + 600, 3)
    assert found.padding_share == pytest.approx(3 / 1704)
    assert found.microbatches == 2
    assert found.peak_tokens == 600
    assert max(times.finishes) == found.makespan


def test_a_host_that_is_behind_leaves_its_device_idle() -> None:
    plan = BatchPlan(1, (Job(0, 1, (0,)), Job(0, 1, (1,)), Job(0, 1, (2,))))
    lengths = [8000, 10, 10]
    long, short = H200_1B.job_time([8000], 1), H200_1B.job_time([10], 1)
    busy = long + 2 * short
    # Three microbatches take the host longer than the device: in the long run it decides.
    machine = Machine(1, replace(H200_1B, floor=busy / 2))
    times = [machine.execute(plan, lengths, MINIMAL) for _ in range(40)]
    found = [predict(plan, lengths, MINIMAL, one) for one in times]
    assert sum(one.makespan for one in found[10:]) / 30 == pytest.approx(1.5 * busy, rel=0.05)
    assert all(one.busy_seconds == pytest.approx(busy) for one in found)
    assert found[-1].idle_share == pytest.approx(1 - busy / found[-1].makespan)


def test_a_host_that_is_ahead_costs_nothing() -> None:
    plan = BatchPlan(1, (Job(0, 1, (0,)), Job(0, 1, (1,))))
    lengths = [8000, 10]
    short = H200_1B.job_time([10], 1)
    # A short microbatch alone would wait for its host, but behind a long one it does not.
    machine = Machine(1, replace(H200_1B, floor=3 * short))
    times = [machine.execute(plan, lengths, MINIMAL) for _ in range(3)]
    usual = simulate(plan, lengths, MINIMAL, H200_1B)
    assert times[2].finishes == pytest.approx(usual.finishes)
    assert times[2].starts == pytest.approx(usual.starts)


def test_a_fixed_padding_rule_counts_as_padding() -> None:
    plan = BatchPlan(2, (Job(0, 1, (0,)), Job(1, 1, (1,))))
    found, _ = run(plan, [10, 32], PaddingRule(fixed=16))
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
    found, _ = run(plan, lengths, scheduler.padding)
    assert found.makespan == pytest.approx(simulate(plan, lengths, scheduler.padding, H200_1B).makespan)
    assert found.rank_seconds == pytest.approx(ranks * found.makespan)
    assert 0 < found.busy_seconds <= found.rank_seconds * (1 + 1e-9)
    assert sum(found.jobs_by_size.values()) == len(plan.jobs)
    assert found.tokens - found.padding_tokens == sum(lengths)
    assert 0 < found.peak_tokens <= 4096
