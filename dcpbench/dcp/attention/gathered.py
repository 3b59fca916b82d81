"""Context-parallel attention by collecting keys and values.

Every rank keeps its own queries, collects the key ranges its pieces see, and calls one kernel; in
the backward the gradients of the key ranges go back to the rows they came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcpbench.dcp.attention.kernels import Kernel
from dcpbench.dcp.attention.layout import DeviceLayout
from dcpbench.dcp.attention.transport import Transport
from dcpbench.dcp.groups import CpGroup


@dataclass(frozen=True)
class GatheredAttention:
    """The attention of one microbatch on one rank: a function of q, k and v that every layer calls."""

    layout: DeviceLayout
    group: CpGroup
    kernel: Kernel
    transport: Transport

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of this rank's rows over its CP group.

        Shapes: q (rows, heads, dim), k and v (rows, kv_heads, dim); the result has q's shape and
        zeros in rows of padding. Collective over the group, and so is its backward.

        Raises:
            ValueError: shapes that do not fit the layout or each other.
        """
        rows = self.layout.rows
        if q.shape[0] != rows or k.shape[0] != rows or k.shape != v.shape:
            raise ValueError(
                f"attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} for {rows} rows"
            )
        if q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
            raise ValueError(
                f"{q.shape[1]} query heads of {q.shape[2]} do not fit {k.shape[1]} KV heads of {k.shape[2]}"
            )
        return _Gathered.apply(q, k, v, self)

    def finish(self) -> None:
        """To be called after the backward of the microbatch."""
        self.transport.finish(self.group)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: GatheredAttention) -> Tensor:
        layout = call.layout
        ctx.call, ctx.shape = call, q.shape
        ctx.keys_shape = k.shape
        if not call.group.alone:
            keys_values = call.transport.collect(k, v, layout, call.group)
            k, v = keys_values[:, 0], keys_values[:, 1]
        elif layout.key_rows is not None:
            k, v = k.index_select(0, layout.key_rows), v.index_select(0, layout.key_rows)
        if layout.pieces == 0:
            # Only padding here; the rank still joins the collectives of its group.
            ctx.saved = None
            return torch.zeros_like(q)
        out, ctx.saved = call.kernel.forward(q, k, v, layout)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: GatheredAttention = ctx.call
        layout, group, saved = call.layout, call.group, ctx.saved
        ctx.saved = None
        rows, kv_heads, dim = ctx.keys_shape
        if group.alone:
            if saved is None:
                nothing = grad.new_zeros(ctx.keys_shape)
                return grad.new_zeros(ctx.shape), nothing, nothing, None
            grad_q, grad_k, grad_v = call.kernel.backward(grad, saved)
            if layout.key_rows is not None:
                grad_k, grad_v = (
                    x.new_zeros((rows, kv_heads, dim)).index_copy_(0, layout.key_rows, x) for x in (grad_k, grad_v)
                )
            return grad_q, grad_k, grad_v, None

        assert layout.key_rows is not None
        grad_kv = call.transport.gradients((len(layout.key_rows), 2, kv_heads, dim), grad)
        if saved is None:
            grad_q = grad.new_zeros(ctx.shape)
        else:
            grad_q, _, _ = call.kernel.backward(grad, saved, grad_kv)
        own = call.transport.give_back(grad_kv, layout, group)
        return grad_q, own[:, 0], own[:, 1], None
