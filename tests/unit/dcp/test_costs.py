"""The cost model: its terms, what bounds rest on, and the shipped coefficients."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.dcp.bounds import lower_bound
from dcpbench.dcp.costs import (
    H200_1B,
    H200_8B,
    CostModel,
    Link,
    LongKernel,
    expected_squares,
    squares_of,
)
from dcpbench.dcp.schedulers import SCHEDULERS, create
from dcpbench.dcp.simulation import job_times, simulate
from dcpbench.dcp.workload import MINIMAL, Domain

SIMPLE = CostModel("simple", True, 2, 1.0, 0.1, 0.01, 0.03, (4.0, 8.0), 4, Link(0.5, 100.0), Link(2.0, 10.0), 0.25)


def test_one_rank_computes_only() -> None:
    assert SIMPLE.time(1, 10, 200) == pytest.approx(1 + 1 + 2)


@pytest.mark.parametrize(("size", "latency", "bandwidth"), [(2, 0.5, 100.0), (4, 0.5, 100.0), (8, 2.0, 10.0)])
def test_groups_add_merging_and_what_attention_does_not_hide(size: int, latency: float, bandwidth: float) -> None:
    tokens, squares = 80, 400.0
    local, hidden = tokens / size, 0.01 / 2 * squares / size**2
    forward = max(0, latency + 4 * local / bandwidth - 0.25 * hidden)
    backward = max(0, latency + 8 * local / bandwidth - 0.75 * hidden)
    expected = 1 + (8 + 4) / size + (size - 1) * (0.03 * local + 2 * (forward + backward))
    assert SIMPLE.time(size, tokens, squares) == pytest.approx(expected)


def test_much_attention_hides_the_ring() -> None:
    assert SIMPLE.time(2, 8, 1e6) == pytest.approx(1 + (0.8 + 1e4) / 2 + 0.03 * 4)


@given(st.sampled_from([1, 2, 3, 8, 16]), st.lists(st.integers(1, 200_000), min_size=1, max_size=5))
def test_a_sample_never_shortens_a_job_and_arrays_agree(size: int, lengths: list[int]) -> None:
    for cost in (SIMPLE, H200_1B, H200_8B):
        before = cost.job_time(lengths[1:], size)
        assert cost.job_time(lengths, size) >= before
        tokens = np.array([MINIMAL.pad(length, size) for length in lengths])
        squares = np.array([squares_of(length, size) for length in lengths])
        expected = [cost.job_time([length], size) for length in lengths]
        assert cost.times(size, tokens, squares).tolist() == pytest.approx(expected)


def test_a_host_that_is_slower_than_the_device_sets_the_time() -> None:
    slow = replace(SIMPLE, floor=4.5, floor_shared=20.0)
    assert slow.time(1, 10, 200) == 4.5
    assert slow.time(1, 100, 200) == SIMPLE.time(1, 100, 200) > 4.5
    assert slow.time(2, 8, 8) == 20.0
    assert slow.time(2, 8, 1e6) == SIMPLE.time(2, 8, 1e6)
    assert slow.times(1, np.array([10, 100]), np.array([200, 200])).tolist() == [4.5, SIMPLE.time(1, 100, 200)]
    assert slow.times(2, np.array([8]), np.array([8.0])).tolist() == [20.0]


def test_no_hop_hides_where_keys_are_gathered_first() -> None:
    gathered = replace(SIMPLE, overlap=0.0)
    hops = SIMPLE.layers * (2 * 0.5 + 12 * 4 / 100)
    assert gathered.time(2, 8, 1e6) == pytest.approx(1 + (0.8 + 1e4) / 2 + 0.03 * 4 + hops)
    assert gathered.times(2, np.array([8]), np.array([1e6]))[0] == pytest.approx(gathered.time(2, 8, 1e6))


def test_bound_counts_the_host_of_as_many_microbatches_as_the_tokens_fill() -> None:
    slow = replace(H200_1B, floor=10.0, floor_shared=12.0)
    assert lower_bound([100] * 40, 2, 1000, (1, 2), slow) == pytest.approx(20.0)


def test_short_chunks_cost_whole_tiles() -> None:
    assert squares_of(256, 1) == 256**2
    assert squares_of(100, 1) == (100**2 + 128**2) / 2
    assert squares_of(256, 2) == (256**2 + 512**2) / 2


def test_shipped_coefficients_are_marked_as_assumed() -> None:
    assert H200_1B.assumed
    assert H200_8B.assumed
    assert H200_1B.token == pytest.approx(13.8e-6, rel=0.01)
    assert H200_1B.square == pytest.approx(5.7e-10, rel=0.01)
    assert H200_1B.base == pytest.approx(4.2e-3, rel=0.02)
    assert H200_8B.token == pytest.approx(80.9e-6, rel=0.01)
    assert H200_1B.job_time([8192], 1) == pytest.approx(0.156, rel=0.01)
    assert H200_1B.job_time([8192], 8) == pytest.approx(0.025, rel=0.03)
    assert H200_1B.job_time([8192], 16) == pytest.approx(0.040, rel=0.03)


def test_bound_of_one_sample_is_its_fastest_time() -> None:
    times = {k: H200_1B.job_time([100_000], k) for k in (4, 8)}
    assert lower_bound([100_000], 8, 30_000, (1, 2, 4, 8), H200_1B) == min(times.values())


def test_no_placement_of_single_samples_beats_the_bound() -> None:
    lengths, capacity = [700, 650, 400, 90, 30], 800
    best = float("inf")
    for where in product((0, 1), repeat=5):
        loads = [0.0, 0.0]
        for length, rank in zip(lengths, where, strict=True):
            loads[rank] += H200_1B.job_time([length], 1)
        best = min(best, max(loads))
    bound = lower_bound(lengths, 2, capacity, (1, 2), H200_1B)
    assert 0 < bound <= best


TWO = replace(H200_1B, long=LongKernel(3e-10, 700.0, 16e6))


def test_queries_that_see_many_keys_get_the_second_kernel() -> None:
    long = replace(TWO, square=3e-10, long=None)
    one = replace(TWO, long=None)
    assert TWO.job_time([8192], 1) == long.job_time([8192], 1) < one.job_time([8192], 1)
    assert TWO.job_time([5000], 1) == one.job_time([5000], 1)  # too little work
    assert TWO.job_time([1024] * 60, 1) == one.job_time([1024] * 60, 1)  # too few keys a query
    assert TWO.job_time([8192], 4) == one.job_time([8192], 4)  # too little work on each of four ranks
    # Without the real lengths nothing says which kernel it is.
    assert TWO.times(1, np.array([8192]), np.array([8192.0**2]))[0] == one.job_time([8192], 1)
    assert TWO.time(1, 8192, 8192.0**2) == one.job_time([8192], 1)


def test_schedulers_plan_with_the_kernel_of_a_full_microbatch() -> None:
    assert (TWO.planning(4096).square, TWO.planning(4096).long) == (TWO.square, None)
    assert (TWO.planning(8192).square, TWO.planning(8192).long) == (3e-10, None)
    assert H200_1B.planning(8192) is H200_1B


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(64, 30_000), min_size=1, max_size=20),
    st.sampled_from([4096, 16384, 32768]),
    st.sampled_from(sorted(SCHEDULERS)),
    st.booleans(),
)
def test_no_plan_beats_the_bound_with_two_kernels(lengths: list[int], capacity: int, name: str, dear: bool) -> None:
    cost = replace(TWO, square=2e-9) if dear else TWO
    own = [min(length, 2 * capacity) for length in lengths]
    made = create(name, domain=Domain(2, 2), capacity=capacity, cost=cost)
    plan = made.plan(own)
    bound = lower_bound(own, 2, capacity, (1, 2), cost)
    assert bound <= simulate(plan, own, made.padding, cost).makespan * (1 + 1e-9)
    times = job_times(plan, own, MINIMAL, cost)
    expected = [cost.job_time([own[sample] for sample in job.samples], job.size) for job in plan.jobs]
    assert times.tolist() == pytest.approx(expected)


def test_squares_of_sums_are_those_of_samples_on_average() -> None:
    lengths = np.random.default_rng(0).integers(1, 4000, 4000)
    for size in (1, 2):
        exact = sum(squares_of(int(length), size) for length in lengths)
        tokens, real = np.array([lengths.sum()]), np.array([(lengths**2).sum()])
        found = expected_squares(np.array([size]), tokens, real)
        assert found[0] == pytest.approx(exact, rel=0.01)
