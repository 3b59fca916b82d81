"""The packing picture: what every rank does when, coloured by CP size.

Few ranks are drawn as shapes. Of thousands of ranks no screen shows each, so the picture is painted on a grid as
fine as the plan, then neighbouring ranks are averaged: a stretch in which half of them idle comes out half as dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcpbench.report import drawing
from dcpbench.report.drawing import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PALETTE = ("#2c6fbb", "#19a5b8", "#55b96a", "#d9b310", "#e8772e", "#c93a4b", "#8a3fa0")
"""From single ranks to the largest groups; readable on white and on black."""
_IDLE_ALPHA = 0.16
_MOST_SHAPES = 1500
_MOST_ROWS = 320
"""Rows of a painted picture: about as many as its panel has pixels on a screen."""
_COLUMNS = 900
"""Fewer than the pixels of a panel, so that no column is lost when it is scaled."""
_EDGED = 8
"""Columns of a bar from which on its end is marked, so that microbatches of the same size are told apart."""
_MOST_LABELS = 8
_WIDTH = 6.4
_DOTS: Any = (0, (1.5, 1.5))


class Bar(NamedTuple):
    """One microbatch of a group, or one rank's part of it: ranks [first_rank, first_rank + ranks) are busy.

    `start` and `end` are seconds from the start of the iteration; `cp_size` decides the colour, and is `ranks` where
    a bar covers a whole group.
    """

    first_rank: int
    ranks: int
    start: float
    end: float
    cp_size: int


@dataclass(frozen=True)
class Packing:
    """One panel of the picture. Time in which no bar covers a rank is shown as idle, up to the last bar's end."""

    title: str
    bars: Sequence[Bar]
    bound: float | None = None
    """Seconds; drawn as a dotted line: no schedule can end earlier."""

    @property
    def end(self) -> float:
        """When the last bar ends, in seconds."""
        return max((bar.end for bar in self.bars), default=0.0)


def packing_figure(
    panels: Sequence[Packing], ranks: int, *, kind: Literal["png", "svg"] = "svg", name: str = "packing"
) -> bytes:
    """Ranks x time, one panel below the other on one time axis; colour by CP size, the same in all panels.

    Legible from 1 to many thousands of ranks: bars are drawn one by one while there are few, and painted and
    averaged over neighbouring ranks beyond that. Ranks run from the top down.

    Args:
        panels: what to draw, such as one plan of each scheduler, or an iteration of each case.
        ranks: how many ranks the axis shows.
        kind: `png` on white; `svg` an element to inline in a page, whose lines and text take the page's colour.
            It may hold pixels as a `data:` address, which the page's content security policy must allow for images.
        name: must be its own among the SVG pictures of a page; it goes into their ids.

    Returns:
        The PNG file, or the `<svg>` element in UTF-8. The same input gives the same bytes.

    Raises:
        ValueError: no panel, a rank that is not among `ranks`, or a time that is negative or not finite.
    """
    _check(panels, ranks)
    size = (_WIDTH, 0.75 + len(panels) * _panel_height(ranks))

    def draw(figure: Figure) -> None:
        _draw(figure, panels, ranks)

    if kind == "svg":
        return drawing.svg(draw, name, size).encode()
    return drawing.png(draw, name, size)


def _check(panels: Sequence[Packing], ranks: int) -> None:
    if not panels:
        raise ValueError("a packing picture needs at least one panel")
    for panel in panels:
        for bar in panel.bars:
            if bar.ranks < 1 or bar.first_rank < 0 or bar.first_rank + bar.ranks > ranks:
                raise ValueError(f"{panel.title}: a bar covers {bar.ranks} ranks from {bar.first_rank} of {ranks}")
            if not 0 <= bar.start <= bar.end < float("inf"):
                raise ValueError(f"{panel.title}: a bar lasts from {bar.start} to {bar.end} seconds")


def _panel_height(ranks: int) -> float:
    """Inches: enough for every rank while that is possible."""
    return min(0.55 + 0.13 * max(ranks, 3), 2.1)


def _draw(figure: Figure, panels: Sequence[Packing], ranks: int) -> None:
    sizes = sorted({bar.cp_size for panel in panels for bar in panel.bars})
    colours = dict(zip(sizes, _colours(len(sizes)), strict=True))
    end = max(panel.end for panel in panels)
    unit, scale = _unit(end)
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        axes.set_title(panel.title, loc="left")
        axes.axvspan(0, panel.end * scale, color=INK, alpha=_IDLE_ALPHA, linewidth=0, zorder=0)
        if len(panel.bars) <= _MOST_SHAPES and ranks <= _MOST_ROWS:
            _shapes(axes, panel, colours, scale)
        else:
            _painted(axes, panel, ranks, colours, end, scale)
        if panel.bound is not None:
            # Two colours, so that it is seen on every bar and on both pages.
            axes.axvline(panel.bound * scale, color="white", linewidth=1.2)
            axes.axvline(panel.bound * scale, color="black", linewidth=1.2, linestyle=_DOTS)
        axes.set(ylabel="rank", ylim=(ranks - 0.5, -0.5), xlim=(0, (end or 1.0) * scale * 1.005))
        _rank_ticks(axes, ranks)
    all_axes[-1].set_xlabel(f"{unit} from the start of the iteration")
    _legend(figure, colours, any(panel.bound is not None for panel in panels))


