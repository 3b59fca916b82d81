"""Circular block bootstrap of a mean: for series whose neighbours resemble each other.

Blocks wrap around the end, so that no iteration is drawn less often than another (moving blocks
under-sample the ends). Used within launches and for the loss; never to compare launches, of which
there are too few (docs/method.md).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 9_999
SEED = 0
"""Fixed, so that an analysis can be rebuilt with the same bytes."""
_MOST_DRAWS = 20_000_000
_AT_ONCE = 1_000_000


def block_length(count: int) -> int:
    """max(2, n^(1/3)): 5 for 100 iterations."""
    return max(2, int(np.rint(np.cbrt(count))))


def mean_interval(values: NDArray[np.float64], confidence: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the mean of a series, shape (n,).

    Draws `RESAMPLES` resamples; of series of more than some ten thousand values fewer, but never
    below 999.
    """
    size = block_length(values.size)
    blocks = -(-values.size // size)
    sums = np.convolve(np.concatenate([values, values[: size - 1]]), np.ones(size), mode="valid")
    resamples = max(999, min(RESAMPLES, _MOST_DRAWS // blocks))
    rng = np.random.default_rng(SEED)
    step = max(1, _AT_ONCE // blocks)
    means = np.concatenate(
        [
            sums[rng.integers(0, sums.size, (min(step, resamples - done), blocks))].sum(axis=1)
            for done in range(0, resamples, step)
        ]
    ) / (blocks * size)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
