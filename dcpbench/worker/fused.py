"""What stands between matrix products and attention: norms, activations, heads and their rotation.

On CUDA each is one kernel forward and one backward (`kernels/`); elsewhere it is plain torch, to the same
result within rounding. What passes over a matrix product's output anyway also adds its bias, and what passes
over the gradient of that output sums it up over rows, which is the gradient of the bias: so a bias is handed
to the function that uses the product, where `Linear.bias_for_user` gives it away. A product without a
bias also takes the host a third of the time to start.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcpbench.worker.linear import kernels_serve, main_grad_of


class Rope:
    """Rotary position angles of the rows of one microbatch, made once for all layers."""

    def __init__(self, positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> None:
        # Angles in float64: at position 10^5 a float32 product is already wrong in the fourth digit.
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
        angles = positions.to(torch.float64)[:, None] * theta**-exponents
        self.cos = angles.cos().to(dtype)[:, None, :]
        self.sin = angles.sin().to(dtype)[:, None, :]

    def __call__(self, x_thd: Tensor) -> Tensor:
        """Rotates x (rows, heads, dim), pairing dimension i with i + dim/2."""
        first, second = x_thd.chunk(2, dim=-1)
        return torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, norm: nn.LayerNorm | nn.RMSNorm, branch_bias: Tensor | None
    ) -> tuple[Tensor, Tensor] | Tensor:
        from dcpbench.worker.kernels.norm import add_norm  # noqa: PLC0415 - Triton exists only beside CUDA

        ctx.centred = isinstance(norm, nn.LayerNorm)
        bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
        assert norm.eps is not None
        total, normed, means, scales = add_norm(x, branch, branch_bias, norm.weight, bias, norm.eps, ctx.centred)
        ctx.save_for_backward(total, means, scales, norm.weight)
        ctx.totals = main_grad_of(norm.weight), main_grad_of(bias), main_grad_of(branch_bias)
        ctx.set_materialize_grads(False)
        # Without a branch the stream does not pass through here: autograd adds up its two gradients.
        return normed if branch is None else (total, normed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
        from dcpbench.worker.kernels.norm import add_norm_backward  # noqa: PLC0415

        *stream, grad_normed = grads
        assert grad_normed is not None
        *saved, weight = ctx.saved_tensors
        grad = add_norm_backward(
            grad_normed, stream[0] if stream else None, tuple(saved), weight, ctx.centred, *ctx.totals
        )
        return grad, grad if stream else None, None, None


def add_norm(
    x: Tensor, branch: Tensor | None, norm: nn.LayerNorm | nn.RMSNorm, branch_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(total, norm(total)) with total = x + branch + branch_bias, or x without a branch. Shapes: all (rows, width).

    `branch_bias` (width,) is the bias that the matrix product that made `branch` leaves to this.
    """
    if kernels_serve(x) and main_grad_of(norm.weight) is not None:
        if branch is None:
            return x, _AddNorm.apply(x, None, norm, None)
        return _AddNorm.apply(x, branch, norm, branch_bias)
    total = x if branch is None else x + branch
    return total, norm(total)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, bias: Tensor | None) -> Tensor:
        from dcpbench.worker.kernels import activation  # noqa: PLC0415

        ctx.save_for_backward(inner)
        ctx.bias = bias
        return activation.gelu(inner, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        from dcpbench.worker.kernels import activation  # noqa: PLC0415

        return activation.gelu_backward(grad, ctx.saved_tensors[0], ctx.bias, main_grad_of(ctx.bias)), None


def gelu(inner: Tensor, bias: Tensor | None = None) -> Tensor:
    """GELU, tanh form, of inner + bias (rows, width); `bias` (width,) as the product that made `inner` leaves it."""
    return _Gelu.apply(inner, bias) if kernels_serve(inner) else F.gelu(inner, approximate="tanh")


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor) -> Tensor:
        from dcpbench.worker.kernels import activation  # noqa: PLC0415

        ctx.save_for_backward(inner)
        return activation.swiglu(inner)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        from dcpbench.worker.kernels import activation  # noqa: PLC0415

        return activation.swiglu_backward(grad, ctx.saved_tensors[0])


def swiglu(inner: Tensor) -> Tensor:
    """inner (rows, 2 x width), gate first -> silu(gate) * up, (rows, width)."""
    if kernels_serve(inner):
        return _Swiglu.apply(inner)
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, kv_heads: int, rope: Rope | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        from dcpbench.worker.kernels import rope as kernels  # noqa: PLC0415

        # The rotation is done in place: nothing else has kept the output of the product.
        qkv_thd = qkv.detach().view(len(qkv), heads + 2 * kv_heads, -1)
        ctx.angles = None if rope is None else (rope.cos, rope.sin)
        ctx.bias_grad = main_grad_of(bias)
        if rope is not None:
            kernels.rotate(qkv_thd, heads + kv_heads, rope.cos, rope.sin)
        q_thd, k_thd, v_thd = qkv_thd.split((heads, kv_heads, kv_heads), dim=1)
        return q_thd, k_thd, v_thd

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, None, None, None, None]:
        from dcpbench.worker.kernels import rope as kernels  # noqa: PLC0415

        return kernels.join(grad_q, grad_k, grad_v, ctx.angles, ctx.bias_grad).flatten(1), None, None, None, None


def heads_of(
    qkv: Tensor, heads: int, kv_heads: int, rope: Rope | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q (rows, heads, dim), k and v (rows, kv_heads, dim), q and k rotated, of qkv (rows, all heads x dim).

    `qkv` must not be used otherwise. `bias` is that of the product that made it, if that leaves its gradient to others;
    it has been added.
    """
    if kernels_serve(qkv):
        return _Heads.apply(qkv, heads, kv_heads, rope, bias)
    q_thd, k_thd, v_thd = qkv.view(len(qkv), heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), dim=1)
    return (q_thd, k_thd, v_thd) if rope is None else (rope(q_thd), rope(k_thd), v_thd)
