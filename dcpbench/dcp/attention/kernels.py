"""Causal attention of the query pieces of one rank over their key ranges: the part without communication.

Shapes: q (rows, heads, dim) as the rank holds it, padding included; k and v (keys, kv_heads, dim), the
key ranges of the layout one after the other; the output has q's shape and zeros in rows of padding.
Kernels have an explicit backward, so that the autograd function around them runs the same
collectives on every rank whatever rows the rank holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dcpbench.dcp.attention.layout import DeviceLayout
from dcpbench.dcp.attention.reference import causal_attention

MAX_OFFSET = 2**31


def within_32_bits(tensor: Tensor) -> Tensor:
    """`tensor`, or a contiguous copy where the offset of a row would not fit 32 bits.

    Kernels that compute `row * stride` in 32 bits read or write elsewhere when a strided view
    exceeds them.
    """
    farthest = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.contiguous() if farthest >= MAX_OFFSET and not tensor.is_contiguous() else tensor


class Kernel(Protocol):
    """One way to compute packed causal attention on one rank."""

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: DeviceLayout) -> tuple[Tensor, Any]:
        """The output and what `backward` needs."""

    def backward(self, grad: Tensor, saved: Any, into: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, shaped like them; zeros in q's rows of padding.

        Where `into` (keys, 2, kv_heads, dim) is given, those of k and v are written there, side by
        side, and the tensors returned are its two halves.
        """


def real_rows(x: Tensor, layout: DeviceLayout) -> Tensor:
    """The rows of `x` that are no padding, in order."""
    return x if layout.query_rows is None else x.index_select(0, layout.query_rows)


def spread_rows(real: Tensor, layout: DeviceLayout) -> Tensor:
    """The inverse of `real_rows`: zeros in rows of padding."""
    if layout.query_rows is None:
        return real
    return real.new_zeros((layout.rows, *real.shape[1:])).index_copy_(0, layout.query_rows, real)


def side_by_side(grad_k: Tensor, grad_v: Tensor, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """The two gradients, copied into the halves of `into` where it is given."""
    if into is None:
        return grad_k, grad_v
    into[:, 0].copy_(grad_k)
    into[:, 1].copy_(grad_v)
    return into[:, 0], into[:, 1]


class PieceKernel:
    """Piece by piece through a differentiable function; its own little graph is the saved state."""

    def __init__(self, name: str, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.name = name
        self._attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: DeviceLayout) -> tuple[Tensor, Any]:
        """See `Kernel.forward`."""
        queries, keys = layout.host.query_offsets.tolist(), layout.host.key_offsets.tolist()
        with torch.enable_grad():
            leaves = tuple(x.detach().requires_grad_() for x in (real_rows(q, layout), k, v))
            q, k, v = leaves
            pieces = [
                self._attend(q[queries[i] : queries[i + 1]], k[keys[i] : keys[i + 1]], v[keys[i] : keys[i + 1]])
                for i in range(layout.pieces)
            ]
            out = torch.cat(pieces)
        return spread_rows(out.detach(), layout), (out, leaves, layout)

    def backward(self, grad: Tensor, saved: Any, into: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        out, leaves, layout = saved
        grad_q, grad_k, grad_v = torch.autograd.grad(out, leaves, real_rows(grad, layout))
        return spread_rows(grad_q, layout), *side_by_side(grad_k, grad_v, into)


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One piece through torch's scaled-dot-product attention, which picks a fused kernel where it has one."""
    m, n = len(q), len(k)
    mask = None if m == n else torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


class FlashKernel:
    """All pieces in one launch of torch's variable-length FlashAttention (CUDA; bfloat16 or float16)."""

    name = "flash"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: DeviceLayout) -> tuple[Tensor, Any]:
        """See `Kernel.forward`."""
        q, k, v = within_32_bits(real_rows(q, layout)), within_32_bits(k), within_32_bits(v)
        out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, layout.query_offsets, layout.key_offsets, layout.max_query, layout.max_key, 0.0, True, False
        )
        return spread_rows(out, layout), (q, k, v, out, lse, rng_state, unused, layout)

    def backward(self, grad: Tensor, saved: Any, into: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        q, k, v, out, lse, rng_state, unused, layout = saved
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            within_32_bits(real_rows(grad, layout).contiguous()), q, k, v, out, lse, layout.query_offsets,
            layout.key_offsets, layout.max_query, layout.max_key, 0.0, True, rng_state, unused,
        )  # fmt: skip
        return spread_rows(grad_q, layout), *side_by_side(grad_k, grad_v, into)


REFERENCE = PieceKernel("reference", causal_attention)
SDPA = PieceKernel("sdpa", _scaled_dot_product)
FLASH = FlashKernel()
