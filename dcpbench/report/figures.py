"""The pictures of a report, as SVG to inline in a page and as PNG files beside it.

The same analysis gives the same bytes; `drawing.py` says how they become light and dark.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dcpbench.report import drawing
from dcpbench.report.drawing import INK
from dcpbench.report.packing import Bar, Packing, packing_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dcpbench.analysis.pipeline import Analysis

COLOURS = {"baseline": "#d1750a", "dcp": "#2f81d8"}
"""Orange and blue: told apart by people who see red and green alike, on white and on black."""
_MOST_POINTS = 1500
_PACKING = "packing"
_SIZE = (6.4, 3.4)


def available(analysis: Analysis) -> list[tuple[str, str]]:
    """(name, caption) of the pictures that this analysis has something for."""
    if analysis.aligned is None:
        return []
    missing = {
        "lengths": not analysis.lengths,
        _PACKING: not analysis.slowest,
        "cp_sizes": not all(case.profile and case.profile.cp_sizes for case in analysis.cases.values()),
    }
    return [(name, caption) for name, caption in CAPTIONS.items() if not missing.get(name)]


def svg(analysis: Analysis, name: str) -> str | None:
    """A picture as an `<svg>` element; None where the analysis has nothing for it."""
    if name not in dict(available(analysis)):
        return None
    if name == _PACKING:
        return _packing(analysis, "svg").decode()
    return drawing.svg(partial(_PICTURES[name][1], analysis), name, _SIZE)


def png(name: str) -> Callable[[Analysis], bytes | None]:
    """The writer of a picture's PNG file."""

    def write(analysis: Analysis) -> bytes | None:
        if name not in dict(available(analysis)):
            return None
        if name == _PACKING:
            return _packing(analysis, "png")
        return drawing.png(partial(_PICTURES[name][1], analysis), name, _SIZE)

    return write


def _packing(analysis: Analysis, kind: Literal["png", "svg"]) -> bytes:
    """The slowest iteration of each case, on one axis of time."""
    panels = [
        Packing(
            f"{found.case}: iteration {found.iteration} of {found.launch}, {1e3 * found.seconds:,.1f} ms",
            [Bar(part.first_rank, part.ranks, part.start, part.end, part.ranks) for part in found.microbatches],
        )
        for found in analysis.slowest
    ]
    return packing_figure(panels, analysis.slowest[0].ranks, kind=kind, name=_PACKING)


