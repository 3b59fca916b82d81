"""Linear layers and embeddings that add their weight gradients to the gradient buffer themselves.

`FlatParameters` gives every parameter `main_grad`, its view of the flat gradient buffer. A layer
whose weight has one adds to it inside its backward, in the buffer's type: on CUDA one matrix product
that accumulates in float32, where autograd would write a gradient in the compute type, add it
to the buffer with a second kernel and free it. A weight without `main_grad` gets an ordinary gradient.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def main_grad_of(parameter: Tensor | None) -> Tensor | None:
    """The gradient buffer of a parameter, shaped like it, where it has one."""
    return getattr(parameter, "main_grad", None)


def kernels_serve(x: Tensor) -> bool:
    """Whether the Triton kernels of `kernels/` are used for this tensor."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def products_accumulate(device: torch.device, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether `addmm` multiplies in `narrow` and adds to `wide` on this device, without rounding in between."""
    ones = torch.ones(16, 16, dtype=narrow, device=device)
    total = torch.full((16, 16), 2.0**-12, dtype=wide, device=device)
    try:
        torch.addmm(total, ones.T, ones, out_dtype=wide, out=total)
    except (TypeError, RuntimeError):  # no such argument, or no such kernel
        return False
    return bool((total == 16 + 2.0**-12).all())


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a.T @ b, in place and in total's type. Shapes: total (m, n), a (rows, m), b (rows, n)."""
    if len(a) == 0:
        return
    if total.dtype == a.dtype:
        total.addmm_(a.T, b)
    elif products_accumulate(a.device, a.dtype, total.dtype):
        torch.addmm(total, a.T, b, out_dtype=total.dtype, out=total)
    else:
        total += a.T @ b


def product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b, for sums so long that a kernel splits them, which are then added up in float32.

    A product with few outputs and many terms, such as one over all words of a vocabulary, is cut into several whose
    results are added; in the type of a bfloat16 output each addition would round (relative errors of 7e-3 where
    one rounding makes 2e-3). Shapes: a (m, terms), b (terms, n), out (m, n) of one type.
    """
    wider = out.dtype in (torch.bfloat16, torch.float16)
    if wider and products_accumulate(out.device, out.dtype, torch.float32):
        out.copy_(torch.mm(a, b, out_dtype=torch.float32))
    else:
        torch.mm(a, b, out=out)


def add_bias_gradient(total: Tensor | None, grad: Tensor) -> None:
    """total += the sum of grad (rows, out) over its rows, formed in total's type; nothing without a total."""
    if total is not None:
        total += grad.sum(0, dtype=total.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, bias_grad: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight_grad, ctx.bias_grad = main_grad_of(weight), bias_grad
        return F.linear(x, weight, bias) if bias is not None or x.ndim != 2 else x.mm(weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        add_product(ctx.weight_grad, grad, x)
        add_bias_gradient(ctx.bias_grad, grad)
        return grad.mm(weight) if ctx.needs_input_grad[0] else None, None, None, None


class Linear(nn.Linear):
    """x (rows, in) -> x @ weight.T + bias (rows, out).

    Args:
        inputs: columns of x.
        outputs: columns of the result.
        bias: whether there is one.
        user_does: what the user of the result does about the bias on CUDA, while it passes over the result or its
            gradient anyway (see `fused.py`): nothing; sum its `gradient`; or `all`, which is to add it as well.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        *,
        user_does: Literal["nothing", "gradient", "all"] = "nothing",
    ) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self._user_does = user_does

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        if main_grad_of(self.weight) is None:
            return F.linear(input, self.weight, self.bias)
        return _Linear.apply(input, self.weight, self.own_bias(input), self.bias_grad(input))

    def own_bias(self, input: Tensor) -> Tensor | None:
        """The bias, where this layer adds it."""
        return None if self._user_does == "all" and self._has_user(input) else self.bias

    def bias_grad(self, input: Tensor) -> Tensor | None:
        """Where this layer's own backward adds the gradient of its bias, if it is the one to do so."""
        return None if self._has_user(input) else main_grad_of(self.bias)

    def bias_for_user(self, input: Tensor) -> Tensor | None:
        """The bias, where the user of the result does something about it; `input` is any tensor of the layer's type."""
        return self.bias if self._has_user(input) else None

    def _has_user(self, input: Tensor) -> bool:
        return self._user_does != "nothing" and kernels_serve(input) and main_grad_of(self.weight) is not None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.weight_grad = main_grad_of(weight)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        (indices,) = ctx.saved_tensors
        # Many rows may share an index; their sum is formed in the buffer's type. In arbitrary order
        # on CUDA, unless deterministic algorithms are on: index_add_ then sorts.
        ctx.weight_grad.index_add_(0, indices, grad.to(ctx.weight_grad.dtype))
        return None, None


class Embedding(nn.Embedding):
    """Indices (rows,) -> rows of the table (rows, width)."""

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        if main_grad_of(self.weight) is None:
            return F.embedding(input, self.weight)
        return _Embedding.apply(input, self.weight)
