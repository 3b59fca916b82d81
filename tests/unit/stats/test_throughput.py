import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from dcpbench.errors import DcpbenchError, RecordsError, UsageError
from dcpbench.stats.throughput import (
    FlopModel,
    case_statistics,
    cut_from_each_end,
    kept_on_aligned,
    log_ratios,
    order_effect,
    speedup,
)

TIMES = st.tuples(st.integers(1, 4), st.integers(1, 30)).flatmap(
    lambda shape: st.tuples(
        arrays(np.float64, shape, elements=st.floats(1e-3, 1e3)),
        arrays(np.float64, shape, elements=st.floats(1e-3, 1e3)),
    )
)


def seconds(*rows: list[float]) -> np.ndarray:
    return np.array(rows) / 1e3


def test_known_answers() -> None:
    times = seconds([1000.0, 2000.0, 3000.0, 4000.0, 90000.0, 5000.0, 6000.0, 7000.0, 8000.0, 9000.0])
    case = case_statistics(times)
    assert case.iterations == 10
    assert case.mean_ms == 13500.0
    assert case.median_ms == 5500.0
    assert case.trimmed_mean_ms == stats.trim_mean(times[0] * 1e3, 0.1) == 5500.0
    assert (case.trimmed_kept, case.trimmed_cut) == (8, 2)
    assert case.samples_per_second is case.tokens_per_second is case.tflops_per_gpu is None


def test_the_conversion_to_ms_leaves_no_dust() -> None:
    """571.3 ms held as seconds must not come out as 571.3000000000001."""
    times = np.array([[571.3, 387.7, 388.0]]) / 1e3
    assert case_statistics(times).median_ms == 388.0
    assert case_statistics(times[:, :1]).mean_ms == 571.3
    assert case_statistics(times[:, 1:]).median_ms == (387.7 + 388.0) / 2


def test_a55_running_total_divided_by_one_step() -> None:
    case = case_statistics(seconds([1000.0, 1000.0]), samples=np.array([[10, 30]]), tokens=np.array([[1000, 3000]]))
    assert case.tokens_per_second == 2000.0
    assert case.samples_per_second == 20.0


def test_rates_weigh_long_iterations_as_they_cost() -> None:
    case = case_statistics(seconds([1000.0, 9000.0]), tokens=np.array([[9000, 1000]]))
    assert case.tokens_per_second == 1000.0


def test_tflops_from_real_tokens() -> None:
    flops = FlopModel(per_token=2e12, per_squared_length=1e10, world_size=4)
    case = case_statistics(
        seconds([500.0, 1500.0]), tokens=np.array([[10, 30]]), squared_lengths=np.array([[50, 150]]), flops=flops
    )
    # (2e12 * 40 + 1e10 * 200) / (2 s * 4 ranks * 1e12)
    assert case.tflops_per_gpu == pytest.approx(10.25)


def test_a48_and_a54_arithmetic() -> None:
    assert case_statistics(seconds([1200.0] * 5)).mean_ms == 1200.0
    assert case_statistics(seconds([1400.0] + [1000.0] * 6)).mean_ms == pytest.approx(1057.142857)


def test_a57_a_filter_throws_every_sample_away() -> None:
    for empty in (np.empty((1, 0)), np.empty((0, 5)), np.array([[1.0, np.nan]]), np.array([[0.0]])):
        with pytest.raises(RecordsError, match="no valid samples") as error:
            case_statistics(empty)
        assert error.value.exit_code != 0
        with pytest.raises(RecordsError, match="no valid samples"):
            speedup(empty, empty)


@pytest.mark.parametrize("trim", [0.5, 0.7, -0.1])
def test_a57_a_trim_that_leaves_nothing(trim: float) -> None:
    four = seconds([1.0, 2.0, 3.0, 4.0])
    for attempt in (lambda: case_statistics(four, trim=trim), lambda: speedup(four, four, trim=trim)):
        with pytest.raises(UsageError, match="would leave nothing of 4 values"):
            attempt()
    assert issubclass(UsageError, DcpbenchError)


