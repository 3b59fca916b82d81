"""Which microbatches are timed: within capacity, of all kinds, the same for the same input."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.calibration.points import MIXED, choose
from dcpbench.dcp.kernel_choice import LONG_WORK
from dcpbench.dcp.workload import MINIMAL, PaddingRule

LENGTHS = st.lists(st.integers(2, 4000), min_size=1, max_size=40)


@settings(deadline=None)
@given(LENGTHS, st.sampled_from([(1,), (1, 2), (1, 2, 4), (1, 3)]), st.integers(16, 5000), st.sampled_from([None, 8]))
def test_every_point_fits_its_group(
    lengths: list[int], sizes: tuple[int, ...], capacity: int, fixed: int | None
) -> None:
    padding = MINIMAL if fixed is None else PaddingRule(fixed=fixed * sizes[-1])
    if capacity * sizes[0] < padding.multiple(sizes[-1]):
        return
    found = choose(lengths, sizes, capacity, padding)
    for point in found:
        assert point.size in sizes
        assert min(point.lengths) >= 1
        assert sum(padding.pad(length, point.size) for length in point.lengths) <= point.size * capacity
    assert found == choose(lengths, sizes, capacity, padding)
    assert len(set(found)) == len(found)


def test_a_usual_domain_gets_every_kind_and_a_hold_out_for_each_size() -> None:
    found = choose([200, 900, 3000, 8000, 130, 500] * 20, (1, 2), 4096, MINIMAL)
    assert {(point.kind, point.size) for point in found} == {
        ("linear", 1), ("attention", 1), ("mixed", 1), ("shared", 2), ("mixed", 2),
    }  # fmt: skip
    assert {point.size for point in found if point.held_out} == {1, 2}
    assert all(point.kind == "mixed" for point in found if point.held_out)
    tokens = [sum(point.lengths) for point in found if point.kind == "linear"]
    assert min(tokens) == 256
    assert max(tokens) == 4096
    assert max(max(point.lengths) for point in found if point.size == 2) == 8000
    assert len(found) < 45


def test_mixed_microbatches_are_those_of_plans_half_of_them_held_out() -> None:
    jobs = [(1, (100 * n,)) for n in range(1, 41)] + [(2, (5000,)), (2, (5000,)), (2, (6000, 300))]
    found = choose([200, 900, 3000, 6000, 130, 500] * 20, (1, 2), 4096, MINIMAL, jobs)
    mixed = [point for point in found if point.kind == "mixed"]
    alone = sorted(point.lengths for point in mixed if point.size == 1)
    assert len(alone) == 2 * MIXED
    assert {(1, lengths) for lengths in alone} <= set(jobs)
    assert (alone[0], alone[-1]) == ((100,), (4000,))
    shared = [point.lengths for point in mixed if point.size == 2]
    assert {(5000,), (6000, 300)} <= set(shared)
    assert 2 < len(shared) <= 2 * MIXED  # the rest is drawn from the data
    assert sum(point.held_out for point in mixed if point.size == 1) == MIXED
    assert {point.held_out for point in mixed if point.size == 2} == {True, False}
    assert len({(point.size, point.lengths) for point in found}) == len(found)


def test_each_attention_kernel_is_timed_where_it_matters() -> None:
    found = choose([200, 900, 3000, 60000, 16000] * 20, (1, 2), 32768, MINIMAL)
    alone = [point.lengths for point in found if point.size == 1 and point.kind == "attention"]
    work = [sum(length * length for length in lengths) / 2 for lengths in alone]
    assert any(0.9 * LONG_WORK < each < LONG_WORK for each in work)
    assert any(each > LONG_WORK for each in work)
