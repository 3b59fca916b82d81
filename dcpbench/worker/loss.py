"""The output projection and the cross-entropy in one differentiable function that never holds all logits.

The loss is a sum over tokens, so the gradient of every logit is known as soon as its row is: the
gradients of hidden states and weight are computed in the forward pass, chunk by chunk, from the
logits of the chunk, over which their own gradient has been written.

A weight with `main_grad` (see `linear.py`) has its gradient added there, in the forward pass. Then the
backward must be that of the loss itself, with factor 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcpbench.data.stream import IGNORE_INDEX
from dcpbench.worker.linear import add_product, main_grad_of, product_into

CHUNK_BYTES = 1 << 30
"""Memory for the logits held at once."""

_ALIGNED = 64
"""Elements: the distance of two rows of logits is a multiple of this."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, main_grad: Tensor | None) -> Tensor:
        total_rows, vocabulary = len(hidden), len(weight)
        rows = chunk_rows(total_rows, vocabulary * hidden.element_size())
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        losses = torch.empty(total_rows, dtype=exact, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if main_grad is None else main_grad
        # Rows without a label are selected away, not multiplied by zero: nothing in them can reach a sum.
        labelled = hidden.where((labels != IGNORE_INDEX)[:, None], 0.0)
        # Matrix products want rows that begin at multiples of 16 bytes, whatever the vocabulary.
        buffer = hidden.new_empty(min(rows, total_rows), -(-vocabulary // _ALIGNED) * _ALIGNED)[:, :vocabulary]
        for start in range(0, total_rows, rows):
            part = slice(start, start + rows)
            logits = torch.mm(labelled[part], weight.T, out=buffer[: min(rows, total_rows - start)])
            losses_and_gradient(logits, labels[part], losses[part])
            product_into(grad_hidden[part], logits, weight)
            add_product(grad_weight, logits, labelled[part])
        ctx.factor_is_one = main_grad is not None
        ctx.save_for_backward(grad_hidden, *(() if ctx.factor_is_one else (grad_weight,)))
        return losses.sum(dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        grad_hidden, *rest = ctx.saved_tensors
        if ctx.factor_is_one:
            # Checked on the device, without waiting for it: the weight's gradient has been added already.
            torch._assert_async(grad == 1)
            return grad_hidden, None, None, None
        factor = grad.to(grad_hidden.dtype)
        return grad_hidden * factor, rest[0] * factor, None, None


def chunk_rows(rows: int, row_bytes: int) -> int:
    """Rows of equal chunks (the last may be shorter) of at most CHUNK_BYTES, or of one row."""
    most = max(1, CHUNK_BYTES // row_bytes)
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


def losses_and_gradient(logits: Tensor, labels: Tensor, losses: Tensor) -> None:
    """Writes the cross-entropy of each row to `losses` and its gradient over `logits`.

    Shapes: logits (rows, vocabulary), labels (rows,) int64, losses (rows,) float32 or float64. Both are 0 in rows
    labelled -100. Softmax in the type of `losses`.
    """
    if logits.is_cuda and losses.dtype == torch.float32:
        from dcpbench.worker.kernels import cross_entropy  # noqa: PLC0415 - Triton exists only beside CUDA

        cross_entropy.replace_by_gradient(logits, labels, losses, IGNORE_INDEX)
    else:
        plain_losses_and_gradient(logits, labels, losses)


def plain_losses_and_gradient(logits: Tensor, labels: Tensor, losses: Tensor) -> None:
    """The same by torch, which makes a copy of the logits in the type of `losses`."""
    counted = labels != IGNORE_INDEX
    target = labels.where(counted, 0)[:, None]
    exact = logits.to(losses.dtype)
    # log-sum-exp and softmax share one pass.
    log_normaliser = torch.logsumexp(exact, dim=-1, keepdim=True)
    found = (log_normaliser - exact.gather(1, target)).squeeze(1)
    losses.copy_(found.where(counted, 0.0))
    grad = exact.sub_(log_normaliser).exp_()
    grad.scatter_add_(1, target, torch.full_like(target, -1, dtype=exact.dtype))
    logits.copy_(grad.where(counted[:, None], 0.0))


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over rows of the cross-entropy of `hidden @ weight.T` with `labels`.

    Shapes: hidden (rows, width), weight (vocabulary, width), labels (rows,) int64; rows labelled -100
    are left out of loss and gradient. The result is a float64 scalar (a sum over many tokens).
    Logits are computed in hidden's type, their softmax in float32 or better.

    Where `weight` has `main_grad` and gradients are on, the weight's gradient is added there at once.
    """
    main_grad = main_grad_of(weight) if torch.is_grad_enabled() else None
    return _LinearCrossEntropy.apply(hidden, weight, labels, main_grad)
