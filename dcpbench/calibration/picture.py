"""The picture of a calibration: predicted against measured times, and the errors of what was held out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.calibration.fit import Sample, relative_errors, timed_apart
from dcpbench.dcp.cost_profiles import CostProfile
from dcpbench.report import drawing
from dcpbench.report.drawing import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#2f81d8", "#d1750a", "#3a9b5c", "#8a3fa0", "#c93a4b", "#19a5b8")
_SIZE = (8.4, 3.8)


def png(profile: CostProfile, samples: Sequence[Sample]) -> bytes:
    """The picture as a PNG file; the same profile and samples give the same bytes."""
    return drawing.png(partial(_draw, profile, tuple(samples)), "calibration", _SIZE)


def _draw(profile: CostProfile, samples: Sequence[Sample], figure: Figure) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415 - loaded for pictures only

    times, errors = figure.subplots(1, 2)
    measured = np.array([sample.seconds for sample in samples]) * 1e3
    off = relative_errors(samples, timed_apart(profile))
    predicted = measured * (1 + off)
    held = np.array([sample.held_out for sample in samples])
    sizes = np.array([sample.size for sample in samples])
    for number, size in enumerate(sorted(set(sizes.tolist()))):
        colour = _COLOURS[number % len(_COLOURS)]
        for marker, kept, name in (("o", ~held, f"CP {size}"), ("D", held, f"CP {size}, held out")):
            own = kept & (sizes == size)
            if own.any():
                face = colour if marker == "D" else "none"
                style = {"s": 22, "marker": marker, "edgecolors": colour, "facecolors": face, "linewidths": 1.2}
                times.scatter(measured[own], predicted[own], label=name, **style)
                errors.scatter(measured[own], 100 * off[own], **style)
    ends = [0.8 * measured.min(), 1.25 * measured.max()]
    times.plot(ends, ends, color=INK, linewidth=0.8)
    times.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured (ms)", ylabel="predicted (ms)")
    times.set_title("Microbatches, forward and backward")
    times.legend(fontsize="small", frameon=False)
    errors.axhline(0, color=INK, linewidth=0.8)
    errors.set(xscale="log", xlim=ends, xlabel="measured (ms)", ylabel="predicted - measured (%)")
    for axis in (times.xaxis, times.yaxis, errors.xaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    quality = profile.fit
    if quality is not None:
        errors.set_title(f"Held out: {quality.mape:.1%} on average, 95 % within {quality.p95:.1%}")
