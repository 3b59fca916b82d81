"""Keys and values over NVLink without a collective library: peers read each other's memory.

Every rank copies its rows into a buffer that its peers have mapped, the group meets in one barrier
on the device, and one kernel picks each row of the key ranges from the rank that holds it:
communication and reordering in one pass, no copy in between. The way back is the same: every
rank's kernel has written its gradients into a mapped buffer, and each owner adds up in float32 what
the others found for its rows.

The memory is mapped once, by the whole domain, and any ranks in a row may meet in it; `mapped` says why
that is safe. The whole domain meets by the library's barrier, which takes the host less time to start;
fewer ranks by a kernel of our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import triton
import triton.language as tl
from torch import Tensor

from dcpbench.dcp.attention.layout import DeviceLayout, to_device
from dcpbench.dcp.attention.mapped import MappedPair
from dcpbench.dcp.groups import CpGroup, RuntimeGroups
from dcpbench.dcp.launching import kernel
from dcpbench.dcp.packing import Run

ALIGNMENT = 256
"""Mapped buffers start at multiples of so many elements."""


@kernel()
def _put(k, v, out, k_stride, v_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    target = out + row * (2 * WIDTH) + columns
    tl.store(target, tl.load(k + row * k_stride + columns, mask=inside), mask=inside)
    tl.store(target + WIDTH, tl.load(v + row * v_stride + columns, mask=inside), mask=inside)


@kernel(numbers=("rows",))
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


@kernel()
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


@kernel()
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


@kernel()
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


@kernel(numbers=("first", "size", "rank"))
def _signal_and_wait(signals, meetings, first, size, rank, LANES: tl.constexpr):
    # One lane for each member but this rank; `meetings` counts those with each of them. Release and acquire
    # order what this rank wrote before, in earlier kernels, and what it reads afterwards.
    lane = tl.arange(0, LANES)
    member = first + lane
    other = (lane < size) & (member != rank)
    now = tl.load(meetings + member, mask=other, other=0) + 1
    tl.store(meetings + member, now, mask=other)
    theirs = tl.load(signals + member, mask=other, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs + rank, now, mask=other, sem="release", scope="sys")
    own = tl.load(signals + rank).to(tl.pointer_type(tl.int32))
    nothing = tl.zeros([LANES], dtype=tl.int32)
    missing = 1
    while missing > 0:
        come = tl.atomic_add(own + member, nothing, mask=other, sem="acquire", scope="sys")
        # The difference, as counters may wrap around.
        missing = tl.max(tl.where(other, now - come, 0))


class Meetings:
    """Where any ranks in a row of the domain meet on the device; see `mapped`.

    `handle` is the mapped memory, at whose start every rank has a counter (int32) for each rank. Collective
    over the domain. `library` says whether the whole domain meets by the library's own barrier.
    """

    def __init__(self, handle: Any, groups: RuntimeGroups, device: torch.device, *, library: bool) -> None:
        world = groups.world
        self._handle, self._rank = handle, groups.rank
        self._by_library = world if library else 0
        # A lane for each thread, or several: atomics of lanes that threads share have no defined result.
        self._lanes = max(32, triton.next_power_of_2(world))
        views = [handle.get_buffer(rank, (world,), torch.int32) for rank in range(world)]
        views[groups.rank].zero_()
        self._signals = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=device)
        self._meetings = torch.zeros(world, dtype=torch.int32, device=device)
        # No rank may signal before the others have cleared their counters.
        handle.barrier(channel=0)
        if self._by_library == 0 or any(1 < size < world for size in groups.sizes):
            self._meet(0, world)  # compiled now instead of in the first job that needs it

    def meet(self, group: CpGroup) -> None:
        """Waits on the device until every rank of the group has come this far."""
        if group.size == self._by_library:
            self._handle.barrier(channel=0)
        else:
            self._meet(group.first, group.size)

    def _meet(self, first: int, size: int) -> None:
        _signal_and_wait[(1,)](self._signals, self._meetings, first, size, self._rank, self._lanes, num_warps=1)


class SymmetricTransport:
    """See the module. `rows` is the most rows a rank may hold, `width` kv_heads x dim; collective over the domain.

    `library_barrier=False` lets the whole domain, too, meet by our own kernel.
    """

    name = "symmetric"

    def __init__(
        self,
        groups: RuntimeGroups,
        rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        library_barrier: bool = True,
    ) -> None:
        self._width = width
        self._block = triton.next_power_of_2(width)
        self._block2 = triton.next_power_of_2(2 * width)
        # The key ranges of a rank hold (k + 1/2) times its rows, and a padded chunk may round them up.
        sent, found = rows * 2 * width, (groups.largest * rows + rows) * 2 * width
        offsets = [-(-groups.world * 4 // dtype.itemsize)]  # behind the counters
        for elements in (sent, sent, found, found):
            offsets[-1] = -(-offsets[-1] // ALIGNMENT) * ALIGNMENT
            offsets.append(offsets[-1] + elements)
        self._memory = symmetric_memory.empty(offsets[-1], dtype=dtype, device=device)
        assert dist.group.WORLD is not None
        handle = symmetric_memory.rendezvous(self._memory, group=dist.group.WORLD)
        views = [
            [handle.get_buffer(rank, (elements,), dtype, offset) for rank in range(groups.world)]
            for elements, offset in zip((sent, sent, found, found), offsets, strict=False)
        ]
        self._sent, self._found = MappedPair(views[:2], groups.rank), MappedPair(views[2:], groups.rank)
        self._meetings = Meetings(handle, groups, device, library=library_barrier)
        self._compile([size for size in groups.sizes if size > 1], dtype, device)

    def collect(self, k: Tensor, v: Tensor, layout: DeviceLayout, group: CpGroup) -> Tensor:
        """See `Transport.collect`."""
        width = self._width
        own = self._sent.next(layout.rows * 2 * width)
        _put[(layout.rows,)](_flat(k), _flat(v), own, k.stride(0), v.stride(0), width, self._block)
        self._meetings.meet(group)
        peers = self._sent.addresses(group)
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
        self._meetings.meet(group)
        peers = self._found.addresses(group)
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
        self._meetings.meet(group)
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
        self._meetings.meet(group)
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
        if group.alone:
            return
        self._meetings.meet(group)
        self._sent.start_over()
        self._found.start_over()

    def _compile(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Compiles now what is compiled for each group size, instead of in the first job that has it."""
        out = torch.empty(1, 2 * self._width, dtype=dtype, device=device)
        for size in sizes:
            nothing = torch.full((1, 2 * size), -1, dtype=torch.int32, device=device)
            peers = torch.zeros(size, dtype=torch.int64, device=device)
            _add_up[(1,)](peers, nothing, out, out, 2 * self._width, self._block2, 2 * size, False)
            _add_up[(1,)](peers, nothing, out, out, 2 * self._width, self._block2, 2 * size, True, num_warps=8)


def _flat(x: Tensor) -> Tensor:
    """(rows, heads, dim) whose rows are contiguous, whatever their stride."""
    rows_contiguous = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if rows_contiguous else x.contiguous()
