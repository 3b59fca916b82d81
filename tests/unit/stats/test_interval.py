import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.errors import UsageError
from dcpbench.stats.interval import (
    decide,
    hierarchical_interval,
    interval,
    order_interval,
    pairs_to_settle,
    sign_flip,
    timing_floor,
)
from dcpbench.stats.throughput import log_ratios

LOGS = st.lists(st.floats(-1, 1), min_size=3, max_size=8).map(np.array)


def test_the_interval_is_students_t() -> None:
    # t(0.975, 3) = 3.182446, t(0.95, 3) = 2.353363
    logs = np.array([0.1, 0.2, 0.3, 0.2])
    found = interval(logs)
    assert found is not None
    spread = np.sqrt(0.02 / 3)
    assert found.spread == pytest.approx(spread)
    assert np.log(found.low) == pytest.approx(0.2 - 3.182446 * spread / 2, rel=1e-6)
    assert np.log(found.high) == pytest.approx(0.2 + 3.182446 * spread / 2, rel=1e-6)
    assert np.log(found.equivalence_low) == pytest.approx(0.2 - 2.353363 * spread / 2, rel=1e-6)
    assert found.p_value == 2 / 16


@pytest.mark.parametrize(
    ("logs", "speed"),
    [
        ([0.3], "indicative"),
        ([0.3, 0.3], "inconclusive"),
        ([0.3, 0.31, 0.29, 0.3], "faster"),
        ([-0.3, -0.31, -0.29, -0.3], "slower"),
        ([0.001, -0.001, 0.002, 0.0], "equivalent"),
        ([0.3, -0.1, 0.2, 0.0], "inconclusive"),
        ([0.005] * 4, "equivalent"),
        ([0.02] * 6, "faster"),
    ],
)
def test_verdicts(logs: list[float], speed: str) -> None:
    assert decide(interval(np.array(logs)), 0.01) == speed


@given(LOGS)
def test_swapping_the_cases_swaps_the_verdict(logs: np.ndarray) -> None:
    there, back = interval(logs), interval(-logs)
    assert there is not None
    assert back is not None
    assert back.low == pytest.approx(1 / there.high)
    assert back.p_value == pytest.approx(there.p_value)
    swapped = {"faster": "slower", "slower": "faster"}
    assert decide(back, 0.01) == swapped.get(decide(there, 0.01), decide(there, 0.01))
    assert pairs_to_settle(-logs, 0.01) == pairs_to_settle(logs, 0.01)


def test_sign_flips_are_exact() -> None:
    assert sign_flip(np.full(6, 0.1)) == 2 / 64
    assert sign_flip(np.array([0.1, -0.1])) == 1.0
    assert sign_flip(np.full(17, 0.1)) is None


def test_the_pairs_that_settle_it_do() -> None:
    """Repeating the pairs keeps mean and spread nearly; the interval is then decided, and with fewer it was not."""
    logs = np.array([0.08, -0.02, 0.09, 0.01])
    assert decide(interval(logs), 0.01) == "inconclusive"
    needed = pairs_to_settle(logs, 0.01)
    assert needed is not None
    assert needed % 2 == 0
    assert decide(interval(np.tile(logs, -(-needed // 4))), 0.01) == "faster"
    assert pairs_to_settle(np.array([0.1]), 0.01) is None
    assert pairs_to_settle(np.array([1.0, -1.0, 1.0, -1.0]), 0.01) is None


def test_order_effect_has_a_welch_interval() -> None:
    logs = np.array([0.10, 0.20, 0.12, 0.24, 0.11, 0.20])
    first = np.array([True, False] * 3)
    found = order_interval(logs, first)
    assert found is not None
    # scipy.stats.ttest_ind(equal_var=False) of the two groups, halved.
    from scipy import stats

    ends = stats.ttest_ind(logs[~first], logs[first], equal_var=False).confidence_interval(0.95)
    assert np.log(found) == pytest.approx(np.array([ends.low, ends.high]) / 2)
    assert order_interval(logs[:3], first[:3]) is None
    assert order_interval(np.array([0.1, 0.2, 0.1, 0.2]), first[:4]) == pytest.approx((np.exp(0.05),) * 2)


def test_timing_floor_leaves_out_what_coming_second_does() -> None:
    assert timing_floor(np.array([[1.0, 1.1], [2.0, 2.2], [1.0, 1.1]])) == 0.0
    assert timing_floor(np.array([[1.0, 1.1]])) is None


def campaign(pairs: int, effect: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of both cases, shape (pairs, 60): launches off by 1 %, iterations by 2 %."""
    rng = np.random.default_rng(seed)
    work = rng.gamma(4, 0.25, 60)
    level = np.exp(rng.normal(0, 0.01, (2, pairs, 1)) + rng.normal(0, 0.02, (2, pairs, 60)))
    return work * level[0] * effect, work * level[1]


def test_a_hierarchical_interval_is_close_to_student_s_over_many_pairs() -> None:
    times = campaign(20, 1.05, 1)
    plain, found = interval(log_ratios(*times)), hierarchical_interval(*times)
    assert plain is not None
    assert (found.low, found.high) == pytest.approx((plain.low, plain.high), abs=0.003)
    assert found.low < found.equivalence_low < found.equivalence_high < found.high
    assert found.spread == plain.spread
    assert hierarchical_interval(*times) == found
    back = hierarchical_interval(times[1], times[0])
    assert (back.low, back.high) == pytest.approx((1 / found.high, 1 / found.low), rel=1e-12)


def test_a_hierarchical_interval_covers_the_truth() -> None:
    found = [hierarchical_interval(*campaign(10, 1.0, seed)) for seed in range(60)]
    # 0.90 to 0.95 at ten pairs; fewer than 47 of 60 would come up once in 1 000 at 0.90.
    assert sum(one.low <= 1 <= one.high for one in found) >= 47


def test_a_hierarchical_interval_needs_ten_pairs() -> None:
    with pytest.raises(UsageError, match="needs 10 pairs of launches, there are 9"):
        hierarchical_interval(*campaign(9, 1.0, 1))
