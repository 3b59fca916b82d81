"""How sure the speed-up is: intervals over pairs of launches, a verdict on them, and how many pairs would settle it.

Everything stands on y = log(R_dcp / R_baseline) of each pair (`throughput.log_ratios`): the launch is
what is repeated, so pairs and never iterations are counted. Intervals are Student's t; in a
simulation with drift, position effect and heavy tails (`benchmarks/campaigns.py`) they cover what
they promise at 6 and at 10 pairs, where a bootstrap over so few pairs does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dcpbench.errors import UsageError
from dcpbench.stats.bootstrap import hierarchical

Values = NDArray[np.float64]
Speed = Literal["faster", "slower", "equivalent", "inconclusive", "indicative"]

FEWEST_PAIRS = 3
"""With fewer pairs nothing is decided: two can agree by chance, and one has no spread."""
FEWEST_HIERARCHICAL = 10
"""Pairs from which on a hierarchical bootstrap may be asked for."""
MOST_PAIRS = 200
"""More pairs than this nobody launches; `pairs_to_settle` then gives None."""
_MOST_EXACT = 16
_CONFIDENCE = 0.95
_EQUIVALENCE = 0.90


@dataclass(frozen=True)
class Interval:
    """What the pairs say of the speed-up. Ends are factors, not logarithms; above 1, dcp is faster."""

    pairs: int
    low: float
    """Lower end of the 95 % interval."""
    high: float
    equivalence_low: float
    """Lower end of the 90 % interval: the two one-sided tests at 5 % of equivalence."""
    equivalence_high: float
    spread: float
    """Standard deviation of y over pairs, about the relative spread of the pairs' speed-ups."""
    half_width: float
    """Half the width of the 95 % interval of y."""
    p_value: float | None
    """Exact two-sided sign-flip test of no difference; reported, it decides nothing. None beyond 16 pairs.
    With P pairs it cannot fall below 2^(1-P)."""


def interval(logs: Values) -> Interval | None:
    """The intervals of y, shape (pairs,); None for a single pair, which has no spread."""
    if logs.size < 2:
        return None
    mean, spread = float(logs.mean()), _spread(logs)
    wide = half_width(spread, logs.size, _CONFIDENCE)
    narrow = half_width(spread, logs.size, _EQUIVALENCE)
    return Interval(
        pairs=logs.size,
        low=float(np.exp(mean - wide)),
        high=float(np.exp(mean + wide)),
        equivalence_low=float(np.exp(mean - narrow)),
        equivalence_high=float(np.exp(mean + narrow)),
        spread=spread,
        half_width=wide,
        p_value=sign_flip(logs),
    )


def hierarchical_interval(baseline: Values, dcp: Values) -> Interval:
    """The intervals by a hierarchical bootstrap: percentiles over resampled pairs and blocks of iterations within them.

    Arguments are seconds of shape (pairs, iterations). The textbook's answer for many pairs; over fewer than
    `FEWEST_HIERARCHICAL` it covers less than it promises.

    Raises:
        UsageError: there are fewer pairs than that.
    """
    logs = np.log(baseline.sum(axis=1) / dcp.sum(axis=1))
    if logs.size < FEWEST_HIERARCHICAL:
        raise UsageError(
            f"a hierarchical interval needs {FEWEST_HIERARCHICAL} pairs of launches, there are {logs.size}: launch "
            "more pairs (--rigorous) or set decision.interval to t"
        )
    found = hierarchical(baseline, dcp)
    (low, high), (inner_low, inner_high) = (
        np.quantile(found, [(1 - level) / 2, (1 + level) / 2]).tolist() for level in (_CONFIDENCE, _EQUIVALENCE)
    )
    return Interval(
        pairs=logs.size,
        low=float(np.exp(low)),
        high=float(np.exp(high)),
        equivalence_low=float(np.exp(inner_low)),
        equivalence_high=float(np.exp(inner_high)),
        spread=_spread(logs),
        half_width=(high - low) / 2,
        p_value=sign_flip(logs),
    )


def half_width(spread: float, pairs: int, confidence: float) -> float:
    """t * s / sqrt(P), with t the two-sided quantile of Student's t with P - 1 degrees of freedom."""
    return float(stats.t.ppf((1 + confidence) / 2, pairs - 1) * spread / np.sqrt(pairs))


