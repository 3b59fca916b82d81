"""GELU (tanh form) and SwiGLU; GELU's backward also sums its result over rows, which is the gradient of a bias."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpbench.dcp.launching import kernel
from dcpbench.worker.kernels.columns import add_columns, processors

_COLUMNS = 1024
_ROWS = 4
_WARPS = 4
_STRIPS = 8
"""Strips of rows per multiprocessor and block of columns, at most; each leaves one row of partial sums."""


@triton.jit
def _gelu_parts(x):
    # x/2 (1 + tanh u) = x sigmoid(2u) with 2u = 2 sqrt(2/pi) (x + 0.044715 x^3)
    s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return s, slope


@kernel(numbers=("rows",))
def _gelu(x, bias, out, rows, width, BIAS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    # Program (r, c): ROWS rows from r x ROWS on, columns of block c.
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = places.to(tl.int64)[:, None] * width + columns[None, :]
    mask = (places < rows)[:, None] & inside[None, :]
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    s, _ = _gelu_parts(value)
    tl.store(out + offsets, (value * s).to(out.dtype.element_ty), mask=mask)


@kernel(numbers=("rows", "strips"))
def _gelu_backward(
    grad_out, x, bias, grad, parts, rows, width, strips, BIAS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    # Program (c, s): columns of block c, rows s x ROWS, (s + strips) x ROWS, ...
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    strip = tl.program_id(1)
    inside = columns < width
    total = tl.zeros([COLUMNS], tl.float32)
    shift = tl.zeros([COLUMNS], tl.float32)
    if BIAS:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    for start in range(strip * ROWS, rows, strips * ROWS):
        places = start + tl.arange(0, ROWS)
        offsets = places.to(tl.int64)[:, None] * width + columns[None, :]
        mask = (places < rows)[:, None] & inside[None, :]
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) + shift[None, :]
        incoming = tl.load(grad_out + offsets, mask=mask, other=0.0).to(tl.float32)
        s, slope = _gelu_parts(value)
        result = incoming * (s + value * s * (1.0 - s) * slope)
        tl.store(grad + offsets, result.to(grad.dtype.element_ty), mask=mask)
        if BIAS:
            total += tl.sum(result, 0)
    if BIAS:
        tl.store(parts + strip.to(tl.int64) * width + columns, total, mask=inside)


@kernel()
def _swiglu(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@kernel()
def _swiglu_backward(grad_out, x, grad, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    here = row * 2 * width + columns
    gate = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + here + width, mask=inside, other=0.0).to(tl.float32)
    incoming = tl.load(grad_out + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    grad_gate = incoming * up * s * (1.0 + gate * (1.0 - s))
    tl.store(grad + here, grad_gate.to(grad.dtype.element_ty), mask=inside)
    tl.store(grad + here + width, (incoming * gate * s).to(grad.dtype.element_ty), mask=inside)


def gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """GELU, tanh form, of x + bias (rows, width), contiguous; bias (width,)."""
    rows, width = x.shape
    out = torch.empty_like(x)
    if rows:
        _gelu[(triton.cdiv(rows, _ROWS), triton.cdiv(width, _COLUMNS))](
            x, x if bias is None else bias, out, rows, width, BIAS=bias is not None, COLUMNS=_COLUMNS, ROWS=_ROWS,
            num_warps=_WARPS,
        )  # fmt: skip
    return out


def gelu_backward(grad_out: Tensor, x: Tensor, bias: Tensor | None, bias_total: Tensor | None) -> Tensor:
    """The gradient of x (rows, width), contiguous; with a bias its sum over rows is added to `bias_total` (width,).

    `bias_total` is float32, and there is one where there is a bias.
    """
    rows, width = x.shape
    grad = torch.empty_like(x)
    if rows == 0:
        return grad
    blocks = triton.cdiv(width, _COLUMNS)
    strips = min(triton.cdiv(rows, _ROWS), max(1, _STRIPS * processors(x.device) // blocks))
    parts = x.new_empty(1, strips, width, dtype=torch.float32)
    _gelu_backward[(blocks, strips)](
        grad_out.contiguous(), x, x if bias is None else bias, grad, parts, rows, width, strips,
        BIAS=bias is not None, COLUMNS=_COLUMNS, ROWS=_ROWS, num_warps=_WARPS,
    )  # fmt: skip
    if bias_total is not None:
        add_columns(parts, [bias_total])
    return grad


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, (rows, width), of x (rows, 2 x width), contiguous, gate first."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    if rows:
        _swiglu[(rows, triton.cdiv(width, _COLUMNS))](x, out, width, BLOCK=_COLUMNS, num_warps=_WARPS)
    return out


def swiglu_backward(grad_out: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, shaped like it."""
    rows, width = x.shape[0], x.shape[1] // 2
    grad = torch.empty_like(x)
    if rows:
        _swiglu_backward[(rows, triton.cdiv(width, _COLUMNS))](
            grad_out.contiguous(), x, grad, width, BLOCK=_COLUMNS, num_warps=_WARPS
        )
    return grad