def _colours(count: int) -> list[str]:
    """As many colours as sizes, spread over the palette."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex  # noqa: PLC0415 - loaded for pictures only

    scale = LinearSegmentedColormap.from_list("cp", _PALETTE)
    last = max(count - 1, len(_PALETTE) - 1)
    return [to_hex(scale(place / last)) for place in range(count)]


def _unit(end: float) -> tuple[str, float]:
    return ("seconds", 1.0) if end >= 10 else ("milliseconds", 1e3)


def _shapes(axes: Axes, panel: Packing, colours: dict[int, str], scale: float) -> None:
    from matplotlib.collections import PolyCollection  # noqa: PLC0415

    corners = [
        [
            (bar.start * scale, bar.first_rank - 0.5),
            (bar.end * scale, bar.first_rank - 0.5),
            (bar.end * scale, bar.first_rank + bar.ranks - 0.5),
            (bar.start * scale, bar.first_rank + bar.ranks - 0.5),
        ]
        for bar in panel.bars
    ]
    faces = [colours[bar.cp_size] for bar in panel.bars]
    width = 0.6 if len(panel.bars) <= 300 else 0.25
    axes.add_collection(PolyCollection(corners, facecolors=faces, edgecolors="white", linewidths=width, zorder=1))


def _painted(axes: Axes, panel: Packing, ranks: int, colours: dict[int, str], end: float, scale: float) -> None:
    picture = paint(panel.bars, ranks, colours, end)
    extent = (0.0, end * scale, ranks - 0.5, -0.5)
    axes.imshow(picture, extent=extent, aspect="auto", interpolation="nearest", zorder=1)


def paint(bars: Sequence[Bar], ranks: int, colours: dict[int, str], end: float) -> NDArray[Any]:
    """(rows, columns, 4) uint8: colour and, as opacity, the share of time and ranks that are busy.

    `rows` divides the ranks as evenly as possible into at most 320; columns divide [0, end] into 900.
    """
    from matplotlib.colors import to_rgb  # noqa: PLC0415

    table = np.array([(0.0, 0.0, 0.0), *(to_rgb(colour) for colour in colours.values()), (1.0, 1.0, 1.0)])
    number = {size: place for place, size in enumerate(colours, start=1)}
    edge = len(table) - 1
    grid = np.zeros((ranks, _COLUMNS), np.uint8)
    per_second = _COLUMNS / end if end else 0.0
    for first, count, start, stop, size in bars:
        left, right = round(start * per_second), round(stop * per_second)
        own = grid[first : first + count, left : max(right, left + 1)]
        own[:] = number[size]
        if own.shape[1] >= _EDGED:
            own[:, -1] = edge
    rows = min(ranks, _MOST_ROWS)
    edges = np.arange(rows + 1) * ranks // rows
    # How many ranks of each row have each colour, then the mean of the colours of those that are busy.
    heights = np.diff(edges)[:, None]
    busy = np.add.reduceat(grid > 0, edges[:-1], axis=0, dtype=np.int32)
    picture = np.zeros((rows, _COLUMNS, 4), np.uint8)
    for channel in range(3):
        values = (table[:, channel] * 255).astype(np.uint8)[grid]
        total = np.add.reduceat(values, edges[:-1], axis=0, dtype=np.int32)
        picture[..., channel] = total / np.maximum(busy, 1)
    picture[..., 3] = 255 * busy / heights
    return picture


def _rank_ticks(axes: Axes, ranks: int) -> None:
    if ranks <= 8:
        axes.set_yticks(range(ranks))
        return
    step = 1
    while ranks / step > 8:
        step *= 2
    axes.set_yticks([*range(0, ranks, step)], [f"{rank:,}" for rank in range(0, ranks, step)])


def _legend(figure: Figure, colours: dict[int, str], bound: bool) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    sizes = list(colours)
    if len(sizes) > _MOST_LABELS:  # the ends, and sizes spread between them
        chosen = np.unique(np.linspace(0, len(sizes) - 1, _MOST_LABELS).round().astype(int))
        sizes = [sizes[place] for place in chosen]
    handles: list[Any] = [Patch(color=colours[size], label=f"CP {size:,}") for size in sizes]
    handles.append(Patch(color=INK, alpha=_IDLE_ALPHA, linewidth=0, label="idle"))
    if bound:
        handles.append(Line2D([], [], color=INK, linewidth=1.2, linestyle=_DOTS, label="lower bound"))
    columns = -(-len(handles) // (1 if len(handles) <= 7 else 2))
    # A legend fills columns first; two rows are to be read row by row.
    handles = [handles[place] for column in range(columns) for place in range(column, len(handles), columns)]
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=columns,
        fontsize=9,
        handlelength=1.1,
        columnspacing=1.0,
        handletextpad=0.5,
        borderpad=0,
    )
