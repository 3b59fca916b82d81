"""Keys and values over NVLink without a collective library: peers read each other's memory.

Every rank copies its rows into a buffer that its peers have mapped, the group meets in one barrier
on the device, and one kernel picks each row of the key ranges from the rank that holds it:
communication and reordering in one pass, no copy in between. The way back is the same: every
rank's kernel has written its gradients into a mapped buffer, and each owner adds up in float32 what
the others found for its rows.

Buffers come in pairs used in turn. A rank writes to a buffer again only after the barrier of the
operation in between, which its peers reach after they have read what was there before. That holds
within one group; `finish` is the barrier that makes it hold from one group to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed._symmetric_memory as symmetric_memory
import triton
import triton.language as tl
from torch import Tensor

from dcpbench.dcp.attention.layout import DeviceLayout, to_device
from dcpbench.dcp.groups import CpGroup, RuntimeGroups
from dcpbench.dcp.packing import Run


@triton.jit
def _put(k, v, out, k_stride, v_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    target = out + row * (2 * WIDTH) + columns
    tl.store(target, tl.load(k + row * k_stride + columns, mask=inside), mask=inside)
    tl.store(target + WIDTH, tl.load(v + row * v_stride + columns, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _pick(peers, origins, out, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    # Row r of the result is row origins[r] of all ranks' rows, one rank after the other. `rows` differs
    # between microbatches; specialised, the kernel would be compiled again in the middle of a run.
    row = tl.program_id(0).to(tl.int64)
    origin = tl.load(origins + row)
    source = tl.load(peers + origin // rows).to(tl.pointer_type(out.dtype.element_ty))
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(source + (origin % rows) * WIDTH + columns, mask=inside)
    tl.store(out + row * WIDTH + columns, values, mask=inside)


@triton.jit
def _add_up(
    peers, table, out, extra, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, EXTRA: tl.constexpr
):
    # Row r of the result is the sum over c of row table[r, c] of rank c // 2; -1 stands for nothing;
    # plus row r of `extra` where EXTRA.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if EXTRA:
        total += tl.load(extra + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    for column in range(COLUMNS):
        found = tl.load(table + row * COLUMNS + column).to(tl.int64)
        source = tl.load(peers + column // 2).to(tl.pointer_type(out.dtype.element_ty))
        total += tl.load(source + found * WIDTH + columns, mask=inside & (found >= 0), other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merge(out, other, lse, other_lse, rows, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    # Two partial attentions of one row become one, in place: weights from their log-sum-exps.
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HEADS * DIM
    place = row * (HEADS * DIM) + columns
    head = row * HEADS + columns // DIM
    one = tl.load(lse + head, mask=inside, other=0.0)
    two = tl.load(other_lse + head, mask=inside, other=0.0)
    top = tl.maximum(one, two)
    both = top + tl.log(tl.exp(one - top) + tl.exp(two - top))
    a = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(other + place, mask=inside, other=0.0).to(tl.float32)
    merged = a * tl.exp(one - both) + b * tl.exp(two - both)
    # All reads of the row's log-sum-exps precede the one write of each.
    tl.debug_barrier()
    tl.store(out + place, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + head, both, mask=inside & (columns % DIM == 0))


@triton.jit
def _add_rows(total, part, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    place = row * WIDTH + columns
    added = tl.load(total + place, mask=inside).to(tl.float32) + tl.load(part + place, mask=inside).to(tl.float32)
    tl.store(total + place, added.to(total.dtype.element_ty), mask=inside)


def merge_rows(out: Tensor, other: Tensor, lse: Tensor, other_lse: Tensor, rows: Tensor) -> None:
    """Merges a second partial attention into the first, in place, at the given rows.

    Shapes: out, other (rows, heads, dim); lse, other_lse (rows, heads) float32, natural logarithm.
    """
    heads, dim = out.shape[1:]
    if len(rows):
        _merge[(len(rows),)](out, other, lse, other_lse, rows, heads, dim, triton.next_power_of_2(heads * dim))


def add_rows(total: Tensor, part: Tensor, rows: Tensor) -> None:
    """total[rows] += part[rows], in place, added in float32; both contiguous and of one shape."""
    width = math.prod(total.shape[1:])
    if len(rows):
        _add_rows[(len(rows),)](total, part, rows, width, triton.next_power_of_2(width))


class _Pair:
    """Two mapped buffers used in turn, with the addresses of every peer's, for each group of this rank."""

    def __init__(self, elements: int, groups: RuntimeGroups, dtype: torch.dtype, device: torch.device) -> None:
        self._buffers = [symmetric_memory.empty(elements, dtype=dtype, device=device) for _ in range(2)]
        self._turn = 0
        self._handles: dict[int, list[Any]] = {}
        self._peers: dict[int, list[Tensor]] = {}
        self._views: dict[int, list[list[Tensor]]] = {}
        self._channels: dict[int, int] = {}
        taken = 0
        for group in sorted(groups.shared, key=lambda group: group.size):
            # A barrier on channel c of a group of k ranks signals in places [c x k, c x k + k); ranks of
            # one group may still wait while others are in the next, so no two sizes share a place.
            self._channels[group.size] = -(-taken // group.size)
            taken = (self._channels[group.size] + 1) * group.size
            handles = [_map(buffer, group) for buffer in self._buffers]
            self._handles[group.size] = handles
            self._views[group.size] = [
                [handle.get_buffer(rank, (elements,), dtype) for rank in range(group.size)] for handle in handles
            ]
            self._peers[group.size] = [
                torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=device)
                for views in self._views[group.size]
            ]

    def next(self, elements: int) -> Tensor:
        """The first `elements` of the buffer whose turn it is."""
        self._turn ^= 1
        return self._buffers[self._turn][:elements]

    def meet(self, group: CpGroup) -> Tensor:
        """Waits on the device until every rank of the group has come this far; the addresses of its buffers."""
        self._handles[group.size][self._turn].barrier(channel=self._channels[group.size])
        return self._peers[group.size][self._turn]

    def views(self, group: CpGroup) -> list[Tensor]:
        """The buffer whose turn it is, of every rank of the group, flat."""
        return self._views[group.size][self._turn]


