"""From when on microbatches are computed with the attention kernel for long key ranges; the cost model follows suit.

On H200 FlashAttention-2 is the quicker of two kernels where queries see few keys, and cuDNN's where they see many.
"""

from __future__ import annotations

from dataclasses import replace

from dcpbench.dcp.costs import CostModel, LongKernel

LONG_KEYS_PER_QUERY = 700.0
"""From how many keys a query on, on average, cuDNN's kernels are faster than FlashAttention-2's
(benchmarks/attention.py on an H200: even at 512, twice as fast at 4,096)."""

LONG_WORK = 16_000_000
"""From how many query-key pairs a rank and head on that pays. A layer's calls of cuDNN keep the host about 0.7 ms
longer, and short microbatches are bound by the host; at 2,048 keys a query, kernels save that much with 8,192 rows."""

LONG_SHARE = 0.6
"""What a pair takes with the kernel for long key ranges over what it takes with the other: an expectation, used until
microbatches or iterations with such ranges were timed."""


def two_kernels(backend: str | None) -> bool:
    """Whether an attention backend of that name (`transport/kernel+kernel`) chooses between two kernels."""
    return "+" in (backend or "").rpartition("/")[2]


def starting_from(cost: CostModel, backend: str | None) -> CostModel:
    """What to fit, from what is known: with a second attention kernel where the backend of that name has one."""
    if not two_kernels(backend):
        return replace(cost, long=None)
    return replace(cost, long=cost.long or LongKernel(LONG_SHARE * cost.square, LONG_KEYS_PER_QUERY, float(LONG_WORK)))
