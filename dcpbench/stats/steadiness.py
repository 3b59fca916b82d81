"""Whether the measured window begins after things have settled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import stats

_SPREADS = 5.0
_LEAST = 0.05
_FEWEST = 4


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