class SymmetricTransport:
    """See the module. `rows` is the most rows a rank may hold, `width` kv_heads x dim."""

    name = "symmetric"

    def __init__(self, groups: RuntimeGroups, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        largest = max(group.size for group in groups.shared)
        self._width = width
        self._block = triton.next_power_of_2(width)
        self._block2 = triton.next_power_of_2(2 * width)
        # The key ranges of a rank hold (k + 1/2) times its rows, and a padded chunk may round them up.
        self._sent = _Pair(rows * 2 * width, groups, dtype, device)
        self._found = _Pair((largest * rows + rows) * 2 * width, groups, dtype, device)

    def collect(self, k: Tensor, v: Tensor, layout: DeviceLayout, group: CpGroup) -> Tensor:
        """See `Transport.collect`."""
        width = self._width
        own = self._sent.next(layout.rows * 2 * width)
        _put[(layout.rows,)](_flat(k), _flat(v), own, k.stride(0), v.stride(0), width, self._block)
        peers = self._sent.meet(group)
        assert layout.key_rows is not None
        keys = len(layout.key_rows)
        out = k.new_empty((keys, 2, *k.shape[1:]))
        if keys:
            _pick[(keys,)](peers, layout.key_rows, out, layout.rows, 2 * width, self._block2)
        return out

    def gradients(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """See `Transport.gradients`."""
        return self._found.next(math.prod(shape)).view(shape)

    def give_back(self, grad_kv: Tensor, layout: DeviceLayout, group: CpGroup) -> Tensor:
        """See `Transport.give_back`."""
        peers = self._found.meet(group)
        assert layout.gradient_rows is not None
        out = grad_kv.new_empty((layout.rows, *grad_kv.shape[1:]))
        _add_up[(layout.rows,)](
            peers, layout.gradient_rows, out, out, 2 * self._width, self._block2, 2 * group.size, False
        )
        return out

    def copy_earlier(self, k: Tensor, v: Tensor, layout: DeviceLayout, group: CpGroup, runs: Sequence[Run]) -> Tensor:
        """As `collect`, but only the rows of `runs` and by copies, which leave the multiprocessors free."""
        width = self._width
        own = self._sent.next(layout.rows * 2 * width)
        _put[(layout.rows,)](_flat(k), _flat(v), own, k.stride(0), v.stride(0), width, self._block)
        self._sent.meet(group)
        assert layout.key_rows is not None
        out = k.new_empty((len(layout.key_rows), 2, *k.shape[1:]))
        flat, peers = out.view(len(out), -1), self._sent.views(group)
        for run in runs:
            peer = peers[run.rank].view(-1, 2 * width)
            flat[run.target : run.target + run.count].copy_(peer[run.source : run.source + run.count])
        return out

    def copy_found(self, keys: Sequence[int], runs: Sequence[Sequence[Run]], group: CpGroup) -> list[Tensor]:
        """What each rank's key ranges hold for this rank's rows, copied here: a tensor per rank, (keys, row) flat.

        `keys[j]` is the number of rows of rank j's key ranges and `runs[j]` which of them to copy; a run's
        source and target are the same rows there and here. This rank's own entry is its buffer itself.
        """
        self._found.meet(group)
        copies = []
        for rank, view in enumerate(self._found.views(group)):
            theirs = view[: keys[rank] * 2 * self._width].view(keys[rank], 2 * self._width)
            if rank == group.rank:
                copies.append(theirs)
                continue
            here = torch.empty_like(theirs)
            for run in runs[rank]:
                rows = slice(run.target, run.target + run.count)
                here[rows].copy_(theirs[rows])
            copies.append(here)
        return copies

    def add_up(self, copies: Sequence[Tensor], extra: Tensor, table: Tensor) -> Tensor:
        """`extra` plus what `copies` hold for each row by `table` (rows, 2 x size), added in float32."""
        peers = to_device(np.array([copy.data_ptr() for copy in copies]), table.device)
        out = torch.empty_like(extra)
        _add_up[(len(table),)](
            peers, table, out, extra, 2 * self._width, self._block2, table.shape[1], True, num_warps=8
        )
        return out

    def finish(self, group: CpGroup) -> None:
        """See `Transport.finish`."""
        if not group.alone:
            self._found.meet(group)


def _map(buffer: Tensor, group: CpGroup) -> Any:
    """Maps `buffer` into every rank of the group; collective over it."""
    assert group.group is not None
    return symmetric_memory.rendezvous(buffer, group=group.group)


def _flat(x: Tensor) -> Tensor:
    """(rows, heads, dim) whose rows are contiguous, whatever their stride."""
    rows_contiguous = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if rows_contiguous else x.contiguous()
