"""Activations computed a second time in the backward instead of being kept.

`full` keeps only the input of each block. `selective` keeps what matrix products and attention
have computed and repeats only what is cheap: norms and the activation function in front of a matrix product.

Both run the backward of the repeated part inside the backward of the function. Collectives in a
repeated part run again: on every rank of the group, and in the same order, since all run the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcpbench.worker.linear import Linear, add_bias_gradient, add_product, main_grad_of


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)  # no graph is recorded inside a function

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = ctx.run(x)
        torch.autograd.backward(out, grad)
        return x.grad, None


def recomputed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """run(x), of which only `x` is kept for the backward. `run` must give the same result twice."""
    if not torch.is_grad_enabled():
        return run(x)
    return _Recomputed.apply(x, run)


class _LinearOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.run, ctx.weight_grad, ctx.bias_grad = run, main_grad_of(weight), main_grad_of(bias)
        ctx.save_for_backward(x, weight)
        return F.linear(run(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            inner = ctx.run(x)
        add_product(ctx.weight_grad, grad, inner.detach())
        add_bias_gradient(ctx.bias_grad, grad)
        torch.autograd.backward(inner, grad @ weight)
        return x.grad, None, None, None


def linear_of(linear: Linear, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """linear(run(x)), keeping `x` but not run(x)."""
    if not torch.is_grad_enabled() or main_grad_of(linear.weight) is None:
        return linear(run(x))
    return _LinearOf.apply(x, run, linear.weight, linear.bias)
