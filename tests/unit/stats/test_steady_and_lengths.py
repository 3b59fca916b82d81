import numpy as np
import pytest

from dcpbench.stats.lengths import by_longest
from dcpbench.stats.steadiness import steadiness, without_outliers, workload_removed

RNG = np.random.default_rng(11)
NOISE = np.exp(RNG.normal(0, 0.005, 100))
INDEX = np.arange(100)


@pytest.mark.parametrize(
    ("z", "label"),
    [
        (NOISE, "flat"),
        (NOISE * (1 + 0.0005 * INDEX), "slowing"),
        (NOISE * (1 - 0.0005 * INDEX), "warming"),
        (NOISE * np.where((INDEX > 24) & (INDEX < 50), 1.1, 1.0), "unstable"),
    ],
)
def test_labels(z: np.ndarray, label: str) -> None:
    assert steadiness(z).label == label


def test_drift_is_over_the_window() -> None:
    assert steadiness(1 + 0.001 * INDEX).drift == pytest.approx(0.099 / 1.0495, rel=1e-6)
    long = 1 + 0.1 * np.arange(100_000) / 100_000
    assert steadiness(long).drift == pytest.approx(0.095, abs=0.002)


def test_autocorrelation_is_that_of_the_process() -> None:
    noise = RNG.normal(0, 0.01, 5000)
    for i in range(1, 5000):
        noise[i] += 0.5 * noise[i - 1]
    found = steadiness(np.exp(noise))
    assert found.correlation == pytest.approx(0.5, abs=0.05)
    assert found.effective == pytest.approx(5000 / 3, rel=0.15)


def test_a_slow_start_gives_a_truncation_point() -> None:
    assert 15 <= steadiness(NOISE * np.where(INDEX < 15, 1.3, 1.0)).truncation <= 40
    assert steadiness(np.ones(100)).truncation == 0


def test_outliers_stand_out_from_what_the_batch_takes() -> None:
    work = RNG.gamma(2, 1, 100)
    seconds = work * np.exp(RNG.normal(0, 0.003, (4, 100)))
    seconds[2, 40] *= 1.5
    z, how = workload_removed(seconds, None, None)
    assert how == "the median over launches"
    assert [steadiness(row).outliers for row in z] == [(), (), (40,), ()]


def test_few_launches_are_compared_with_a_prediction() -> None:
    tokens, squares = RNG.integers(1000, 9000, 100), RNG.integers(10**6, 10**8, 100)
    seconds = (0.1 + 1e-5 * tokens + 1e-9 * squares)[None, :] * np.ones((2, 1))
    z, how = workload_removed(seconds, np.stack([tokens] * 2), np.stack([squares] * 2))
    assert z == pytest.approx(np.ones((2, 100)))
    assert "prediction" in how
    z, how = workload_removed(seconds, None, None)
    assert "own median" in how
    assert np.median(z[0]) == pytest.approx(1)


def test_flagged_iterations_leave_both_cases() -> None:
    base, dcp = np.array([[2.0, 2.0, 9.0]]), np.array([[1.0, 1.0, 1.0]])
    assert without_outliers(base, dcp, np.array([[False, False, True]])) == pytest.approx([np.log(2)])
    assert without_outliers(base, dcp, np.ones((1, 3), bool)) == pytest.approx([np.log(13 / 3)])


def test_speedup_by_longest_sample() -> None:
    longest = np.repeat([100, 200, 400, 800], 5)
    base = np.ones((2, 20))
    dcp = base / np.repeat([2.0, 1.5, 1.2, 1.0], 5)
    found = by_longest(base, dcp, longest)
    assert [(part.shortest, part.longest, part.iterations) for part in found] == [
        (100, 100, 5), (200, 200, 5), (400, 400, 5), (800, 800, 5),
    ]  # fmt: skip
    assert [part.speedup for part in found] == pytest.approx([2.0, 1.5, 1.2, 1.0])
    assert sum(part.share for part in found) == pytest.approx(1)
    assert [part.iterations for part in by_longest(base, dcp, np.full(20, 7))] == [20]
    (swapped, *_) = by_longest(dcp, base, longest)
    assert swapped.speedup == pytest.approx(0.5)