def test_one_measured_step() -> None:
    case = case_statistics(seconds([1234.5]))
    assert case.mean_ms == case.median_ms == case.trimmed_mean_ms == 1234.5


def test_a53_second_case_always_looks_slower() -> None:
    baseline = seconds([1000.0] * 6, [1050.0] * 6)
    dcp = seconds([1050.0] * 6, [1000.0] * 6)
    result = speedup(baseline, dcp)
    assert result.total == pytest.approx(1.0)
    assert result.by_pair == pytest.approx((1000 / 1050, 1.05))
    effect = order_effect(log_ratios(baseline, dcp), np.array([True, False]))
    assert effect == pytest.approx(1.05)
    assert order_effect(log_ratios(baseline, dcp), np.array([True, True])) is None


def test_speedup_summaries() -> None:
    baseline, dcp = seconds([100.0, 200.0, 900.0]), seconds([50.0, 150.0, 800.0])
    result = speedup(baseline, dcp)
    assert result.total == pytest.approx(1.2)
    assert result.mean == pytest.approx(1.2)
    assert result.median == pytest.approx(200 / 150)


def test_the_trim_drops_the_same_iterations_from_both_cases() -> None:
    """Short batches 1.25 times as fast, long ones equal: a trim of each case alone keeps other batches in each."""
    rng = np.random.default_rng(0)
    base = rng.uniform(1.0, 2.0, 20)
    dcp = base / np.where(base < 1.5, 1.25, 1.0)
    base[7], dcp[7] = 50.0, 1.3
    kept = kept_on_aligned(base, dcp, 0.1)
    assert len(kept) == 16
    assert 7 not in kept
    ratio = speedup(base[None], dcp[None]).trimmed_mean
    assert ratio == pytest.approx(base[kept].mean() / dcp[kept].mean())
    assert ratio != pytest.approx(stats.trim_mean(base, 0.1) / stats.trim_mean(dcp, 0.1))


@settings(deadline=None)
@given(TIMES)
def test_swapping_the_cases_gives_the_reciprocal(times: tuple[np.ndarray, np.ndarray]) -> None:
    there, back = speedup(*times), speedup(*reversed(times))
    for name in ("total", "mean", "median", "trimmed_mean"):
        assert getattr(there, name) * getattr(back, name) == pytest.approx(1.0)


@settings(deadline=None)
@given(TIMES, st.sampled_from([0.25, 0.5, 2.0, 64.0]))
def test_scaling_time_changes_no_speedup(times: tuple[np.ndarray, np.ndarray], factor: float) -> None:
    there, scaled = speedup(*times), speedup(times[0] * factor, times[1] * factor)
    for name in ("total", "mean", "median"):
        assert getattr(scaled, name) == pytest.approx(getattr(there, name), rel=1e-6)


@settings(deadline=None)
@given(TIMES, st.randoms())
def test_the_order_of_pairs_does_not_matter(times: tuple[np.ndarray, np.ndarray], random: object) -> None:
    order = np.random.default_rng(random.randrange(1000)).permutation(len(times[0]))  # type: ignore[attr-defined]
    there, shuffled = speedup(*times), speedup(times[0][order], times[1][order])
    for name in ("total", "mean", "median"):
        assert getattr(shuffled, name) == pytest.approx(getattr(there, name))


@settings(deadline=None)
@given(st.integers(1, 1000), st.floats(0, 0.4999))
def test_the_trim_is_scipys(count: int, trim: float) -> None:
    values = np.arange(count, dtype=float)
    cut = cut_from_each_end(count, trim)
    assert stats.trim_mean(values, trim) == pytest.approx(values[cut : count - cut].mean())


def test_shapes_must_match() -> None:
    with pytest.raises(ValueError, match="shapes"):
        speedup(seconds([1.0, 2.0]), seconds([1.0]))
