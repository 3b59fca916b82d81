"""The fit on synthetic timings of known coefficients: it finds them again, judges itself, and refuses what is poor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.calibration import command, fit, points
from dcpbench.calibration.fit import Sample
from dcpbench.dcp.cost_profiles import CostProfile, Fit, coefficients_of
from dcpbench.dcp.costs import H200_1B, CostModel, Link, LongKernel, squares_of
from dcpbench.dcp.iterations import PlannedIteration, iteration_times
from dcpbench.dcp.kernel_choice import starting_from
from dcpbench.dcp.schedulers import create
from dcpbench.dcp.workload import MINIMAL, Domain

HOST_BOUND = replace(
    H200_1B, merge=0.0, floor=0.026, floor_shared=0.034, overlap=0.0, within=Link(20e-6, 80e9), assumed=False
)


def lengths(seed: int = 1, scale: int = 1) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(1024) - 1.5**2 / 2, 1.5, 640)
    return [int(length) * scale for length in np.clip(drawn, 128, 8192)]


def timed(
    truth: CostModel, sizes: tuple[int, ...] = (1, 2), capacity: int = 4096, noise: float = 0.0, scale: int = 1
) -> list[Sample]:
    random = np.random.default_rng(3)
    samples = []
    for point in points.choose(lengths(scale=scale), sizes, capacity, MINIMAL):
        tokens = sum(MINIMAL.pad(length, point.size) for length in point.lengths)
        squares = sum(squares_of(length, point.size) for length in point.lengths)
        real = float(sum(length**2 for length in point.lengths))
        seconds = truth.time(point.size, tokens, squares, real) * float(np.exp(random.normal(0, noise)))
        samples.append(Sample(point.size, tokens, squares, seconds, point.kind, point.held_out, real))
    return samples


@pytest.mark.parametrize(("sizes", "capacity", "scale"), [((1, 2), 4096, 1), ((1, 2, 4, 8), 8192, 4), ((1,), 4096, 1)])
@pytest.mark.parametrize("floors", [(0.0, 0.0), (0.026, 0.034)])
def test_coefficients_are_found_again(
    sizes: tuple[int, ...], capacity: int, scale: int, floors: tuple[float, float]
) -> None:
    truth = replace(HOST_BOUND, floor=floors[0], floor_shared=floors[1])
    found = fit.fit(timed(truth, sizes, capacity, scale=scale), H200_1B)
    assert found.token == pytest.approx(truth.token, rel=0.02)
    assert found.square == pytest.approx(truth.square, rel=0.04)
    assert found.base == pytest.approx(truth.base, rel=0.15)
    assert found.floor == pytest.approx(truth.floor, rel=0.01, abs=1e-4)
    assert not found.assumed
    if len(sizes) > 1:
        assert found.overlap == 0.0
        assert found.within.bandwidth == pytest.approx(truth.within.bandwidth, rel=0.1)
        assert found.floor_shared == pytest.approx(truth.floor_shared, rel=0.01, abs=1e-4)
    else:
        assert (found.within, found.merge, found.overlap) == (H200_1B.within, H200_1B.merge, H200_1B.overlap)
    judged = fit.judge(timed(truth, sizes, capacity, scale=scale), found)
    assert judged.refused is None
    assert judged.mape < 0.005


def test_noise_of_a_percent_leaves_errors_of_about_a_percent() -> None:
    samples = timed(HOST_BOUND, noise=0.01)
    found = fit.judge(samples, fit.fit(samples, H200_1B))
    assert 0.001 < found.mape < 0.02
    assert found.refused is None
    assert found.held_out == sum(sample.held_out for sample in samples) > 4
    assert found.points + found.held_out == len(samples)
    assert found.most_tokens == 4096


def test_the_hold_out_takes_no_part_in_the_fit() -> None:
    samples = timed(HOST_BOUND)
    wrong = [replace(sample, seconds=2 * sample.seconds) if sample.held_out else sample for sample in samples]
    assert fit.fit(wrong, H200_1B) == fit.fit(samples, H200_1B)


def test_a_poor_fit_is_refused_with_the_errors_and_the_term_that_is_worst() -> None:
    samples = [
        replace(sample, seconds=1.5 * sample.seconds) if sample.held_out and sample.size == 2 else sample
        for sample in timed(HOST_BOUND)
    ]
    found = fit.judge(samples, fit.fit(samples, H200_1B))
    assert found.refused is not None
    assert found.refused.startswith("its fit is poor: microbatches held out are missed by 1")
    assert "(limit 5%)" in found.refused
    assert "(limit 10%)" in found.refused
    assert "samples as the data have them on CP size 2 (" in found.refused


def test_a_microbatch_that_takes_little_is_judged_by_what_it_does_to_an_iteration() -> None:
    samples = timed(HOST_BOUND)
    held = [sample for sample in samples if sample.held_out]
    least = min(held, key=lambda sample: sample.seconds)
    off = [replace(one, seconds=0.8 * one.seconds) if one is least else one for one in samples]
    found = fit.judge(off, HOST_BOUND)
    mean = sum(sample.seconds for sample in off if sample.held_out) / len(held)
    assert found.mape == pytest.approx(0.2 * least.seconds / mean / len(held))


def test_one_disturbed_microbatch_does_not_bend_the_fit() -> None:
    samples = timed(HOST_BOUND)
    index = next(i for i, sample in enumerate(samples) if not sample.held_out and sample.seconds > 0.05)
    samples[index] = replace(samples[index], seconds=3 * samples[index].seconds)
    assert fit.fit(samples, H200_1B).token == pytest.approx(HOST_BOUND.token, rel=0.03)


def test_where_all_stand_on_the_floor_tokens_keep_the_rate_that_was_assumed() -> None:
    truth = replace(HOST_BOUND, floor=0.2, floor_shared=0.2)
    found = fit.fit(timed(truth, (1,), 2048), H200_1B)
    assert found.floor == pytest.approx(0.2, rel=1e-6)
    assert found.token > 0


@pytest.mark.parametrize("seed", range(5))
def test_times_of_the_host_that_only_vary_by_chance_do_not_make_tokens_free(seed: int) -> None:
    """A model so small that its GPU always waits: times are flat, and noise may even have them fall with tokens."""
    random = np.random.default_rng(seed)
    tiny = replace(HOST_BOUND, floor=0.0, floor_shared=0.0, base=0.0005, token=1e-6, square=1e-11)
    flat = [
        replace(one, seconds=float(0.0073 * one.size**0.2 * np.exp(random.normal(-4e-6 * one.tokens, 0.03))))
        for one in timed(tiny)
    ]
    found = fit.fit(flat, tiny)
    assert 0.1 * tiny.token < found.token < 10 * tiny.token
    assert found.floor == pytest.approx(0.0073, rel=0.05)
    assert fit.judge(flat, found).refused is None


def test_too_few_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match="at least four microbatches on one rank"):
        fit.fit([Sample(1, 128, 1e4, 0.1)] * 3, H200_1B)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(1e-4, 10), min_size=8, max_size=24), st.integers(0, 2**31))
def test_any_times_give_coefficients_that_are_not_negative(times: list[float], seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = [1] * 6 + random.integers(1, 4, len(times) - 6).tolist()
    tokens = random.integers(16, 9000, len(times)).tolist()
    samples = [Sample(size, n, n**1.5, seconds) for seconds, size, n in zip(times, sizes, tokens, strict=True)]
    found = fit.fit(samples, H200_1B)
    assert found.token > 0
    assert found.within.bandwidth > 0
    assert min(found.base, found.square, found.floor, found.floor_shared, found.within.latency) >= 0
    assert np.isfinite(fit.relative_errors(samples, found)).all()


TWO_KERNELS = replace(
    H200_1B, merge=0.0, overlap=0.0, square=9e-10, long=LongKernel(5e-10, 700.0, 16e6), within=Link(12e-6, 280e9)
)


@pytest.mark.parametrize(("capacity", "scale"), [(4096, 1), (16384, 4)])
def test_both_attention_kernels_are_found_again(capacity: int, scale: int) -> None:
    samples = timed(TWO_KERNELS, capacity=capacity, scale=scale)
    found = fit.fit(samples, starting_from(H200_1B, "symmetric/flash+cudnn"))
    assert found.long is not None
    assert (found.long.keys, found.long.work) == (700.0, 16e6)
    assert found.square == pytest.approx(9e-10, rel=0.05)
    assert found.long.square == pytest.approx(5e-10, rel=0.05)
    judged = fit.judge(samples, found)
    assert judged.mape < 0.005
    assert judged.sizes == (1, 2)
    one = fit.judge(samples, fit.fit(samples, H200_1B))
    assert one.fitted_mape > judged.fitted_mape + 0.005


def test_a_backend_of_one_kernel_is_fitted_with_one() -> None:
    assert starting_from(TWO_KERNELS, "collective/sdpa").long is None
    assert starting_from(TWO_KERNELS, "symmetric/flash+cudnn") == TWO_KERNELS


def executed(capacity: int = 4096) -> list[PlannedIteration]:
    random = np.random.default_rng(2)
    made = create("default_dynamic_cp", domain=Domain(2, 2), capacity=capacity)
    batches = [np.clip(random.lognormal(6.2, 1.4, 32), 128, 8192).astype(int).tolist() for _ in range(12)]
    return [PlannedIteration.of(made.plan(lengths), lengths, made.padding) for lengths in batches]


def profile(cost: CostModel) -> CostProfile:
    good = Fit(points=9, held_out=3, mape=0.02, p95=0.05, fitted_mape=0.01)
    return CostProfile(name="x", kind="measured", coefficients=coefficients_of(cost), fit=good)


def test_iterations_show_their_pace_and_what_they_take_beside_microbatches() -> None:
    slower = iteration_times(executed(), fit.paced(TWO_KERNELS, 1.06)) + 0.02
    found = command.with_iterations(profile(TWO_KERNELS), executed(), slower)
    assert found.refused is None
    assert found.iteration is not None
    assert found.iteration.pace == pytest.approx(1.06, abs=0.01)
    assert found.iteration_seconds == pytest.approx(0.02, rel=0.1)
    assert found.iteration.mape is not None
    assert found.iteration.mape < 0.003
    assert found.cost.token == pytest.approx(1.06 * TWO_KERNELS.token, rel=0.01)
    assert fit.timed_apart(found).token == pytest.approx(TWO_KERNELS.token)


def test_iterations_that_microbatches_do_not_tell_of_refuse_the_profile() -> None:
    noise = np.exp(np.random.default_rng(1).normal(0, 0.2, 12))
    found = command.with_iterations(profile(TWO_KERNELS), executed(), iteration_times(executed(), TWO_KERNELS) * noise)
    assert found.refused is not None
    assert found.refused.startswith("its fit is poor: whole iterations held out one at a time are missed by")
