import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.data.tokens import Counting, TokenSource, Zipf


def test_counting_is_one_two_three_and_an_end_mark() -> None:
    assert Counting(512).read(7, 6, 0, 6).tolist() == [1, 2, 3, 4, 5, 0]


def test_counting_wraps_below_the_vocabulary() -> None:
    assert Counting(4).read(0, 9, 0, 9).tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 0]


def test_zipf_is_pinned() -> None:
    """A change here means that seeds no longer give the same data as in published manifests."""
    assert Zipf(1000, seed=0).read(3, 8, 0, 8).tolist() == [20, 22, 36, 49, 1, 1, 1, 0]


def test_zipf_differs_by_sample_and_seed() -> None:
    first = Zipf(1000, seed=0).read(0, 50, 0, 50).tolist()
    assert first != Zipf(1000, seed=0).read(1, 50, 0, 50).tolist()
    assert first != Zipf(1000, seed=1).read(0, 50, 0, 50).tolist()


def test_zipf_frequencies_fall_as_one_over_id() -> None:
    size = 400_000
    ids = Zipf(101, seed=0).read(0, size, 0, size)[:-1]
    harmonic = (1 / np.arange(1, 101)).sum()
    share = np.bincount(ids, minlength=101)[1:] / ids.size
    assert share == pytest.approx(1 / np.arange(1, 101) / harmonic, abs=3e-3)
    assert ids.min() == 1
    assert ids.max() == 100


@pytest.mark.parametrize("source", [Counting(37), Zipf(37, seed=5), Zipf(2, seed=0), Counting(2)])
@given(data=st.data())
def test_a_stretch_is_the_same_however_it_is_read(source: TokenSource, data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 60))
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    index = data.draw(st.integers(0, 10**9))
    whole = source.read(index, length, 0, length)
    assert source.read(index, length, start, stop).tolist() == whole[start:stop].tolist()
    assert whole[-1] == 0
    assert whole[:-1].min() >= 1
    assert whole.max() < 37
