"""The output projection and the cross-entropy in one differentiable function that never holds all logits.

The loss is a sum over tokens and its gradient is needed with factor 1 times whatever the caller
multiplies; so the gradients are computed in the forward pass, chunk by chunk, while the logits of
the chunk exist, and scaled in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcpbench.data.stream import IGNORE_INDEX

CHUNK_ELEMENTS = 1 << 28
"""Logits held at once; 2^28 in float32 are 1 GiB."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        rows = max(1, min(len(hidden), CHUNK_ELEMENTS // weight.shape[0]))
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        exact = hidden.dtype if hidden.dtype in (torch.float32, torch.float64) else torch.float32
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            counted = labels[part] != IGNORE_INDEX
            target = labels[part].where(counted, 0)[:, None]
            logits = (hidden[part] @ weight.T).to(exact)
            # log-sum-exp and softmax share one pass; rows without a label are selected away, not
            # multiplied by zero, so that nothing in them can reach the sum.
            log_normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
            losses = (log_normaliser - logits.gather(1, target)).squeeze(1)
            total += losses.where(counted, 0.0).sum(dtype=torch.float64)
            grad = logits.sub_(log_normaliser).exp_()
            grad.scatter_add_(1, target, torch.full_like(target, -1, dtype=exact))
            grad = grad.where(counted[:, None], 0.0).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is None:
                grad_weight = grad.T @ hidden[part]
            else:
                grad_weight.addmm_(grad.T, hidden[part])
        ctx.save_for_backward(grad_hidden, torch.zeros_like(weight) if grad_weight is None else grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grad.to(grad_hidden.dtype)
        return grad_hidden * factor, grad_weight * factor, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over rows of the cross-entropy of `hidden @ weight.T` with `labels`.

    Shapes: hidden (rows, width), weight (vocabulary, width), labels (rows,) int64; rows labelled -100
    are left out of loss and gradient. The result is a float64 scalar (a sum over many tokens).
    Logits are computed in hidden's type, their softmax in float32 or better.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels)
