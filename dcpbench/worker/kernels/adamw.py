"""AdamW in one pass over the flat buffers.

Per element it reads gradient, both moments and weight (16 bytes) and writes both moments, weight,
compute weight and a zeroed gradient (16 bytes and the compute type): nothing is read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_WARPS = 8


@triton.jit
def _adamw(
    weight, grad, first, second, compute, scale, count, step, decay, rest1, rest2, correction, eps,
    PUBLISH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Elements are numbered in 64 bits: a large model has more than 2^31.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    g = tl.load(grad + offsets, mask=inside, other=0.0) * tl.load(scale)
    m = tl.load(first + offsets, mask=inside, other=0.0)
    v = tl.load(second + offsets, mask=inside, other=0.0)
    w = tl.load(weight + offsets, mask=inside, other=0.0)
    m += rest1 * (g - m)
    v += rest2 * (g * g - v)
    w -= decay * w
    w -= step * m / (tl.sqrt(v) * correction + eps)
    tl.store(first + offsets, m, mask=inside)
    tl.store(second + offsets, v, mask=inside)
    tl.store(weight + offsets, w, mask=inside)
    if PUBLISH:
        tl.store(compute + offsets, w.to(compute.dtype.element_ty), mask=inside)
    tl.store(grad + offsets, tl.zeros_like(g), mask=inside)


def update(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    compute: Tensor,
    scale: Tensor,
    *,
    iteration: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step (Loshchilov & Hutter 2019, algorithm 2) with the gradient `grad * scale`; zeroes `grad`.

    Shapes: weight, grad, first, second (float32) and compute (any float type, or `weight` itself) are flat
    and equally long; scale is a float32 scalar on the device. `iteration` counts from 1.
    """
    count = weight.numel()
    beta1, beta2 = betas
    _adamw[(triton.cdiv(count, _BLOCK),)](
        weight, grad, first, second, compute, scale, count,
        lr / (1 - beta1**iteration),
        # As a product of its own: 1 - lr x decay, rounded to float32, would lose most of the decay's digits.
        lr * weight_decay,
        1 - beta1, 1 - beta2, (1 - beta2**iteration) ** -0.5, eps,
        PUBLISH=compute.data_ptr() != weight.data_ptr(), BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
