"""The event simulator and the check for plans in which nobody waits."""

from __future__ import annotations

import pytest

from dcpbench.dcp.costs import H200_1B
from dcpbench.dcp.simulation import is_laminar, simulate
from dcpbench.dcp.workload import MINIMAL, BatchPlan, Job


def test_a_job_starts_when_its_last_rank_is_ready() -> None:
    plan = BatchPlan(3, (Job(0, 1, (0,)), Job(1, 1, (1,)), Job(0, 2, (2,)), Job(2, 1, (3,))), lockstep=False)
    lengths = [100, 4000, 500, 50]
    took = [H200_1B.job_time([length], job.size) for length, job in zip(lengths, plan.jobs, strict=True)]
    done = simulate(plan, lengths, MINIMAL, H200_1B)
    assert done.starts == (0, 0, took[1], 0)
    assert done.finishes == pytest.approx((took[0], took[1], took[1] + took[2], took[3]))
    assert done.busy == pytest.approx((took[0] + took[2], took[1] + took[2], took[3]))
    assert done.waited == pytest.approx(took[1] - took[0])
    assert done.makespan == pytest.approx(took[1] + took[2])


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([(0, 4), (0, 2), (2, 1), (3, 1), (2, 1), (0, 2)], True),
        ([(0, 2), (0, 4)], False),  # grows
        ([(0, 2), (1, 2)], False),  # overlaps
        ([(0, 2), (2, 2), (0, 1), (1, 1)], True),
        ([(0, 1), (0, 2)], False),
    ],
)
def test_groups_may_only_split(jobs: list[tuple[int, int]], expected: bool) -> None:
    plan = BatchPlan(4, tuple(Job(first, size, (0,)) for first, size in jobs), lockstep=False)
    assert is_laminar(plan) is expected
