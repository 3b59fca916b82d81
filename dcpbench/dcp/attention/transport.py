"""How keys and values reach the ranks of a CP group, and how their gradients come back.

`collect` makes the key ranges of a rank's layout out of what every rank of the group holds;
`give_back` adds up, for every row, the gradients that the ranks of the group found for it. Both are
collective over the group.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dcpbench.dcp import collectives
from dcpbench.dcp.attention.layout import DeviceLayout
from dcpbench.dcp.groups import CpGroup


class Transport(Protocol):
    """Shapes: k, v (rows, kv_heads, dim); key ranges and their gradients (keys, 2, kv_heads, dim)."""

    name: str

    def collect(self, k: Tensor, v: Tensor, layout: DeviceLayout, group: CpGroup) -> Tensor:
        """The key ranges of this rank's pieces, keys and values side by side."""

    def gradients(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Room for the gradients of the key ranges, of `like`'s type, to be filled and handed to `give_back`."""

    def give_back(self, grad_kv: Tensor, layout: DeviceLayout, group: CpGroup) -> Tensor:
        """The summed gradients of this rank's own keys and values, (rows, 2, kv_heads, dim)."""

    def finish(self, group: CpGroup) -> None:
        """Called after the backward of a microbatch: what it used may be used again by another group."""


class CollectiveTransport:
    """One all-gather and one reduce-scatter, by a process group or in a ring of the domain's: works everywhere.

    Below float32 the sum is done in float32. A row is visible to at most two pieces of a rank, and
    the sum of two numbers does not depend on their order, so adding them up stays repeatable.
    """

    name = "collective"

    def collect(self, k: Tensor, v: Tensor, layout: DeviceLayout, group: CpGroup) -> Tensor:
        """See `Transport.collect`."""
        own = torch.stack((k, v), 1)
        gathered = own.new_empty((layout.rows * layout.size, *own.shape[1:]))
        if group.group is None:
            collectives.all_gather_in_row(gathered.view(layout.size, *own.shape), own, group.first)
        else:
            collectives.all_gather(gathered, own, group=group.group)
        assert layout.key_rows is not None
        return gathered.index_select(0, layout.key_rows)

    def gradients(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """See `Transport.gradients`."""
        return like.new_empty(shape)

    def give_back(self, grad_kv: Tensor, layout: DeviceLayout, group: CpGroup) -> Tensor:
        """See `Transport.give_back`."""
        exact = grad_kv.dtype if grad_kv.dtype in (torch.float32, torch.float64) else torch.float32
        everywhere = grad_kv.new_zeros((layout.rows * layout.size, *grad_kv.shape[1:]), dtype=exact)
        assert layout.key_rows is not None
        everywhere.index_add_(0, layout.key_rows, grad_kv.to(exact))
        if group.group is None:
            parts = everywhere.view(layout.size, layout.rows, *grad_kv.shape[1:])
            return collectives.reduce_scatter_in_row(parts, group.first).to(grad_kv.dtype)
        own = everywhere.new_empty((layout.rows, *grad_kv.shape[1:]))
        collectives.reduce_scatter(own, everywhere, group=group.group)
        return own.to(grad_kv.dtype)

    def finish(self, group: CpGroup) -> None:
        """See `Transport.finish`; nothing outlives a collective."""
