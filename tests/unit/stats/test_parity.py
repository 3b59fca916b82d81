import numpy as np
import pytest

from dcpbench.stats.parity import parity, step_correlation

LOSSES = np.array([[5.0, 4.0, 3.5, 3.0, 2.9, 2.5]])


def test_equal_losses() -> None:
    result = parity(LOSSES, LOSSES, 0.0, 0.0)
    assert result.passed
    assert result.outside == 0
    assert result.compared == 6
    assert result.max_abs_diff == result.mean_abs_diff == result.first_iteration_diff == 0.0
    assert result.step_correlation == pytest.approx(1.0)
    assert result.grad_norm_max_rel_diff is None


def test_known_differences() -> None:
    dcp = LOSSES + np.array([[0.001, 0.0, -0.05, 0.0, 0.0, 0.01]])
    result = parity(LOSSES, dcp, atol=0.01, rtol=0.01)
    assert not result.passed
    assert result.outside == 1
    assert result.max_abs_diff == pytest.approx(0.05)
    assert result.mean_abs_diff == pytest.approx(0.061 / 6)
    assert result.median_abs_diff == pytest.approx(0.0005)
    assert result.mean_rel_diff == pytest.approx((0.001 / 5 + 0.05 / 3.5 + 0.01 / 2.5) / 6)
    assert result.final_abs_diff == pytest.approx(0.061 / 6)
    assert result.loss_correlation == pytest.approx(np.corrcoef(LOSSES[0], dcp[0])[0, 1])
    assert result.first_iteration_diff == pytest.approx(0.001)
    assert (result.worst.pair, result.worst.iteration) == (0, 3)
    assert result.worst.difference == pytest.approx(-0.05)
    assert result.worst.allowed == pytest.approx(0.045)


@pytest.mark.parametrize(("atol", "rtol", "passed"), [(0.05, 0.0, True), (0.0, 0.05, False), (0.049, 0.0, False)])
def test_the_limit_is_inclusive_and_relative_to_the_baseline(atol: float, rtol: float, passed: bool) -> None:
    # 0.0625 and 0.0312 apart; 0.05 is not exact in binary, so use what is.
    baseline, dcp = np.array([[1.0, 0.5]]), np.array([[1.0, 0.5 + 0.03125]])
    scale = 0.03125 / 0.05
    assert parity(baseline, dcp, atol * scale, rtol).passed == passed


def test_the_worst_iteration_is_the_one_nearest_its_limit() -> None:
    """A small difference at a small loss can be worse than a great one at a great loss."""
    baseline = np.array([[100.0, 0.1]])
    dcp = np.array([[100.5, 0.15]])
    result = parity(baseline, dcp, atol=0.0, rtol=0.01)
    assert result.max_abs_diff == pytest.approx(0.5)
    assert result.worst.iteration == 2


def test_every_pair_counts() -> None:
    baseline = np.vstack([LOSSES, LOSSES])
    dcp = baseline.copy()
    dcp[1, 0] += 1.0
    result = parity(baseline, dcp, 0.1, 0.0)
    assert result.first_iteration_diff == 1.0
    assert result.worst.pair == 1
    assert not result.passed


def test_different_batches_show_in_the_steps() -> None:
    """The table of method.md: a trend alone correlates, its steps do not; scale and offset do not matter to them."""
    rng = np.random.default_rng(0)
    trend = 5 / np.sqrt(np.arange(1, 201))
    noise, other = rng.normal(0, 0.1, 200), rng.normal(0, 0.1, 200)
    same = step_correlation(trend + noise, (trend + noise) * 1.02 + rng.normal(0, 1e-3, 200))
    different = step_correlation(trend + noise, trend + other)
    assert same is not None
    assert different is not None
    assert same > 0.99
    assert abs(different) < 0.5


def test_steps_that_cannot_be_correlated() -> None:
    assert step_correlation(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])) is None
    assert step_correlation(np.arange(9.0), np.arange(9.0) ** 2) is None
    flat = np.zeros((1, 9))
    assert parity(flat, flat, 0, 0).step_correlation is None


def test_grad_norms_are_compared_where_both_have_them() -> None:
    norms = np.array([[2.0, np.nan, 4.0, 0.0, 1.0, 1.0]])
    other = np.array([[2.2, 1.0, 4.0, 0.0, 1.0, np.nan]])
    result = parity(LOSSES, LOSSES, 0, 0, norms, other)
    assert result.grad_norm_max_rel_diff == pytest.approx(0.1)
    assert result.grad_norm_first_rel_diff == pytest.approx(0.1)
    nothing = parity(LOSSES, LOSSES, 0, 0, norms, np.full_like(norms, np.nan))
    assert nothing.grad_norm_max_rel_diff is None
    assert nothing.grad_norm_first_rel_diff is None


def test_shapes_must_match() -> None:
    for a, b in ((LOSSES, LOSSES[:, 1:]), (LOSSES[:, :0], LOSSES[:, :0])):
        with pytest.raises(ValueError, match="shapes"):
            parity(a, b, 0, 0)
