"""Which microbatches are timed: within capacity, of all kinds, the same for the same input."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.calibration.points import choose
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
