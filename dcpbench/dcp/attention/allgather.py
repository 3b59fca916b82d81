"""Context-parallel attention by one all-gather of keys and values.

Every rank keeps its own queries, gathers the keys and values of its CP group in one collective,
picks for each query piece the real rows it may see, and calls one kernel. The backward scatters
the key and value gradients to the rows they came from and sums them over the group with one
reduce-scatter; below float32 that sum is done in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcpbench.dcp import collectives
from dcpbench.dcp.attention.kernels import Kernel
from dcpbench.dcp.attention.layout import DeviceLayout
from dcpbench.dcp.groups import CpGroup


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: DeviceLayout, group: CpGroup, kernel: Kernel
    ) -> Tensor:
        keys, values = _visible_rows(k, v, layout, group)
        queries = q if layout.query_rows is None else q.index_select(0, layout.query_rows)
        ctx.layout, ctx.group, ctx.kernel = layout, group, kernel
        ctx.shape, ctx.kv_shape = q.shape, k.shape
        ctx.saved = None
        if layout.pieces == 0:
            # Only padding here; the rank still joins the collectives of its group.
            return torch.zeros_like(q)
        out, ctx.saved = kernel.forward(queries, keys, values, layout)
        if layout.query_rows is None:
            return out
        return torch.zeros_like(q).index_copy_(0, layout.query_rows, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout: DeviceLayout = ctx.layout
        rows, kv_heads, dim = ctx.kv_shape
        exact = grad.dtype if grad.dtype in (torch.float32, torch.float64) else torch.float32
        if ctx.saved is None:
            grad_q = grad.new_zeros(ctx.shape)
            grad_k = grad_v = None
        else:
            real = grad if layout.query_rows is None else grad.index_select(0, layout.query_rows)
            grad_q, grad_k, grad_v = ctx.kernel.backward(real, ctx.saved)
            if layout.query_rows is not None:
                grad_q = grad.new_zeros(ctx.shape).index_copy_(0, layout.query_rows, grad_q)
            ctx.saved = None
        if grad_k is not None and layout.key_rows is None:
            return grad_q, grad_k, grad_v, None, None, None

        gathered = grad.new_zeros((rows * layout.size, 2, kv_heads, dim), dtype=exact)
        if grad_k is not None and grad_v is not None and layout.key_rows is not None:
            # A row is visible to at most two pieces of this rank; the sum of two numbers does not
            # depend on their order, so this stays repeatable.
            gathered.index_add_(0, layout.key_rows, torch.stack((grad_k, grad_v), 1).to(exact))
        if ctx.group.alone:
            own = gathered
        else:
            own = gathered.new_empty((rows, 2, kv_heads, dim))
            collectives.reduce_scatter(own, gathered, group=ctx.group.group)
        own = own.to(grad.dtype)
        return grad_q, own[:, 0], own[:, 1], None, None, None


def _visible_rows(k: Tensor, v: Tensor, layout: DeviceLayout, group: CpGroup) -> tuple[Tensor, Tensor]:
    """The key and value rows that the pieces of this rank see, one after the other."""
    if layout.key_rows is None:
        return k, v
    if group.alone:
        return k.index_select(0, layout.key_rows), v.index_select(0, layout.key_rows)
    own = torch.stack((k, v), 1)
    gathered = own.new_empty((layout.rows * layout.size, *own.shape[1:]))
    collectives.all_gather(gathered, own, group=group.group)
    visible = gathered.index_select(0, layout.key_rows)
    return visible[:, 0], visible[:, 1]


def attend(q: Tensor, k: Tensor, v: Tensor, layout: DeviceLayout, group: CpGroup, kernel: Kernel) -> Tensor:
    """Causal attention of this rank's rows over its CP group.

    Shapes: q (rows, heads, dim), k and v (rows, kv_heads, dim); the result has q's shape and zeros
    in rows of padding.

    Raises:
        ValueError: shapes that do not fit the layout or each other.
    """
    if q.shape[0] != layout.rows or k.shape[0] != layout.rows or k.shape != v.shape:
        raise ValueError(
            f"attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} for {layout.rows} rows"
        )
    if q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads of {q.shape[2]} do not fit {k.shape[1]} KV heads of {k.shape[2]}")
    return _AllGatherAttention.apply(q, k, v, layout, group, kernel)
