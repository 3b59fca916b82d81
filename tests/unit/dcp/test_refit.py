"""Refits to whole iterations: wrong coefficients come closer, what was right stays, and errors are those held out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcpbench.analysis.predicted import compare
from dcpbench.dcp.costs import H200_1B, CostModel
from dcpbench.dcp.iterations import PlannedIteration, iteration_times
from dcpbench.dcp.refit import LIMIT, Refit, refit, why_not
from dcpbench.dcp.schedulers import create
from dcpbench.dcp.workload import Domain


def iterations(count: int = 24) -> list[PlannedIteration]:
    random = np.random.default_rng(5)
    made = [create(name, domain=Domain(2, 2), capacity=8192) for name in ("dp_balanced", "default_dynamic_cp")]
    found = []
    for number in range(count):
        lengths = np.clip(random.lognormal(7, 1.3, 24), 128, 16384).astype(int).tolist()
        scheduler = made[number % 2]
        found.append(PlannedIteration.of(scheduler.plan(lengths), lengths, scheduler.padding))
    return found


def measured(executed: list[PlannedIteration], truth: CostModel, constant: float, noise: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(7)
    return (iteration_times(executed, truth) + constant) * np.exp(random.normal(0, noise, len(executed)))


def test_coefficients_that_are_off_come_closer() -> None:
    executed = iterations()
    truth = replace(H200_1B, token=1.25 * H200_1B.token, square=0.8 * H200_1B.square)
    found = refit(H200_1B, 0.02, executed, measured(executed, truth, 0.02, noise=0.005))
    assert found.before > 0.05
    assert found.after < 0.015
    assert found.cost.token == pytest.approx(truth.token, rel=0.08)
    assert not found.cost.assumed
    assert found.iterations == len(executed)


def test_coefficients_that_are_right_stay() -> None:
    executed = iterations()
    found = refit(H200_1B, 0.02, executed, measured(executed, H200_1B, 0.02))
    assert found.before == pytest.approx(0, abs=1e-9)
    assert found.after < 1e-3
    assert found.cost.token == pytest.approx(H200_1B.token, rel=1e-2)
    assert found.iteration_seconds == pytest.approx(0.02, rel=0.05)


def test_a_constant_that_was_not_known_is_found() -> None:
    executed = iterations()
    found = refit(H200_1B, 0.0, executed, measured(executed, H200_1B, 0.05))
    assert found.after < 0.01 < found.before


def test_recent_iterations_decide_where_they_weigh_more() -> None:
    """A clock that fell half-way: coefficients follow the half that counts, and errors are of that half."""
    executed = iterations(32)
    slower = replace(H200_1B, token=1.3 * H200_1B.token, square=1.3 * H200_1B.square, base=1.3 * H200_1B.base)
    times = np.where(np.arange(32) < 16, measured(executed, H200_1B, 0.02), measured(executed, slower, 0.02))
    recent = refit(H200_1B, 0.02, executed, times, weights=0.5 ** ((31 - np.arange(32)) / 2))
    alike = refit(H200_1B, 0.02, executed, times, weights=np.full(32, 0.25))
    assert recent.after < 0.01 < alike.after
    assert recent.before > 1.8 * alike.before
    assert recent.cost.token == pytest.approx(slower.token, rel=0.08)
    plain = refit(H200_1B, 0.02, executed, times)
    assert (plain.cost, plain.before, plain.after) == (alike.cost, alike.before, alike.after)


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf])
def test_weights_that_are_none_are_refused(weight: float) -> None:
    executed = iterations(8)
    with pytest.raises(ValueError, match="greater than 0"):
        refit(H200_1B, 0.0, executed, np.ones(8), weights=np.array([weight, *[1.0] * 7]))


def found(before: float, after: float) -> Refit:
    none = np.zeros(2)
    return Refit(H200_1B, 0.0, 8, before, after, after, after, none, none == 0)


def test_only_a_refit_that_is_good_and_no_worse_is_adopted() -> None:
    assert why_not(found(0.2, 0.01)) is None
    assert why_not(found(0.01, 0.01)) is None
    assert why_not(found(0.5, LIMIT)) is None
    assert "missed by 6.0% on average (limit 5%)" in str(why_not(found(0.9, 0.06)))
    assert "missed by 2.10% on average, and by 2.00% with" in str(why_not(found(0.02, 0.021)))
    assert why_not(found(0.02, float("nan"))) is not None


def test_too_few_iterations_are_refused() -> None:
    executed = iterations(7)
    with pytest.raises(ValueError, match="at least eight"):
        refit(H200_1B, 0.0, executed, np.ones(7))


def test_launches_with_plans_of_their_own_have_predictions_of_their_own() -> None:
    measured = np.array([[1.25, 2.0], [0.8, 2.5]])
    found = compare("measured profile x", np.array([[1.0, 2.0], [1.0, 2.5]]), measured)
    assert found.mape == pytest.approx((0.2 + 0 + 0.25 + 0) / 4)
    assert (found.mean_ms, found.iterations) == (1625.0, 2)
    assert found.ratio == pytest.approx(6.5 / 6.55)


def test_a_comparison_gives_the_error_of_iterations_and_of_their_sum() -> None:
    found = compare("measured profile x", np.array([1.0, 2.0]), np.array([[1.25, 2.0], [0.8, 2.5]]))
    assert found.mape == pytest.approx((0.2 + 0 + 0.25 + 0.2) / 4)
    assert found.ratio == pytest.approx(6 / 6.55)
    assert (found.mean_ms, found.iterations) == (1500.0, 2)
