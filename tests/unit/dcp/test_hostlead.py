"""Hosts that queue ahead: an iteration is no shorter than host or device need, and no longer than all floors added."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.dcp.costs import H200_1B
from dcpbench.dcp.hostlead import LEAD, Timeline
from dcpbench.dcp.iterations import PlannedIteration, iteration_times
from dcpbench.dcp.schedulers import create
from dcpbench.dcp.simulation import simulate
from dcpbench.dcp.workload import Domain


def alone(device: list[float], host: list[float], timeline: Timeline | None = None) -> float:
    """Seconds of an iteration of one rank."""
    timeline = timeline or Timeline(1)
    return timeline.iteration([0] * len(device), [1] * len(device), device, host)


def test_a_short_microbatch_behind_long_ones_is_not_held_up_by_the_host() -> None:
    device, host = [0.040, 0.040, 0.012], [0.027] * 3
    assert alone(device, host) == pytest.approx(0.092)
    assert alone(device[::-1], host) == pytest.approx(0.027 + 0.080)


def test_a_host_slower_than_the_device_decides_alone() -> None:
    timeline = Timeline(1)
    for _ in range(3):
        assert alone([0.01] * 4, [0.03] * 4, timeline) == pytest.approx(0.12)


def test_the_host_is_ahead_when_a_long_iteration_ends() -> None:
    timeline = Timeline(1)
    alone([0.2], [0.03], timeline)
    assert alone([0.01], [0.03], timeline) == pytest.approx(0.01)
    assert 0.01 < alone([0.01] * 8, [0.03] * 8, timeline) <= 0.24


def test_the_lead_is_limited() -> None:
    device, host = [1.0] * 5 + [0.001] * 10, [0.03] * 15
    assert alone(device, host) == pytest.approx(5 + 0.03 * (10 - LEAD), abs=0.01)


def test_members_of_a_group_finish_together_and_wait_for_the_slowest_host() -> None:
    first, size, device, host = [0, 0], [1, 2], [0.010, 0.020], [0.030, 0.040]
    assert Timeline(2).iteration(first, size, device, host) == pytest.approx(0.070)


def test_ranks_end_an_iteration_together() -> None:
    timeline = Timeline(2)
    assert timeline.iteration([0], [1], [0.5], [0.0]) == 0.5
    assert timeline.iteration([1], [1], [0.25], [0.0]) == 0.25
    assert timeline.iteration([], [], [], []) == 0.0


LENGTHS = st.lists(st.integers(16, 4000), min_size=1, max_size=16)


@settings(deadline=None, max_examples=12)
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
    assert iteration_times([planned] * 2, H200_1B) == pytest.approx(np.full(2, shortest))
    found = iteration_times([planned] * 3, cost)
    assert (found >= shortest * (1 - 1e-9)).all()
    assert (found <= longest * (1 + 1e-9)).all()
