"""Coefficients refitted to the iterations of a finished run: what was timed apart, corrected by what training does.

An iteration tells the sum along its slowest chain of jobs only, so the coefficients are not free: each is a multiple of
what it was, and multiples far from 1 cost as much as relative errors do. Every other iteration is held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from dcpbench.dcp.costs import CostModel, Link
from dcpbench.predicted import PlannedIteration, iteration_times

Floats = NDArray[np.float64]

FREEDOM = 0.5
"""A multiple of e^0.5 counts as much as all iterations missed by `MISS`."""
MISS = 0.02
LIMIT = 0.05
"""Nothing is predicted with a refit that misses iterations held out by more on average: what predictions promise."""


@dataclass(frozen=True)
class Refit:
    """The new coefficients, and relative errors of the iterations held out."""

    cost: CostModel
    iteration_seconds: float
    iterations: int
    before: float
    """Mean absolute relative error with the old coefficients."""
    after: float
    p95: float
    fitted: float
    """Mean absolute relative error, after the refit, of the iterations that took part in it."""


def refit(cost: CostModel, iteration_seconds: float, iterations: Sequence[PlannedIteration], measured: Floats) -> Refit:
    """Fit the coefficients and the constant of an iteration to measured iteration times.

    Args:
        cost: what to start from, and stay near to.
        iteration_seconds: what an iteration takes beside its microbatches, so far as known.
        iterations: at least eight, in the order in which they were executed.
        measured: their seconds, shape (iterations,).

    Raises:
        ValueError: too few iterations.
    """
    if len(iterations) < 8:
        raise ValueError("a refit needs at least eight measured iterations")
    used, held = slice(0, None, 2), slice(1, None, 2)
    names = [
        name for name in ("base", "token", "square", "floor", "floor_shared", "overlap") if getattr(cost, name) > 0
    ]
    shared = any(bool((one.size > 1).any()) for one in iterations)
    names = [name for name in names if shared or name not in ("floor_shared", "overlap")]
    # A constant that is not known yet may be anything up to what the model leaves of the iterations.
    rest = (measured - iteration_times(iterations, cost))[used]
    constant = iteration_seconds or max(0.01 * float(np.median(measured)), float(np.median(rest)))

    def changed(logs: Floats) -> tuple[CostModel, float]:
        multiples = np.exp(logs).tolist()
        values = {name: getattr(cost, name) * m for name, m in zip(names, multiples, strict=False)}
        if "overlap" in values:
            values["overlap"] = min(1.0, values["overlap"])
        if shared:
            values["within"] = Link(cost.within.latency, cost.within.bandwidth / multiples[-2])
        return replace(cost, assumed=False, **values), constant * multiples[-1]

    def residuals(logs: Floats) -> Floats:
        model, seconds = changed(logs)
        errors = ((iteration_times(iterations, model) + seconds) / measured - 1)[used]
        return np.concatenate([errors / MISS / np.sqrt(len(errors)), logs / FREEDOM])

    count = len(names) + shared + 1
    found = least_squares(residuals, np.zeros(count), loss="soft_l1", diff_step=[1e-4] * count, max_nfev=60)
    model, seconds = changed(found.x)
    before = np.abs((iteration_times(iterations, cost) + iteration_seconds) / measured - 1)[held]
    errors = np.abs((iteration_times(iterations, model) + seconds) / measured - 1)
    return Refit(
        cost=model,
        iteration_seconds=seconds,
        iterations=len(iterations),
        before=float(before.mean()),
        after=float(errors[held].mean()),
        p95=float(np.quantile(errors[held], 0.95)),
        fitted=float(errors[used].mean()),
    )