def sign_flip(logs: Values) -> float | None:
    """p of an exact permutation test that flips the sign of each pair's y: under no effect both are as likely."""
    if logs.size > _MOST_EXACT:
        return None
    # As many resamples as there are patterns of signs: scipy then goes through all of them.
    found = stats.permutation_test(
        (logs,), np.mean, permutation_type="samples", n_resamples=2**logs.size, vectorized=True, axis=0
    )
    return float(found.pvalue)


def decide(found: Interval | None, margin: float) -> Speed:
    """Which case is faster by more than the margin, or that they are within it, or that this is not decided.

    `faster` when the whole 95 % interval lies above 1 + margin, `slower` below 1 / (1 + margin),
    `equivalent` when the 90 % interval lies between the two; the limits are reciprocal, so that
    swapping the cases swaps the verdict. One pair is never more than `indicative`.
    """
    if found is None:
        return "indicative"
    if found.pairs < FEWEST_PAIRS:
        return "inconclusive"
    upper, lower = 1 + margin, 1 / (1 + margin)
    if found.low > upper:
        return "faster"
    if found.high < lower:
        return "slower"
    if lower < found.equivalence_low and found.equivalence_high < upper:
        return "equivalent"
    return "inconclusive"


def pairs_to_settle(logs: Values, margin: float) -> int | None:
    """How many pairs in all, an even number, would decide it if mean and spread of y stay as they are.

    The least P with t * s / sqrt(P) below the distance of the mean from the nearest limit of
    `decide`, that is P > (t * s / distance)^2. None for a single pair, or beyond `MOST_PAIRS`.
    """
    if logs.size < 2:
        return None
    limit, mean, spread = float(np.log1p(margin)), abs(float(logs.mean())), _spread(logs)
    confidence = _CONFIDENCE if mean > limit else _EQUIVALENCE
    distance = abs(mean - limit)
    first = max(FEWEST_PAIRS, logs.size)
    return next(
        (n for n in range(first + first % 2, MOST_PAIRS + 1, 2) if half_width(spread, n, confidence) < distance), None
    )


def order_interval(logs: Values, baseline_first: NDArray[np.bool_]) -> tuple[float, float] | None:
    """95 % interval of `throughput.order_effect`, by Welch's method for unequal variances.

    None unless both orders occur at least twice.
    """
    first, second = logs[baseline_first], logs[~baseline_first]
    if min(first.size, second.size) < 2:
        return None
    middle, half = _welch(first, second, _CONFIDENCE)
    return float(np.exp(middle / 2 - half / 2)), float(np.exp(middle / 2 + half / 2))


def unpaired(first: Values, second: Values) -> Interval | None:
    """The intervals of the ratio of two independent groups, second over first, from logarithms of shape (launches,).

    By Welch's method; None where a group has a single launch. `pairs` is the size of the smaller group.
    """
    if min(first.size, second.size) < 2:
        return None
    middle, wide = _welch(first, second, _CONFIDENCE)
    _, narrow = _welch(first, second, _EQUIVALENCE)
    return Interval(
        pairs=min(first.size, second.size),
        low=float(np.exp(middle - wide)),
        high=float(np.exp(middle + wide)),
        equivalence_low=float(np.exp(middle - narrow)),
        equivalence_high=float(np.exp(middle + narrow)),
        spread=float(np.hypot(_spread(first), _spread(second))),
        half_width=wide,
        p_value=None,
    )


def _welch(first: Values, second: Values, confidence: float) -> tuple[float, float]:
    """Difference of means and half-width of its interval, for unequal variances."""
    errors = np.array([_spread(group) ** 2 / group.size for group in (first, second)])
    total = float(errors.sum())
    # Welch and Satterthwaite; equal values in both groups leave no width and no degrees of freedom.
    freedom = total**2 / float((errors**2 / np.array([first.size - 1, second.size - 1])).sum()) if total > 0 else 1.0
    half = float(stats.t.ppf((1 + confidence) / 2, freedom)) * float(np.sqrt(total))
    return float(second.mean() - first.mean()), half


def timing_floor(totals: Values) -> float | None:
    """Spread of log time between neighbouring launches of one case.

    Args:
        totals: seconds of launches that ran next to each other and were of the same case, shape (controls, 2).

    The standard deviation of the log ratios, not their mean size, which still holds what coming
    second does. None with fewer than two of them.
    """
    if len(totals) < 2:
        return None
    return _spread(np.log(totals[:, 1] / totals[:, 0]))


def _spread(logs: Values) -> float:
    """Standard deviation; rounding of equal values is no spread."""
    spread = float(logs.std(ddof=1))
    return spread if spread > 1e-12 else 0.0
