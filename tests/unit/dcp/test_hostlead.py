"""Hosts that queue ahead: an iteration is no shorter than host or device need, and no longer than all floors added."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.dcp.costs import H200_1B
from dcpbench.dcp.hostlead import LEAD, makespan
from dcpbench.dcp.schedulers import create
from dcpbench.dcp.simulation import simulate
from dcpbench.dcp.workload import Domain
from dcpbench.predicted import PlannedIteration


def test_a_short_microbatch_behind_long_ones_is_not_held_up_by_the_host() -> None:
    device, host = [0.040, 0.040, 0.012], [0.027] * 3
    assert makespan(1, [0] * 3, [1] * 3, device, host) == pytest.approx(0.092)
    assert makespan(1, [0] * 3, [1] * 3, device[::-1], host) == pytest.approx(0.027 + 0.080)


def test_a_host_slower_than_the_device_decides_alone() -> None:
    assert makespan(1, [0] * 4, [1] * 4, [0.01] * 4, [0.03] * 4) == pytest.approx(0.12)


def test_the_lead_is_limited() -> None:
    device, host = [1.0] * 5 + [0.001] * 10, [0.03] * 15
    expected = 5 + 0.03 * (10 - LEAD)
    assert makespan(1, [0] * 15, [1] * 15, device, host) == pytest.approx(expected, abs=0.01)


def test_members_of_a_group_finish_together_and_wait_for_the_slowest_host() -> None:
    first, size, device, host = [0, 0], [1, 2], [0.010, 0.020], [0.030, 0.040]
    assert makespan(2, first, size, device, host) == pytest.approx(0.070)


LENGTHS = st.lists(st.integers(16, 4000), min_size=1, max_size=30)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, st.sampled_from(["laminar", "default_dynamic_cp", "dp_balanced"]), st.floats(0, 0.1))
def test_predicted_iterations_lie_between_no_floor_and_added_floors(
    lengths: list[int], scheduler: str, floor: float
) -> None:
    made = create(scheduler, domain=Domain(4, 4), capacity=1024)
    plan = made.plan(lengths)
    cost = replace(H200_1B, floor=floor, floor_shared=1.2 * floor)
    planned = PlannedIteration.of(plan, lengths, made.padding)
    shortest = simulate(plan, lengths, made.padding, H200_1B).makespan
    longest = simulate(plan, lengths, made.padding, cost).makespan
    assert planned.makespan(H200_1B) == pytest.approx(shortest)
    assert shortest * (1 - 1e-9) <= planned.makespan(cost) <= longest * (1 + 1e-9)
