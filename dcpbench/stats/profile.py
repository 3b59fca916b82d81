"""What the measured iterations of a case consisted of: padding, CP sizes, microbatches, scheduling, memory.

Arrays of one case, any shape; each is None where no launch reports it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class CaseProfile:
    """Sums and means over the measured iterations of one case; None for what the records lack."""

    padding_share: float | None
    """Padding tokens over all tokens, real and padding."""
    cp_sizes: dict[int, int] | None
    """How many microbatches ran on groups of each size."""
    microbatches: float | None
    """Mean number of microbatches of the busiest rank in an iteration."""
    scheduling_ms: float | None
    """Mean time spent on planning in an iteration."""
    peak_memory_bytes: int | None
    logged_tflops_per_gpu: float | None
    """Mean of what the program itself logged; Megatron-LM counts padding in."""
    imbalance: float | None = None
    """Mean over iterations of the slowest rank's time over the ranks' mean time; 1 is balanced."""


def case_profile(
    tokens: NDArray[Any] | None,
    padding_tokens: NDArray[Any] | None,
    cp_sizes: NDArray[Any] | None,
    microbatches: NDArray[Any] | None,
    scheduling_seconds: NDArray[Any] | None,
    peak_memory_bytes: NDArray[Any] | None,
    tflops_per_gpu: NDArray[Any] | None,
    imbalance: NDArray[Any] | None = None,
) -> CaseProfile:
    """The profile of one case. `cp_sizes` holds words such as `b"1x6,2x3"`."""
    share = None
    if tokens is not None and padding_tokens is not None:
        padding, real = float(padding_tokens.sum()), float(tokens.sum())
        share = padding / (padding + real) if padding + real > 0 else None
    scheduling = _mean(scheduling_seconds)
    peaks = () if peak_memory_bytes is None else peak_memory_bytes[np.isfinite(peak_memory_bytes)]
    return CaseProfile(
        padding_share=share,
        cp_sizes=None if cp_sizes is None else count_cp_sizes(cp_sizes),
        microbatches=_mean(microbatches),
        scheduling_ms=None if scheduling is None else 1e3 * scheduling,
        peak_memory_bytes=int(max(peaks)) if len(peaks) else None,
        logged_tflops_per_gpu=_mean(tflops_per_gpu),
        imbalance=_mean(imbalance),
    )


def count_cp_sizes(words: NDArray[Any]) -> dict[int, int]:
    """CP size -> number of groups, summed over words such as `b"1x6,2x3"`."""
    total: Counter[int] = Counter()
    for word, times in zip(*np.unique(words, return_counts=True), strict=True):
        for part in word.decode().split(","):
            size, _, count = part.partition("x")
            if size.isdecimal() and count.isdecimal():
                total[int(size)] += int(count) * int(times)
    return dict(sorted(total.items()))


def _mean(values: NDArray[Any] | None) -> float | None:
    if values is None or not np.isfinite(values).any():
        return None
    return float(np.nanmean(values))
