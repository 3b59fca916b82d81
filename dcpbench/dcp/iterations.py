"""Executed iterations as the cost model sees them: their jobs as arrays, and how long it says that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dcpbench.dcp.costs import CostModel, expected_squares, squares_of
from dcpbench.dcp.hostlead import Timeline
from dcpbench.dcp.workload import BatchPlan, PaddingRule


@dataclass(frozen=True)
class PlannedIteration:
    """The jobs of one iteration, ready to be timed by any cost model: arrays over jobs, in plan order."""

    ranks: int
    first: tuple[int, ...]
    size: NDArray[np.int64]
    tokens: NDArray[np.float64]
    squares: NDArray[np.float64]
    real: NDArray[np.float64]
    """Sums of squared real lengths."""

    @classmethod
    def of(cls, plan: BatchPlan, lengths: Sequence[int], padding: PaddingRule) -> PlannedIteration:
        """The jobs of a plan for samples of these real lengths."""
        jobs = plan.jobs
        return cls(
            plan.ranks,
            tuple(job.first_rank for job in jobs),
            np.array([job.size for job in jobs], np.int64),
            np.array([sum(padding.pad(lengths[i], job.size) for i in job.samples) for job in jobs], np.float64),
            np.array([sum(squares_of(lengths[i], job.size) for i in job.samples) for job in jobs], np.float64),
            np.array([sum(lengths[i] ** 2 for i in job.samples) for job in jobs], np.float64),
        )

    @classmethod
    def recorded(cls, jobs: Sequence[int], ranks: int) -> PlannedIteration:
        """The jobs of an iteration as `records.IterationRecord.jobs` has them."""
        first, size, tokens, real = np.array(jobs, np.int64).reshape(-1, 4).T
        held, squared = tokens.astype(np.float64), real.astype(np.float64)
        return cls(ranks, tuple(first.tolist()), size, held, expected_squares(size, held, squared), squared)

    def times(self, cost: CostModel) -> tuple[list[float], list[float]]:
        """(seconds on the device, seconds of the host) of each job."""
        device = replace(cost, floor=0.0, floor_shared=0.0)
        times = np.empty(len(self.first))
        for size in np.unique(self.size):
            own = self.size == size
            times[own] = device.times(int(size), self.tokens[own], self.squares[own], self.real[own])
        return times.tolist(), np.where(self.size > 1, cost.floor_shared, cost.floor).tolist()


def iteration_times(
    iterations: Sequence[PlannedIteration], cost: CostModel | Sequence[CostModel]
) -> NDArray[np.float64]:
    """Seconds of the microbatches of consecutive iterations, shape (iterations,); see `dcp/hostlead.py`.

    Without a floor in the cost model they are the makespans of `simulation.simulate`.

    Args:
        iterations: in the order in which they were executed.
        cost: one model for all, or one for each.
    """
    if not iterations:
        return np.zeros(0)
    costs = [cost] * len(iterations) if isinstance(cost, CostModel) else cost
    timeline = Timeline(iterations[0].ranks)
    # The first one is not the first of its launch: the host was ahead when it began.
    seconds = [
        timeline.iteration(one.first, one.size.tolist(), *one.times(own))
        for one, own in zip((iterations[0], *iterations), (costs[0], *costs), strict=True)
    ]
    return np.array(seconds[1:])
