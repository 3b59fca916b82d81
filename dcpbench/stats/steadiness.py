"""Whether the measured window begins after things have settled, and whether they stay so within it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Values = NDArray[np.float64]

_SPREADS = 5.0
_LEAST = 0.05
_FEWEST = 4
_FEWEST_LAUNCHES = 4
_DRIFT = 0.01
_LEVELS = 0.03
_MODIFIED_Z = 3.5
_MOST_LISTED = 50
_MOST_POINTS = 400


def settling(seconds: NDArray[np.float64]) -> int:
    """How many leading iterations of a launch, shape (iterations,), still run slow.

    Slow is above the median of the iterations after the first by more than five of their spreads
    (median absolute deviation, scaled to a normal's standard deviation) and by more than 5 %.
    Iterations differ with their batches, so the spread of the rest is what a slow start must exceed.
    Returns 0 for fewer than four iterations: nothing can be told from them.
    """
    if seconds.size < _FEWEST:
        return 0
    rest = seconds[1:]
    median = float(np.median(rest))
    spread = float(stats.median_abs_deviation(rest, scale="normal"))
    slow = seconds > median + max(_SPREADS * spread, _LEAST * median)
    return int(np.argmin(slow)) if not slow.all() else int(slow.size)


Label = Literal["flat", "warming", "slowing", "unstable"]


@dataclass(frozen=True)
class Steadiness:
    """One launch over its measured window, after the batches' own share of the time was taken out."""

    label: Label
    """After Barrett et al.: times that stay, fall, rise, or change level without a direction."""
    drift: float
    """Relative change of the time from the first to the last measured iteration, by the Theil-Sen line."""
    correlation: float
    """Lag-1 autocorrelation of the logarithm."""
    effective: float
    """n (1 - rho) / (1 + rho): how many independent iterations these are worth."""
    truncation: int
    """MSER-5: leading iterations whose removal makes the mean most certain."""
    outliers: tuple[int, ...]
    """Indices in the window of iterations that stand out; they are named and stay in the numbers."""
    excess: tuple[float, ...] = ()
    """How many times the launch's usual time each of `outliers` took, its batch taken out."""


def workload_removed(
    seconds: Values, tokens: NDArray[Any] | None, squared_lengths: NDArray[Any] | None
) -> tuple[Values, str]:
    """Iteration times of one case, shape (launches, iterations), over what the batch would take; and how that is known.

    From four launches on, a batch takes the median over launches. With fewer that would be the
    launch itself, so time is predicted from tokens and the sum of squared lengths; where the records
    carry neither, times stay as they are.
    """
    if len(seconds) >= _FEWEST_LAUNCHES:
        return seconds / np.median(seconds, axis=0), "the median over launches"
    if tokens is not None and squared_lengths is not None and seconds.shape[1] > 2 * _FEWEST:
        columns = np.stack([np.ones(seconds.shape[1]), tokens[0], squared_lengths[0]], axis=1)
        scale = np.abs(columns).max(axis=0)
        fit, *_ = np.linalg.lstsq(columns / np.where(scale > 0, scale, 1.0), seconds.mean(axis=0), rcond=None)
        predicted = columns / np.where(scale > 0, scale, 1.0) @ fit
        if (predicted > 0).all():
            return seconds / predicted, "a prediction from tokens and squared lengths"
    return seconds / np.median(seconds, axis=1, keepdims=True), "the launch's own median"


def steadiness(z: Values) -> Steadiness:
    """How steady a launch was, from its workload-removed times, shape (iterations,)."""
    points = _binned(z)
    drift, sure = 0.0, False
    if points.size >= _FEWEST:
        slope, _, low, high = stats.theilslopes(points, np.arange(points.size))
        drift = float(slope) * (points.size - 1) / float(np.median(points))
        sure = not low <= 0 <= high
    quarters = [float(np.median(part)) for part in np.array_split(z, 4) if part.size]
    label: Label = "flat"
    if sure and abs(drift) > _DRIFT:
        label = "slowing" if drift > 0 else "warming"
    elif max(quarters) / min(quarters) - 1 > max(_LEVELS, _chance(z)):
        label = "unstable"
    rho = _lag1(np.log(z))
    outliers = _outliers(z)
    excess = tuple((z[list(outliers)] / np.median(z)).tolist())
    return Steadiness(label, drift, rho, z.size * (1 - rho) / (1 + rho), _mser5(z), outliers, excess)


def without_outliers(baseline: Values, dcp: Values, flagged: NDArray[np.bool_]) -> Values:
    """y of each pair over the iterations that are not flagged; all arrays have shape (pairs, iterations).

    A pair of which nothing would be left keeps all of its iterations.
    """
    kept = ~flagged
    kept[~kept.any(axis=1)] = True
    logs: Values = np.log((baseline * kept).sum(axis=1) / (dcp * kept).sum(axis=1))
    return logs


def _outliers(z: Values) -> tuple[int, ...]:
    """|modified z| > 3.5 (Iglewicz and Hoaglin) and more than 5 % from the median; at most `_MOST_LISTED`."""
    middle = float(np.median(z))
    spread = float(stats.median_abs_deviation(z, scale="normal"))
    away = np.abs(z - middle)
    found = np.flatnonzero((away > _MODIFIED_Z * spread) & (away > _LEAST * middle))
    if found.size > _MOST_LISTED:
        found = np.sort(found[np.argsort(-away[found], kind="stable")[:_MOST_LISTED]])
    return tuple(found.tolist())


def _chance(z: Values) -> float:
    """How far the medians of the window's quarters lie apart by chance, once in about a thousand windows.

    A median of m values has about 1.25 times the spread of their mean, and the range of four normal
    values exceeds 5.3 of their standard deviations that rarely (tables of the studentised range).
    """
    spread = float(stats.median_abs_deviation(z, scale="normal"))
    return 5.3 * 1.25 * spread / float(np.sqrt(max(z.size / 4, 1.0))) / float(np.median(z))


def _mser5(z: Values) -> int:
    """White's MSER rule on means of five, looking at the first half only."""
    means = z[: z.size // 5 * 5].reshape(-1, 5).mean(axis=1)
    if means.size < _FEWEST:
        return 0
    rest = np.arange(means.size, 0, -1)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum((means**2)[::-1])[::-1]
    error = np.maximum(squares - sums**2 / rest, 0.0) / rest.astype(float) ** 2
    half = means.size // 2
    return 5 * int(np.argmin(error[: half + 1]))


def _lag1(values: Values) -> float:
    centred = values - values.mean()
    total = float(centred @ centred)
    return float(centred[1:] @ centred[:-1]) / total if total > 1e-18 else 0.0


def _binned(values: Values) -> Values:
    """At most `_MOST_POINTS` means: Theil and Sen's line looks at every pair of points."""
    if values.size <= _MOST_POINTS:
        return values
    return np.array([part.mean() for part in np.array_split(values, _MOST_POINTS)])
