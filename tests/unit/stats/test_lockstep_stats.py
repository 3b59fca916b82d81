"""The interval over iterations, and the gates at equal weights."""

import numpy as np
import pytest
from numpy.typing import NDArray

from dcpbench.stats.lockstep import FEWEST, Paired, Sides, decide_paired, lockstep_gates, more_iterations, paired

Values = NDArray[np.float64]


def alternating(count: int) -> NDArray[np.bool_]:
    return (np.arange(count) % 2 == 0)[None]


def times(
    rng: np.random.Generator,
    count: int,
    speedup: float = 1.0,
    rho: float = 0.5,
    noise: float = 0.02,
    second: float = 0.0,
) -> tuple[Values, Values]:
    """Batches of very different length, noise of each pass that resembles its neighbours, a cost of coming second."""
    batch = rng.lognormal(0.0, 0.4, count)
    shocks = rng.normal(0.0, noise * np.sqrt(1 - rho**2), (2, count + 50))
    series = np.zeros((2, count + 50))
    for index in range(1, count + 50):
        series[:, index] = rho * series[:, index - 1] + shocks[:, index]
    series = series[:, 50:]
    first = alternating(count)[0]
    baseline = batch * np.exp(series[0] + second * ~first)
    dcp = batch / speedup * np.exp(series[1] + second * first)
    return baseline[None], dcp[None]


def found(baseline: Values, dcp: Values) -> Paired:
    result = paired(baseline, dcp, alternating(baseline.shape[1]))
    assert result is not None
    return result


@pytest.mark.parametrize("count", [30, 100])
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_the_interval_covers_what_it_promises(count: int, rho: float) -> None:
    rng = np.random.default_rng(7)
    inside = wrong = 0
    for _ in range(300):
        result = found(*times(rng, count, 1.05, rho, second=0.03))
        inside += result.interval.low <= 1.05 <= result.interval.high
        wrong += decide_paired(found(*times(rng, count, 1.0, rho)), 0.01) in ("faster", "slower")
    assert inside / 300 > 0.93
    assert wrong / 300 <= 0.03


def test_a_real_difference_is_found_and_equal_cases_are_equivalent() -> None:
    rng = np.random.default_rng(8)
    assert decide_paired(found(*times(rng, 100, 1.05)), 0.01) == "faster"
    assert decide_paired(found(*times(rng, 100, 1 / 1.05)), 0.01) == "slower"
    assert decide_paired(found(*times(rng, 400, 1.0)), 0.01) == "equivalent"


def test_swapping_gives_the_reciprocal_and_a_scale_changes_nothing() -> None:
    baseline, dcp = times(np.random.default_rng(9), 50, 1.2)
    one, other, scaled = found(baseline, dcp), found(dcp, baseline), found(3 * baseline, 3 * dcp)
    assert other.interval.low == pytest.approx(1 / one.interval.high, rel=1e-9)
    assert other.interval.high == pytest.approx(1 / one.interval.low, rel=1e-9)
    assert scaled.interval.low == pytest.approx(one.interval.low, rel=1e-12)
    assert one.effective == pytest.approx(other.effective)


def test_the_cost_of_coming_second_is_no_uncertainty() -> None:
    batch = np.random.default_rng(10).lognormal(0.0, 0.1, 40)[None]
    first = alternating(40)
    baseline, dcp = batch * np.where(first, 1.0, 1.2), batch * np.where(first, 1.2, 1.0)
    known, unknown = paired(baseline, dcp, first), paired(baseline, dcp, None)
    assert known is not None
    assert unknown is not None
    assert known.interval.half_width < 0.3 * unknown.interval.half_width
    assert known.interval.low < 1.0 < known.interval.high


def test_equal_times_leave_no_width() -> None:
    batch = np.random.default_rng(11).lognormal(0.0, 0.4, 20)[None]
    result = found(batch, batch)
    assert (result.interval.low, result.interval.high, result.effective) == (1.0, 1.0, 20)


def test_neighbours_that_resemble_each_other_are_worth_less() -> None:
    rng = np.random.default_rng(12)
    near, far = found(*times(rng, 200, rho=0.9)), found(*times(rng, 200, rho=0.0))
    assert near.correlation > 0.6 > 0.2 > far.correlation
    assert near.effective < 60 < 130 < far.effective


def test_too_few_iterations_decide_nothing() -> None:
    assert paired(np.ones((1, 3)), np.ones((1, 3)), None) is None
    assert decide_paired(None, 0.01) == "inconclusive"
    few = paired(np.full((1, FEWEST - 1), 2.0), np.ones((1, FEWEST - 1)), None)
    assert decide_paired(few, 0.01) == "inconclusive"
    enough = paired(np.full((1, FEWEST), 2.0), np.ones((1, FEWEST)), None)
    assert decide_paired(enough, 0.01) == "faster"


