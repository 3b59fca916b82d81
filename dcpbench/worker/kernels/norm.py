"""LayerNorm and RMSNorm, with the addition to the residual stream in front and behind.

Forward: total = x + branch, with the bias of what made the branch; normed = norm(total), in one pass. Backward:
the gradient of total from both of its uses, and the column sums that norm weight, norm bias and the branch's
bias want, in one pass. Arithmetic is float32 whatever the type of the tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpbench.dcp.launching import kernel
from dcpbench.worker.kernels.columns import add_columns, processors

PROGRAMS = 2
"""Backward programs per multiprocessor; each leaves one row of partial column sums."""


@kernel()
def _add_norm(
    x, branch, branch_bias, total, normed, weight, bias, means, scales, width, eps,
    ADD: tl.constexpr, ADD_BIAS: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    here = row * width + columns
    value = tl.load(x + here, mask=inside, other=0.0)
    if ADD:
        wide = value.to(tl.float32) + tl.load(branch + here, mask=inside, other=0.0).to(tl.float32)
        if ADD_BIAS:
            wide += tl.load(branch_bias + columns, mask=inside, other=0.0).to(tl.float32)
        value = wide.to(value.dtype)
        tl.store(total + here, value, mask=inside)
    # What is normalised is what was stored, rounding included.
    value = value.to(tl.float32)
    if CENTRED:
        mean = tl.sum(value, 0) / width
        tl.store(means + row, mean)
        value = tl.where(inside, value - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(scales + row, scale)
    result = value * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + here, result.to(normed.dtype.element_ty), mask=inside)


@kernel(numbers=("rows", "programs"))
def _add_norm_backward(
    grad_normed, grad_total, total, weight, means, scales, grad, parts, rows, width, programs,
    ADDED: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, BRANCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Program p takes rows p, p + programs, ... and leaves the sums of its rows at parts[:, p].
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    sum_weight = tl.zeros([BLOCK], tl.float32)
    sum_bias = tl.zeros([BLOCK], tl.float32)
    sum_branch = tl.zeros([BLOCK], tl.float32)
    wide = width + tl.zeros([1], tl.int64)  # rows x width may exceed 2^31
    for row in range(program, rows, programs):
        here = row * wide + columns
        scale = tl.load(scales + row)
        value = tl.load(total + here, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            value = tl.where(inside, value - tl.load(means + row), 0.0)
        value *= scale
        incoming = tl.load(grad_normed + here, mask=inside, other=0.0).to(tl.float32)
        sum_weight += incoming * value
        if BIAS:
            sum_bias += incoming
        weighted = incoming * w
        result = weighted - value * (tl.sum(weighted * value, 0) / width)
        if CENTRED:
            result -= tl.sum(weighted, 0) / width
        result *= scale
        if ADDED:
            result += tl.load(grad_total + here, mask=inside, other=0.0).to(tl.float32)
        if BRANCH:
            sum_branch += result
        tl.store(grad + here, result.to(grad.dtype.element_ty), mask=inside)
    place = parts + program * wide + columns
    step = programs * wide
    tl.store(place, sum_weight, mask=inside)
    if BIAS:
        tl.store(place + step, sum_bias, mask=inside)
    if BRANCH:
        tl.store(place + (2 if BIAS else 1) * step, sum_branch, mask=inside)


def add_norm(
    x: Tensor,
    branch: Tensor | None,
    branch_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(total, normed, means, scales): LayerNorm (centred) or RMSNorm of x + branch + branch_bias.

    Shapes: x, branch, total and normed (rows, width) contiguous; weight and biases (width,); means and scales
    (rows,) float32. Without a branch total is x itself.
    """
    rows, width = x.shape
    x = x.contiguous()
    branch = None if branch is None else branch.contiguous()
    total = x if branch is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    means = x.new_empty(rows, dtype=torch.float32)
    scales = x.new_empty(rows, dtype=torch.float32)
    if rows:
        block = triton.next_power_of_2(width)
        _add_norm[(rows,)](
            x, x if branch is None else branch, weight if branch_bias is None else branch_bias, total, normed, weight,
            weight if bias is None else bias, means, scales, width, eps, ADD=branch is not None,
            ADD_BIAS=branch_bias is not None, CENTRED=centred, BIAS=bias is not None, BLOCK=block,
            num_warps=_warps(block),
        )  # fmt: skip
    return total, normed, means, scales


def add_norm_backward(
    grad_normed: Tensor,
    grad_total: Tensor | None,
    saved: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    centred: bool,
    weight_total: Tensor,
    bias_total: Tensor | None,
    branch_bias_total: Tensor | None,
) -> Tensor:
    """The gradient of total, hence of x and of branch; those of weight, bias and the branch's bias go to their totals.

    Shapes: as in `add_norm`, whose (total, means, scales) `saved` is; the totals (width,) float32.
    """
    total, means, scales = saved
    rows, width = total.shape
    grad = torch.empty_like(total)
    if rows == 0:
        return grad
    targets = [target for target in (weight_total, bias_total, branch_bias_total) if target is not None]
    programs = min(rows, PROGRAMS * processors(total.device))
    parts = total.new_empty(len(targets), programs, width, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    grad_normed = grad_normed.contiguous()
    _add_norm_backward[(programs,)](
        grad_normed, grad_normed if grad_total is None else grad_total.contiguous(), total, weight, means, scales, grad,
        parts, rows, width, programs, ADDED=grad_total is not None, CENTRED=centred, BIAS=bias_total is not None,
        BRANCH=branch_bias_total is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    add_columns(parts, targets)
    return grad


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))
