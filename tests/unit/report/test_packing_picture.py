"""The packing picture: what is painted where, at any number of ranks."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.report.packing import Bar, Packing, packing_figure, paint

RED_BLUE = {1: "#ff0000", 4: "#0000ff"}
SHORT = [Bar(0, 2, 0.0, 0.5, 2), Bar(0, 1, 0.5, 1.0, 1), Bar(1, 1, 0.5, 0.75, 1)]


def test_each_rank_and_moment_has_the_colour_of_its_group() -> None:
    picture = paint([Bar(0, 4, 0.0, 0.5, 4), Bar(4, 1, 0.0, 1.0, 1)], 5, RED_BLUE, 1.0)
    rows, columns, _ = picture.shape
    assert rows == 5
    early, late = columns // 4, 3 * columns // 4
    assert picture[:4, early].tolist() == [[0, 0, 255, 255]] * 4
    assert picture[4, late].tolist() == [255, 0, 0, 255]
    assert (picture[:4, late, 3] == 0).all()  # idle shows the page through


def test_of_thousands_of_ranks_the_opacity_is_the_busy_share() -> None:
    ranks = 4096
    bars = [Bar(rank, 1, 0.0, 1.0 if rank % 4 else 0.5, 1) for rank in range(ranks)]
    picture = paint(bars, ranks, {1: "#ff0000"}, 1.0)
    columns = picture.shape[1]
    assert picture.shape[0] < ranks
    assert (picture[:, columns // 4, 3] == 255).all()
    assert np.mean(picture[:, 3 * columns // 4, 3]) / 255 == pytest.approx(0.75, abs=0.01)


def test_the_ends_of_microbatches_of_one_size_are_marked() -> None:
    picture = paint([Bar(0, 1, 0.0, 0.5, 1), Bar(0, 1, 0.5, 1.0, 1)], 1, RED_BLUE, 1.0)
    white = np.flatnonzero((picture[0, :, :3] == 255).all(axis=1))
    assert white.tolist() == [picture.shape[1] // 2 - 1, picture.shape[1] - 1]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5000), st.data())
def test_painting_covers_just_the_busy_area(ranks: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, ranks - 1))
    count = data.draw(st.integers(1, ranks - first))
    picture = paint([Bar(first, count, 0.0, 1.0, 4)], ranks, RED_BLUE, 1.0)
    rows = picture.shape[0]
    heights = np.diff(np.arange(rows + 1) * ranks // rows)
    busy = (picture[:, 0, 3] / 255.0 * heights).sum()
    assert busy == pytest.approx(count, abs=2 * heights.max() / 255 + rows * 1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 512, 4096])
def test_pictures_of_any_size_come_out_small_and_the_same_twice(ranks: int) -> None:
    bars = [Bar(rank, 1, part / 4, (part + 1) / 4, 1 << part) for rank in range(ranks) for part in range(4)]
    panels = [Packing("one", bars, bound=0.9), Packing("two", bars[: len(bars) // 2])]
    svg = packing_figure(panels, ranks)
    assert svg.startswith(b"<svg")
    assert len(svg) < 1_000_000
    assert svg == packing_figure(panels, ranks)
    assert packing_figure(panels, ranks, kind="png").startswith(b"\x89PNG")


def test_the_svg_names_the_panels_and_the_sizes_and_takes_the_colours_of_the_page() -> None:
    svg = packing_figure([Packing("laminar & more", SHORT, bound=0.9)], 2).decode()
    texts = set(re.findall(r">([^<>]+)</text>", svg))
    assert {"laminar &amp; more", "CP 1", "CP 2", "idle", "lower bound", "rank"} <= texts
    assert "milliseconds from the start of the iteration" in texts
    assert "currentColor" in svg
    assert not re.search(r'(href|src)="(?!#|data:)', svg)  # nothing is fetched


def test_many_sizes_share_a_short_legend_with_both_ends() -> None:
    bars = [Bar(0, 1, size, size + 1, size) for size in range(1, 40)]
    svg = packing_figure([Packing("many", bars)], 1).decode()
    shown = {int(size) for size in re.findall(r">CP (\d+)</text>", svg)}
    assert {1, 39} <= shown
    assert len(shown) <= 8


@pytest.mark.parametrize(
    ("panels", "words"),
    [
        ([], "at least one panel"),
        ([Packing("a", [Bar(1, 2, 0.0, 1.0, 2)])], "2 ranks from 1 of 2"),
        ([Packing("a", [Bar(0, 1, 1.0, 0.5, 1)])], "1.0 to 0.5"),
        ([Packing("a", [Bar(0, 1, 0.0, float("inf"), 1)])], "inf"),
        ([Packing("a", [Bar(0, 1, float("nan"), 1.0, 1)])], "nan"),
    ],
)
def test_what_cannot_be_drawn_is_refused(panels: list[Packing], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        packing_figure(panels, 2)


def test_nothing_to_show_is_drawn_as_nothing() -> None:
    assert b"<svg" in packing_figure([Packing("empty", [])], 2)