def test_iterations_can_be_left_out_and_launches_added() -> None:
    rng = np.random.default_rng(13)
    one, other = times(rng, 30, 1.1), times(rng, 30, 1.1)
    baseline, dcp = (np.concatenate(pair) for pair in zip(one, other, strict=True))
    first = np.concatenate([alternating(30), ~alternating(30)])
    kept = np.ones((2, 30), dtype=np.bool_)
    kept[1] = False
    both, alone = paired(baseline, dcp, first), paired(baseline, dcp, first, kept)
    assert both is not None
    assert alone is not None
    assert (both.iterations, alone.iterations) == (60, 30)
    assert alone == paired(*one, alternating(30))


def test_more_iterations_would_settle_it() -> None:
    rng = np.random.default_rng(14)
    baseline, dcp = times(rng, 20, 1.03, noise=0.1)
    result = found(baseline, dcp)
    assert decide_paired(result, 0.01) == "inconclusive"
    more = more_iterations(result, baseline, dcp, 0.01)
    assert more is not None
    assert more > 0


def losses(seed: int = 0, count: int = 40, rounding: float = 1e-9) -> tuple[Values, Values]:
    rng = np.random.default_rng(seed)
    baseline = (9.0 * np.exp(-np.arange(count) / 30) + rng.normal(0, 0.1, count))[None]
    return baseline, baseline * (1 + rounding * rng.normal(size=baseline.shape))


def judged(
    dcp: Values, baseline: Values, *, float32: bool, norms: float = 1.0, difference: float = 1e-7
) -> dict[str, bool]:
    ones = np.ones(baseline.shape)
    segments = np.full(baseline.shape, b"blocks.1")
    sides = Sides(baseline, dcp, ones, norms * ones, difference * ones, segments)
    gates = lockstep_gates(sides, 0.0, 1e-2, float32=float32)
    return {gate.name: gate.passed for gate in gates}


@pytest.mark.parametrize(("float32", "rounding"), [(True, 1e-8), (False, 2e-5)])
def test_rounding_passes_and_a_scale_of_a_thousandth_fails(float32: bool, rounding: float) -> None:
    baseline, dcp = losses(rounding=rounding)
    assert all(judged(dcp, baseline, float32=float32).values())
    result = judged(1.001 * dcp, baseline, float32=float32)
    assert not result["S1"]
    assert not result["S2"]
    assert result["L4"]


def test_a_bias_below_every_single_limit_shows_in_the_mean() -> None:
    baseline, dcp = losses(rounding=2e-5)
    result = judged(1.0002 * dcp, baseline, float32=False)
    assert result["S1"]
    assert not result["S2"]


def test_a_loss_that_has_gone_to_zero_is_held_against_the_mean() -> None:
    baseline = np.concatenate([np.full((1, 10), 8.0), np.full((1, 10), 1e-6)], axis=1)
    dcp = baseline + 1e-6
    assert judged(dcp, baseline, float32=True)["S1"]


def test_wrong_gradients_fail_where_losses_are_equal() -> None:
    baseline, dcp = losses()
    assert not judged(dcp, baseline, float32=True, norms=1.0005)["S3"]
    assert not judged(dcp, baseline, float32=True, norms=1.00005)["S4"]
    assert not judged(dcp, baseline, float32=True, difference=1e-3)["S5"]
    assert judged(dcp, baseline, float32=False, difference=1e-3)["S5"]
    assert not judged(dcp, baseline, float32=False, difference=0.2)["S5"]


def test_the_first_iteration_beyond_a_limit_is_named() -> None:
    baseline, dcp = losses()
    dcp[0, 7] *= 1.01
    ones, difference = np.ones(baseline.shape), np.zeros(baseline.shape)
    difference[0, [5, 9]] = 0.5
    segments = np.full(baseline.shape, b"output", dtype="S16")
    segments[0, 5] = b"blocks.3"
    sides = Sides(baseline, dcp, ones, ones, difference, segments)
    gates = {gate.name: gate for gate in lockstep_gates(sides, 0.0, 0.1, float32=True)}
    assert gates["S1"].where == "first at iteration 8 of launch 1, 1 of 40 beyond"
    assert gates["S5"].where == "first at iteration 6 of launch 1, 2 of 40 beyond, there most in blocks.3"
    assert gates["L4"].passed
    assert gates["L4"].where == gates["S3"].where == ""


def test_records_without_gradients_have_no_gates_on_them() -> None:
    baseline, dcp = losses()
    gates = lockstep_gates(Sides(baseline, dcp), 0.0, 1e-2, float32=True)
    assert [gate.name for gate in gates] == ["S1", "S2", "L4"]
