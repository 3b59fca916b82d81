"""Cross-entropy of rows of logits: the loss, and the gradient written over the logits.

Two passes over a row, the second of which often finds it in the L2 cache: a running maximum and sum
(Milakov & Gimelshein 2018, arXiv 1805.02867), then softmax minus one-hot. Float32 exists in registers only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dcpbench.dcp.launching import kernel

BLOCK = 8192
"""Columns a program holds at once (a smaller vocabulary: as many as it needs)."""
WARPS = 16


# Labels and losses begin anywhere: compiled for an alignment, it would be compiled again in the middle of a run.
@kernel(unaligned=("labels", "losses"))
def _cross_entropy(logits, labels, losses, vocabulary, stride, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    # rows x vocabulary may exceed 2^31 elements: rows are numbered in 64 bits.
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    if label == IGNORED:
        # Selected, not multiplied: whatever the row holds, it is not read.
        for start in range(0, vocabulary, BLOCK):
            inside = start + columns < vocabulary
            tl.store(here + start + columns, tl.zeros([BLOCK], logits.dtype.element_ty), mask=inside)
        tl.store(losses + row, 0.0)
    else:
        # A label outside the vocabulary makes the loss NaN, which ends the comparison, and reads nothing foreign.
        known = (label >= 0) & (label < vocabulary)
        chosen = tl.load(here + label, mask=known, other=float("nan")).to(tl.float32)
        greatest = float("-inf")
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            inside = start + columns < vocabulary
            x = tl.load(here + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            new = tl.maximum(greatest, tl.max(x, 0))
            # While every logit seen is -inf there is nothing to shift by, and -inf minus -inf would be NaN.
            shift = tl.where(new == float("-inf"), 0.0, new)
            sums = sums * tl.exp(greatest - shift) + tl.exp(x - shift)
            greatest = new
        normaliser = greatest + tl.log(tl.sum(sums, 0))
        tl.store(losses + row, normaliser - chosen)
        # Every thread has read what it needs of the row before one of them writes to it.
        tl.debug_barrier()
        for start in range(0, vocabulary, BLOCK):
            inside = start + columns < vocabulary
            x = tl.load(here + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - normaliser)
            gradient = tl.where(start + columns == label, gradient - 1.0, gradient)
            tl.store(here + start + columns, gradient.to(logits.dtype.element_ty), mask=inside)


def replace_by_gradient(logits: Tensor, labels: Tensor, losses: Tensor, ignored: int) -> None:
    """Writes each row's cross-entropy to `losses` and its gradient over `logits`; both 0 where ignored.

    Shapes: logits (rows, vocabulary), rows contiguous, bfloat16, float16 or float32; labels (rows,)
    int64; losses (rows,) float32. A label that is neither `ignored` nor in the vocabulary gives a NaN loss.
    """
    rows, vocabulary = logits.shape
    if rows == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    warps = max(1, min(WARPS, block // 256))
    _cross_entropy[(rows,)](
        logits, labels, losses, vocabulary, logits.stride(0), IGNORED=ignored, BLOCK=block, num_warps=warps
    )
