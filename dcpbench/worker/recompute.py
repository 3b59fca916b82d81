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
    def forward(ctx: Any, run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)  # no graph is recorded inside a function

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.run(*inputs)
        torch.autograd.backward(outputs, grads)
        return None, *(None if x is None else x.grad for x in inputs)


def recomputed(run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """run(*inputs), of which only the inputs are kept for the backward. `run` must give the same result twice."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    result: tuple[Tensor, ...] = _Recomputed.apply(run, *inputs)
    return result


class _LinearOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, run: Callable[[Tensor], Tensor], linear: Linear) -> Tensor:
        ctx.run, ctx.weight_grad, ctx.bias_grad = run, main_grad_of(weight), linear.bias_grad(x)
        ctx.save_for_backward(x, weight)
        return F.linear(run(x), weight, linear.own_bias(x))

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
    return _LinearOf.apply(x, linear.weight, run, linear)
