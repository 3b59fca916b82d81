"""Coefficients refitted to executed iterations: what was timed apart, corrected by what training does.

An iteration tells the sum along its slowest chain of jobs only, so the coefficients are not free: each is a multiple of
what it was, and multiples far from 1 cost as much as relative errors do. Of data-sheet rates, which no measurement
supports, they cost less, and whether attention hides what ranks exchange is then chosen, too. Half of the iterations
are held out. `calibrate --from-run` refits to finished runs, and a launch with `schedule.refit` while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from dcpbench.dcp.costs import CostModel, Link
from dcpbench.dcp.iterations import PlannedIteration, iteration_times
from dcpbench.spec import FEWEST_TO_REFIT

Floats = NDArray[np.float64]

FREEDOM, FREEDOM_OF_ASSUMED = 0.5, 4.0
"""A multiple of e to this power counts as much as all iterations missed by `MISS`."""
MISS = 0.02
LIMIT = 0.05
"""Nothing is predicted with a refit that misses iterations held out by more on average: what predictions promise."""
LEAST = FEWEST_TO_REFIT
"""Iterations that a refit needs."""


@dataclass(frozen=True)
class Refit:
    """The new coefficients, and relative errors of the iterations held out."""

    cost: CostModel
    iteration_seconds: float
    iterations: int
    before: float
    """Mean absolute relative error with the old coefficients; weighted where the refit is, as those that follow."""
    after: float
    p95: float
    """95 % of them, each counted alike, have no larger error."""
    fitted: float
    """Mean absolute relative error, after the refit, of the iterations that took part in it."""
    errors: Floats
    """(predicted - measured) / measured of every iteration after the refit."""
    held_out: NDArray[np.bool_]


def refit(
    cost: CostModel,
    iteration_seconds: float,
    iterations: Sequence[PlannedIteration],
    measured: Floats,
    held_out: NDArray[np.bool_] | None = None,
    weights: Floats | None = None,
) -> Refit:
    """Fit the coefficients and the constant of an iteration to measured iteration times.

    Args:
        cost: what to start from, and stay near to.
        iteration_seconds: what an iteration takes beside its microbatches, so far as known.
        iterations: at least `LEAST`, in the order in which they were executed.
        measured: their seconds, shape (iterations,).
        held_out: which of them judge the refit and take no part in it, same shape; default: every other one.
        weights: how much each counts, in the refit and in its errors, same shape; only their ratios matter. Default:
            all alike.

    Raises:
        ValueError: too few iterations, or none is held out, or all are.
    """
    if len(iterations) < LEAST:
        raise ValueError("a refit needs at least eight measured iterations")
    held = np.arange(len(iterations)) % 2 == 1 if held_out is None else held_out
    if held.all() or not held.any():
        raise ValueError("a refit needs iterations to fit to and others to judge it by")
    counts = np.ones(len(iterations)) if weights is None else weights
    if not (np.isfinite(counts).all() and (counts > 0).all()):
        raise ValueError("the weights of a refit are finite and greater than 0")
    shares = counts[~held] / counts[~held].sum()
    own = [one for one, out in zip(iterations, held.tolist(), strict=True) if not out]
    starts = [cost]
    if cost.assumed:
        # What hides behind what is in no data sheet; where nothing does, the bandwidth stands for all of sharing.
        starts.append(replace(cost, merge=0.0, overlap=0.0))
    freedom = FREEDOM_OF_ASSUMED if cost.assumed else FREEDOM
    # Without a floor of the host, iterations do not depend on the one before, and only those in the fit are timed.
    alone = not (cost.floor or cost.floor_shared)
    best: tuple[float, CostModel, float] | None = None
    for start in starts:
        change = _Change(start, iteration_seconds, iterations, measured, ~held)

        def residuals(logs: Floats, change: _Change = change) -> Floats:
            model, seconds = change(logs)
            times = iteration_times(own, model) if alone else iteration_times(iterations, model)[~held]
            errors = (times + seconds) / measured[~held] - 1
            return np.concatenate([errors / MISS * np.sqrt(shares), logs / freedom])

        zeros = np.zeros(change.count)
        found = least_squares(residuals, zeros, loss="soft_l1", diff_step=[1e-4] * change.count, max_nfev=60)
        if best is None or found.cost < best[0]:
            best = float(found.cost), *change(found.x)
    assert best is not None
    _, model, seconds = best
    before = np.abs((iteration_times(iterations, cost) + iteration_seconds) / measured - 1)[held]
    errors = (iteration_times(iterations, model) + seconds) / measured - 1
    return Refit(
        cost=model,
        iteration_seconds=seconds,
        iterations=len(iterations),
        before=float(np.average(before, weights=counts[held])),
        after=float(np.average(np.abs(errors[held]), weights=counts[held])),
        p95=float(np.quantile(np.abs(errors[held]), 0.95)),
        fitted=float(np.average(np.abs(errors[~held]), weights=shares)),
        errors=errors,
        held_out=held,
    )


def why_not(found: Refit) -> str | None:
    """Why a refit is not to take the place of the coefficients it started from; None where it is."""
    if not found.after <= LIMIT:
        return f"iterations held out are missed by {found.after:.1%} on average (limit {LIMIT:.0%})"
    if found.after > found.before:
        return (
            f"iterations held out are missed by {found.after:.2%} on average, and by {found.before:.2%} with the "
            "coefficients in use"
        )
    return None


class _Change:
    """Multiples of a cost model's coefficients and of the constant, by their logarithms."""

    def __init__(
        self,
        start: CostModel,
        constant: float,
        iterations: Sequence[PlannedIteration],
        measured: Floats,
        used: NDArray[np.bool_],
    ) -> None:
        shared = any(bool((one.size > 1).any()) for one in iterations)
        names = ["base", "token", "square", "floor", *(("floor_shared", "overlap") if shared else ())]
        setters = [_multiple_of(name) for name in names if getattr(start, name) > 0]
        if start.long is not None:
            setters.append(_long)
        if shared:
            setters.append(_bandwidth)
        self._start, self._setters = start, setters
        # A constant that is not known yet may be anything up to what the model leaves of the iterations.
        rest = (measured - iteration_times(iterations, start))[used]
        self._constant = constant or max(0.01 * float(np.median(measured)), float(np.median(rest)))
        self.count = len(setters) + 1

    def __call__(self, logs: Floats) -> tuple[CostModel, float]:
        """The model and the constant, in seconds."""
        multiples = np.exp(logs).tolist()
        model = replace(self._start, assumed=False)
        for setter, multiple in zip(self._setters, multiples, strict=False):
            model = setter(model, multiple)
        return model, self._constant * multiples[-1]


def _multiple_of(name: str) -> Callable[[CostModel, float], CostModel]:
    most = 1.0 if name == "overlap" else np.inf

    def change(model: CostModel, multiple: float) -> CostModel:
        changed: dict[str, Any] = {name: min(most, getattr(model, name) * multiple)}
        return replace(model, **changed)

    return change


def _long(model: CostModel, multiple: float) -> CostModel:
    assert model.long is not None
    return replace(model, long=replace(model.long, square=model.long.square * multiple))


def _bandwidth(model: CostModel, multiple: float) -> CostModel:
    return replace(model, within=Link(model.within.latency, model.within.bandwidth / multiple))
