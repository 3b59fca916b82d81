"""The attention of a long microbatch on several ranks: communication behind the part that needs none.

A piece attends to its own rows, which this rank holds, and to the rows before it, which must be
collected. While a second stream collects, the kernel works on the own rows; the two partial results
are merged by their log-sum-exps. In the backward the rows before come first, and their gradients
travel back while the kernel works on the own rows. Each part is a call whose mask cuDNN computes
without waste: a square with the plain causal mask, and a rectangle without any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcpbench.dcp.attention.cudnn import CudnnKernel, aligned
from dcpbench.dcp.attention.layout import DeviceLayout, to_device
from dcpbench.dcp.attention.symmetric import SymmetricTransport, add_rows, merge_rows
from dcpbench.dcp.groups import CpGroup
from dcpbench.dcp.packing import Ints, Run, attention_layout, earlier_runs, ranges


@dataclass(frozen=True)
class OverlappedAttention:
    """See the module. Every rank of the group must use it for the microbatch, or none."""

    layout: DeviceLayout
    group: CpGroup
    kernel: CudnnKernel
    transport: SymmetricTransport
    stream: torch.cuda.Stream
    late_rows: Tensor
    """The rows of pieces that see rows before their own."""
    remote_rows: Tensor
    """The layout's `gradient_rows` without each piece's own rows."""
    keys: tuple[int, ...]
    """Rows of every rank's key ranges."""
    earlier: tuple[Run, ...]
    """The copies that bring the rows before each piece's own."""
    found: tuple[tuple[Run, ...], ...]
    """For every rank, the rows of its key ranges that hold gradients of this rank's rows."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of this rank's rows over its CP group; see `GatheredAttention`."""
        return _Overlapped.apply(q, k, v, self)

    def finish(self) -> None:
        """To be called after the backward of the microbatch."""
        self.transport.finish(self.group)


MOST_RUNS = 48
"""With more copies than this, starting them takes longer than they hide."""


def prepare(
    layout: DeviceLayout, group: CpGroup, kernel: CudnnKernel, transport: SymmetricTransport, stream: torch.cuda.Stream
) -> OverlappedAttention | None:
    """The attention of one microbatch, or None where it would take too many copies.

    `stream` is where communication runs. The answer may differ between the ranks of a group: what
    they send and where they meet is the same either way.
    """
    host = layout.host
    late = host.key_counts > host.query_counts
    peers = [attention_layout(host.lengths, host.padded, host.size, rank, host.rows) for rank in range(host.size)]
    runs = [earlier_runs(peer) for peer in peers]
    earlier = runs[group.rank]
    # In the backward a run's rows stay where they are in the peer's key ranges; only those of this rank matter.
    found = [
        [Run(run.rank, run.target, run.target, run.count) for run in own if run.rank == group.rank] for own in runs
    ]
    if len(earlier) + sum(map(len, found)) > MOST_RUNS:
        return None
    return OverlappedAttention(
        layout,
        group,
        kernel,
        transport,
        stream,
        to_device(ranges(host.query_starts[late], host.query_counts[late]), layout.device, torch.int32),
        to_device(_without_own(host.gradient_rows, host.padded, group), layout.device, torch.int32),
        tuple(int(peer.key_counts.sum()) for peer in peers),
        tuple(earlier),
        tuple(map(tuple, found)),
    )


def _without_own(gradient_rows: Ints | None, padded: Ints, group: CpGroup) -> Ints:
    """`gradient_rows` without the entries that a piece holds for its own rows."""
    assert gradient_rows is not None
    table = gradient_rows.copy()
    chunk = padded // (2 * group.size)
    # Rows alternate between the two chunks a rank holds of each sequence.
    starts = 2 * (chunk.cumsum() - chunk)
    table[ranges(starts, chunk), 2 * group.rank] = -1
    table[ranges(starts + chunk, chunk), 2 * group.rank + 1] = -1
    return table


class _Overlapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: OverlappedAttention) -> Tensor:
        layout, kernel = call.layout, call.kernel
        q, k, v = aligned(q, k, v)
        main = torch.cuda.current_stream()
        call.stream.wait_stream(main)
        with torch.cuda.stream(call.stream):
            keys_values = call.transport.copy_earlier(k, v, layout, call.group, call.earlier)
        out, lse = kernel.forward_part("local", q, k, v, layout)
        main.wait_stream(call.stream)
        # The allocator must not hand this memory out on the other stream while this one reads it.
        keys_values.record_stream(main)
        if len(call.late_rows):
            before, before_lse = kernel.forward_part("before", q, keys_values[:, 0], keys_values[:, 1], layout)
            merge_rows(out, before, lse, before_lse, call.late_rows)
        ctx.call = call
        ctx.save_for_backward(q, k, v, keys_values, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: OverlappedAttention = ctx.call
        layout, kernel, group = call.layout, call.kernel, call.group
        q, k, v, keys_values, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        main = torch.cuda.current_stream()
        grad_ranges = call.transport.gradients(tuple(keys_values.shape), grad)
        before: Tensor | None = None
        if len(call.late_rows):
            before = kernel.backward_part(
                "before", grad, q, keys_values[:, 0], keys_values[:, 1], out, lse, layout, grad_ranges
            )
        call.stream.wait_stream(main)
        with torch.cuda.stream(call.stream):
            copies = call.transport.copy_found(call.keys, call.found, group)
        # Rows of padding are nobody's gradient; the kernel leaves them as they are.
        grad_own = torch.zeros((len(k), 2, *k.shape[1:]), dtype=k.dtype, device=k.device)
        grad_q = kernel.backward_part("local", grad, q, k, v, out, lse, layout, grad_own)
        if before is not None:
            add_rows(grad_q, before, call.late_rows)
        main.wait_stream(call.stream)
        for copy in copies:
            copy.record_stream(main)
        own = call.transport.add_up(copies, grad_own, call.remote_rows)
        return grad_q, own[:, 0], own[:, 1], None