def _launches(analysis: Analysis, figure: Figure) -> None:
    """Throughput of both launches of each pair, and the speed-up in it with the interval over all."""
    assert analysis.speedup is not None
    left, right = figure.subplots(1, 2)
    unit = "tokens/s" if all(launch.tokens_per_second for launch in analysis.launches) else "iterations/s"
    values: dict[str, dict[int, float]] = {case: {} for case in COLOURS}
    for launch in analysis.launches:
        rate = launch.tokens_per_second if unit == "tokens/s" else 1000.0 / (launch.mean_ms or 1.0)
        values[launch.case][launch.pair] = rate or 0.0
    for pair, rate in values["baseline"].items():
        left.plot([pair, pair], [rate, values["dcp"][pair]], color=INK, linewidth=1, alpha=0.6, zorder=1)
    for case, rates in values.items():
        left.scatter(list(rates), list(rates.values()), color=COLOURS[case], label=case, s=28, zorder=2)
    place = "pair of launches" if analysis.lockstep is None else "lockstep launch"
    left.set(xlabel=place, ylabel=unit)
    left.set_ylim(0, 1.1 * max(rate for rates in values.values() for rate in rates.values()))
    left.legend(loc="lower right", fontsize=9)
    pairs = list(values["baseline"])
    if analysis.interval is not None:
        right.axhspan(analysis.interval.low, analysis.interval.high, color=COLOURS["dcp"], alpha=0.15, linewidth=0)
    right.axhline(analysis.speedup.total, color=COLOURS["dcp"], linewidth=1.2)
    right.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    right.scatter(pairs, list(analysis.speedup.by_pair), color=COLOURS["dcp"], s=28, zorder=2)
    right.set(xlabel=place, ylabel="times as fast as baseline")
    for axes in (left, right):
        axes.set_xticks(pairs if len(pairs) <= 12 else pairs[:: -(-len(pairs) // 12)])
        axes.margins(x=0.15)


def _iterations(analysis: Analysis, figure: Figure) -> None:
    axes = figure.subplots()
    if analysis.warmup:
        axes.axvspan(0.5, analysis.warmup + 0.5, color=INK, alpha=0.15, linewidth=0, label="warm-up")
    _lines(analysis, axes, "seconds", 1000.0)
    axes.set(xlabel="iteration", ylabel="ms, slowest rank")
    assert analysis.aligned is not None
    measured = [analysis.aligned.of_case(case, "seconds") for case in COLOURS]
    longest = max(float(np.nanmax(row[:, analysis.warmup :])) for row in measured if row is not None)
    # The first iterations, which compile and allocate, may take ten times as long: they leave the picture.
    axes.set_ylim(0, min(axes.get_ylim()[1], 1500.0 * longest))
    axes.legend(loc="upper right", fontsize=9, ncols=3)


def _loss(analysis: Analysis, figure: Figure) -> None:
    assert analysis.aligned is not None
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _lines(analysis, upper, "loss", 1.0)
    upper.set_ylabel("loss")
    upper.legend(loc="upper right", fontsize=9)
    both = [analysis.aligned.of_case(case, "loss") for case in COLOURS]
    assert both[0] is not None
    assert both[1] is not None
    for row in both[1] - both[0]:
        at, values = _thinned(row)
        lower.plot(at, values, color=COLOURS["dcp"], linewidth=0.9, alpha=0.7)
    lower.axhline(0.0, color=INK, linewidth=0.8, linestyle=":")
    lower.set(xlabel="iteration", ylabel="dcp - baseline")
    _whole_numbers(lower)
    lower.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3), useMathText=True)


def _lengths(analysis: Analysis, figure: Figure) -> None:
    axes = figure.subplots()
    places = range(len(analysis.lengths))
    heights = [found.speedup for found in analysis.lengths]
    axes.bar(places, heights, color=COLOURS["dcp"], width=0.6)
    for place, found in zip(places, analysis.lengths, strict=True):
        if found.low is not None and found.high is not None:
            axes.plot([place, place], [found.low, found.high], color=INK, linewidth=1.5)
        axes.annotate(f"{found.speedup:.2f}", (place, 0.02), xycoords=("data", "axes fraction"), ha="center", color="w")
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xticks(places, [f"{f.shortest:,} to {f.longest:,}\n{f.share:.0%} of time" for f in analysis.lengths])
    # An interval over few iterations may reach to the sky; the table has it in full.
    axes.set_ylim(
        0, 1.1 * max(min(found.high or 0.0, 1.5 * found.speedup) or found.speedup for found in analysis.lengths)
    )
    axes.set(xlabel="longest sample of the batch (tokens)", ylabel="times as fast as baseline")


def _cp_sizes(analysis: Analysis, figure: Figure) -> None:
    counts = {name: case.profile.cp_sizes if case.profile else None for name, case in analysis.cases.items()}
    axes = figure.subplots()
    sizes = sorted({size for found in counts.values() for size in found or ()})
    for place, (name, found) in enumerate(counts.items()):
        heights = [100 * (found or {}).get(size, 0) / sum((found or {}).values()) for size in sizes]
        at = [index + 0.4 * (place - 0.5) for index in range(len(sizes))]
        axes.bar(at, heights, width=0.38, color=COLOURS[name], label=name)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set(xlabel="CP size", ylabel="% of the case's microbatches")
    axes.legend(loc="best", fontsize=9)


def _lines(analysis: Analysis, axes: Axes, column: str, scale: float) -> None:
    assert analysis.aligned is not None
    for case, colour in COLOURS.items():
        rows = analysis.aligned.of_case(case, column)
        for number, row in enumerate(() if rows is None else rows):
            at, values = _thinned(row * scale)
            label = case if number == 0 else None
            axes.plot(at, values, color=colour, linewidth=1.0, alpha=0.75, label=label)
    axes.margins(x=0.01)
    _whole_numbers(axes)


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _thinned(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Iteration numbers and values to draw; of very long launches means of neighbours, as no eye sees more."""
    step = -(-values.size // _MOST_POINTS)
    starts = np.arange(0, values.size, step)
    sizes = np.diff(np.append(starts, values.size))
    return starts + (sizes + 1) / 2, np.add.reduceat(values, starts) / sizes


_PICTURES: dict[str, tuple[str, Callable[[Analysis, Figure], None]]] = {
    "launches": ("Launches: throughput in each pair, and the speed-up with its 95 % interval", _launches),
    "iterations": ("Iteration times of every launch", _iterations),
    "loss": ("Loss of every launch, and the difference within each pair", _loss),
    "lengths": ("Speed-up by the longest sample of the batch", _lengths),
    "cp_sizes": ("Microbatches by CP size", _cp_sizes),
}
CAPTIONS = {
    **{name: caption for name, (caption, _) in _PICTURES.items()},
    _PACKING: "Packing of each case's slowest iteration; lengths of microbatches within it are shares of model FLOPs",
}
"""Picture -> what it shows."""
