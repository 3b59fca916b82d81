"""Speed-up by the longest sequence of the batch: where dynamic context parallelism gains, and where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcpbench.stats.interval import Interval, interval

BINS = 4


@dataclass(frozen=True)
class LengthBin:
    """The measured iterations whose longest sample has `shortest` to `longest` tokens."""

    shortest: int
    longest: int
    iterations: int
    speedup: float
    low: float | None
    """Lower end of the 95 % interval over pairs, in lockstep over iterations; None with too few of them."""
    high: float | None
    share: float
    """Of the baseline's measured time."""


def by_longest(
    baseline: NDArray[np.float64],
    dcp: NDArray[np.float64],
    longest: NDArray[Any],
    ends_of: Callable[[NDArray[np.bool_]], Interval | None] | None = None,
) -> tuple[LengthBin, ...]:
    """Bins at the quartiles of `longest`, shape (iterations,); times have shape (pairs, iterations).

    `ends_of` gives the interval of the iterations that it is told; default: that over pairs.

    Equal lengths share a bin, so there may be fewer than `BINS`.
    """
    edges = np.unique(np.quantile(longest, np.arange(1, BINS) / BINS, method="lower"))
    places = np.searchsorted(edges, longest, side="left")
    found = []
    for place in np.unique(places):
        inside = places == place
        logs = np.log(baseline[:, inside].sum(axis=1) / dcp[:, inside].sum(axis=1))
        ends = interval(logs) if ends_of is None else ends_of(inside)
        found.append(
            LengthBin(
                shortest=int(longest[inside].min()),
                longest=int(longest[inside].max()),
                iterations=int(inside.sum()),
                speedup=float(np.exp(logs.mean())),
                low=ends.low if ends else None,
                high=ends.high if ends else None,
                share=float(baseline[:, inside].sum() / baseline.sum()),
            )
        )
    return tuple(found)
