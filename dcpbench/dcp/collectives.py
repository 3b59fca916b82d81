"""Collectives of a process group, and of any ranks in a row without one.

The single-tensor collectives go by the names that the installed torch wants: 2.13 renamed
`all_gather_into_tensor` and `reduce_scatter_tensor` and warns at every use of the old names; older
releases know only those.

Ranks in a row gather and add up in a ring of sends and receives of the domain's communicator. Only the
members take part, so other groups work at the same time, and nothing is made for a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output (k x rows, ...), input (rows, ...), group=...): the inputs of all ranks, rank by rank."""

reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(output (rows, ...), input (k x rows, ...), group=...): this rank's part of the sum over ranks."""

LONGEST_HOP = 2
"""How far a rank's neighbours in any ring lie at most: a rank of any group talks to at most four others."""


@functools.cache
def ring(size: int) -> tuple[int, ...]:
    """The order in which the members of a group stand in its ring: even ones upwards, then odd ones downwards.

    Neighbours, the last and the first included, are at most `LONGEST_HOP` ranks apart, so that a rank
    meets the same few peers whatever the groups are.
    """
    return (*range(0, size, 2), *reversed(range(1, size, 2)))


def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
    """Sends and receives contiguous tensors, each to or from a rank of the world, as one operation.

    On CUDA the current stream waits for it and the host does not. Every send needs its receive in the
    operation that the peer issues at its own turn; other ranks need not take part.
    """
    operations = [
        *(dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sends),
        *(dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in receives),
    ]
    # In a batch, NCCL takes the communicator that is there already instead of one for each pair of ranks.
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def all_gather_in_row(output: Tensor, own: Tensor, first: int) -> None:
    """`all_gather` over ranks [first, first + k) of the world: output (k, ...) gets each member's `own` (...)."""
    size = len(output)
    order, place, after, before = _neighbours(size, dist.get_rank() - first)
    output[order[place]].copy_(own)
    for step in range(size - 1):
        # What came in the step before goes on: block by block around the ring.
        held, wanted = order[(place - step) % size], order[(place - step - 1) % size]
        exchange([(output[held], first + after)], [(output[wanted], first + before)])


def reduce_scatter_in_row(parts: Tensor, first: int) -> Tensor:
    """`reduce_scatter` over ranks [first, first + k) of the world: the sum of all members' parts[own place].

    `parts` (k, ...) is used up. Each sum is made in the order of the ring, so it repeats bit for bit.
    """
    size = len(parts)
    order, place, after, before = _neighbours(size, dist.get_rank() - first)
    arrived = parts.new_empty(parts.shape[1:])
    for step in range(size - 1):
        held, wanted = order[(place - step - 1) % size], order[(place - step - 2) % size]
        exchange([(parts[held], first + after)], [(arrived, first + before)])
        parts[wanted].add_(arrived)
    return parts[order[place]]


def _neighbours(size: int, member: int) -> tuple[tuple[int, ...], int, int, int]:
    """The ring, this member's place in it, and the members after and before it."""
    order = ring(size)
    place = order.index(member)
    return order, place, order[(place + 1) % size], order[place - 1]
