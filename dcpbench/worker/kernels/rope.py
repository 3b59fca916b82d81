"""Rotary positions on the queries and keys inside one tensor of all heads, and the way back.

The backward puts the gradients of queries, keys and values side by side, turns the first two back
and sums the result over rows, which is the gradient of a bias: one pass instead of a copy, a
rotation and a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpbench.dcp.launching import kernel
from dcpbench.worker.kernels.columns import add_columns, processors

_ROWS = 16
_STRIPS = 24
"""Strips of rows per multiprocessor, over all heads, at most; each leaves a row of partial sums."""


@kernel(numbers=("rows",))
def _rotate(qkv, cosines, sines, rows, width, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    # In place. Dimension i of a head goes with dimension i + HALF.
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (places < rows)[:, None] & (columns < HALF)[None, :]
    angles = places.to(tl.int64)[:, None] * HALF + columns[None, :]
    cosine = tl.load(cosines + angles, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sines + angles, mask=mask, other=0.0).to(tl.float32)
    here = qkv + places.to(tl.int64)[:, None] * width + tl.program_id(1) * 2 * HALF + columns[None, :]
    first = tl.load(here, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(here + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(here, (first * cosine - second * sine).to(qkv.dtype.element_ty), mask=mask)
    tl.store(here + HALF, (second * cosine + first * sine).to(qkv.dtype.element_ty), mask=mask)


@kernel(numbers=("rows", "strips"))
def _join(
    grad_q, grad_k, grad_v, q_row, q_head, k_row, k_head, v_row, v_head, grad, parts, cosines, sines,
    rows, width, strips, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    ROTATE: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # Program (h, s): head h of the joined tensor, rows s x ROWS, (s + strips) x ROWS, ...
    head = tl.program_id(0)
    strip = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    source = grad_q + head * q_head
    stride = q_row
    if head >= HEADS:
        source = grad_k + (head - HEADS) * k_head
        stride = k_row
    if head >= HEADS + KV_HEADS:
        source = grad_v + (head - HEADS - KV_HEADS) * v_head
        stride = v_row
    sum_first = tl.zeros([BLOCK], tl.float32)
    sum_second = tl.zeros([BLOCK], tl.float32)
    for start in range(strip * ROWS, rows, strips * ROWS):
        places = start + tl.arange(0, ROWS)
        mask = (places < rows)[:, None] & (columns < HALF)[None, :]
        # An odd head dimension has one dimension less in its second half; it is never rotated.
        mask_second = (places < rows)[:, None] & (columns < DIM - HALF)[None, :]
        there = source + places.to(tl.int64)[:, None] * stride + columns[None, :]
        first = tl.load(there, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(there + HALF, mask=mask_second, other=0.0).to(tl.float32)
        if ROTATE:
            angles = places.to(tl.int64)[:, None] * HALF + columns[None, :]
            turned = mask & (head < HEADS + KV_HEADS)
            cosine = tl.load(cosines + angles, mask=turned, other=1.0).to(tl.float32)
            sine = tl.load(sines + angles, mask=turned, other=0.0).to(tl.float32)
            back = first * cosine + second * sine
            second = second * cosine - first * sine
            first = back
        here = grad + places.to(tl.int64)[:, None] * width + head * DIM + columns[None, :]
        tl.store(here, first.to(grad.dtype.element_ty), mask=mask)
        tl.store(here + HALF, second.to(grad.dtype.element_ty), mask=mask_second)
        if BIAS:
            sum_first += tl.sum(first, 0)
            sum_second += tl.sum(second, 0)
    if BIAS:
        place = parts + strip.to(tl.int64) * width + head * DIM + columns
        tl.store(place, sum_first, mask=columns < HALF)
        tl.store(place + HALF, sum_second, mask=columns < DIM - HALF)


def rotate(qkv: Tensor, heads: int, cosines: Tensor, sines: Tensor) -> None:
    """Rotates the first `heads` heads of qkv (rows, all heads, dim), contiguous, in place.

    Shapes: cosines and sines with rows x dim/2 elements, contiguous; of any float type.
    """
    rows, total, dim = qkv.shape
    if rows:
        block = triton.next_power_of_2(dim // 2)
        _rotate[(triton.cdiv(rows, _ROWS), heads)](
            qkv, cosines, sines, rows, total * dim, HALF=dim // 2, BLOCK=block, ROWS=_ROWS, num_warps=4
        )


def join(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    bias_total: Tensor | None,
) -> Tensor:
    """The gradient of qkv, (rows, all heads, dim), from those of q, k and v; rotated back where there are angles.

    Shapes: grad_q (rows, heads, dim), grad_k and grad_v (rows, kv_heads, dim), dim contiguous; angles as in `rotate`.
    Its sum over rows is added to `bias_total` (all heads x dim,), float32.
    """
    rows, heads, dim = grad_q.shape
    kv_heads = grad_k.shape[1]
    total = heads + 2 * kv_heads
    grad = grad_q.new_empty(rows, total, dim)
    if rows == 0:
        return grad
    grad_q, grad_k, grad_v = (x if x.stride(2) == 1 else x.contiguous() for x in (grad_q, grad_k, grad_v))
    strips = min(triton.cdiv(rows, _ROWS), max(1, _STRIPS * processors(grad.device) // total))
    parts = grad.new_empty(1, strips, total * dim, dtype=torch.float32)
    half = -(-dim // 2)
    cosines, sines = (parts, parts) if angles is None else angles
    _join[(total, strips)](
        grad_q, grad_k, grad_v, grad_q.stride(0), grad_q.stride(1), grad_k.stride(0), grad_k.stride(1),
        grad_v.stride(0), grad_v.stride(1), grad, parts, cosines, sines, rows, total * dim, strips, HEADS=heads,
        KV_HEADS=kv_heads, DIM=dim, HALF=half, ROTATE=angles is not None, BIAS=bias_total is not None,
        BLOCK=triton.next_power_of_2(half), ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    if bias_total is not None:
        add_columns(parts, [bias_total])
    return grad
