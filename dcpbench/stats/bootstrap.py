"""Circular block bootstrap of a mean: for series whose neighbours resemble each other.

Blocks wrap around the end, so that no iteration is drawn less often than another (moving blocks
under-sample the ends). Used within launches and for the loss; to compare launches only where it is
asked for and there are many pairs (`hierarchical`): over few it covers less than it promises (docs/method.md).
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


def hierarchical(baseline: NDArray[np.float64], dcp: NDArray[np.float64]) -> NDArray[np.float64]:
    """Resampled means of y = log(total baseline / total dcp), shape (`RESAMPLES`,): pairs, then blocks within each.

    Both arrays hold seconds, shape (pairs, iterations), equal work in equal places: a resampled pair takes the same
    blocks of iterations from both of its launches.
    """
    pairs, count = baseline.shape
    size = block_length(count)
    blocks = -(-count // size)
    ours, theirs = (_block_sums(seconds, size) for seconds in (baseline, dcp))
    rng = np.random.default_rng(SEED)
    step = max(1, _AT_ONCE // (pairs * blocks))
    means = []
    for done in range(0, RESAMPLES, step):
        shape = (min(step, RESAMPLES - done), pairs)
        pair = rng.integers(0, pairs, shape)[..., None]
        starts = rng.integers(0, count, (*shape, blocks))
        means.append(np.log(ours[pair, starts].sum(-1) / theirs[pair, starts].sum(-1)).mean(axis=1))
    return np.concatenate(means)


def _block_sums(seconds: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Sum of the `size` values from each place on, around the end; the shape of `seconds`."""
    wrapped = np.concatenate([seconds, seconds[:, : size - 1]], axis=1)
    sums: NDArray[np.float64] = np.lib.stride_tricks.sliding_window_view(wrapped, size, axis=1).sum(axis=-1)
    return sums
