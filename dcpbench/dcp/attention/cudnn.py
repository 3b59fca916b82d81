"""cuDNN's fused attention through its Python frontend: the fastest kernel on Hopper for long sequences.

One graph serves every microbatch whose number of pieces and longest piece fall into the same
bucket: the true lengths and starts are data, read on the device from int32 lengths and int64
element offsets, so rows of padding are skipped without being copied away.

The forward uses one call with the causal mask aligned to the end of the keys. The backward with
that mask computes the masked half of every rectangle too (measured: 2 x the time); so where a
piece sees rows before its own, its backward is two calls that share the forward's log-sum-exp: the
rows before it without a mask, and the square of its own rows with the plain causal mask.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcpbench.dcp.attention import cudnn_graphs as graphs
from dcpbench.dcp.attention.kernels import Kernel
from dcpbench.dcp.attention.layout import DeviceLayout, to_device
from dcpbench.dcp.packing import AttentionLayout, Ints, offsets_of

HEAD_DIMS = (64, 128)
"""Head sizes for which forward and backward are fused on Hopper."""


LONGEST = 65_536
"""Beyond this length the backward is no longer fused: it asks for a workspace of all scores."""


def usable(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether this kernel can serve on the current CUDA device."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and head_dim in HEAD_DIMS
        and torch.cuda.get_device_capability() >= (9, 0)
        and graphs.frontend() is not None
    )


def bucket(value: int, step: int) -> int:
    """The smallest power of `step` that is at least `value` (and 1)."""
    result = 1
    while result < value:
        result *= step
    return result


@dataclass(frozen=True)
class _Pieces:
    """Some pieces of a layout and a part of what they see, in rows, on the host."""

    query_starts: Ints
    query_counts: Ints
    key_starts: Ints
    key_counts: Ints
    keys: int
    """Rows of the tensors that hold the keys."""

    def bounds(self) -> tuple[int, int, int]:
        """(pieces, longest query, longest key), rounded up so that few graphs serve many microbatches."""
        return (
            bucket(len(self.query_counts), 2),
            bucket(max(int(self.query_counts.max()), 256), 4),
            bucket(max(int(self.key_counts.max()), 256), 4),
        )


def _pieces(host: AttentionLayout) -> dict[str, _Pieces]:
    """What the calls of a layout are made of, by the name of the part."""
    starts, before = offsets_of(host.key_counts)[:-1], host.key_counts - host.query_counts
    keys = host.rows if host.key_rows is None else len(host.key_rows)
    parts = {"whole": _Pieces(host.query_starts, host.query_counts, starts, host.key_counts, keys)}
    late = before > 0
    if late.any():
        queries = host.query_starts, host.query_counts
        # The piece's own rows where they lie in its key range, and where they lie on this rank.
        parts["own"] = _Pieces(*queries, starts + before, host.query_counts, keys)
        parts["local"] = _Pieces(*queries, *queries, host.rows)
        # The rows before it, for the pieces that have any.
        parts["before"] = _Pieces(host.query_starts[late], host.query_counts[late], starts[late], before[late], keys)
    return parts


def _mask(kind: str, part: str, square: bool) -> str:
    """The mask of a call; see `Shape.mask`."""
    if part == "before":
        return "none"
    return "end" if part == "whole" and not square and kind == "forward" else "start"


@dataclass(frozen=True)
class _Call:
    """A compiled graph with what stays the same during a microbatch: the counts and offsets of its pieces."""

    graph: Any
    workspace_bytes: int
    tables: dict[int, Tensor]


class _Parts:
    """The parts of a layout, and the calls made for them."""

    def __init__(self, layout: DeviceLayout) -> None:
        self.pieces = _pieces(layout.host)
        self.square = "before" not in self.pieces
        """Whether every piece sees its own rows only: sequences that are not cut."""
        self.padded = layout.query_rows is not None
        self.device = layout.device
        self.calls: dict[tuple[str, str], _Call] = {}


class CudnnKernel:
    """See the module. One instance per process; it owns a cuDNN handle and the compiled graphs."""

    name = "cudnn"

    def __init__(self, deterministic: bool = False) -> None:
        module = graphs.frontend()
        if module is None:
            raise RuntimeError("the cudnn attention kernel needs the package nvidia-cudnn-frontend")
        self._cudnn = module
        self._handle = module.create_handle()
        self._stream: int | None = None
        # Newer frontends take buffers and their identifiers as two tuples, which costs the host less than a dict.
        self._ordered = "tensor_uids" in inspect.signature(module.pygraph.execute).parameters
        self._deterministic = deterministic
        self._graphs: dict[tuple[str, graphs.Shape, int], tuple[Any, int]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: DeviceLayout) -> tuple[Tensor, Any]:
        """See `Kernel.forward`."""
        q, k, v = aligned(q, k, v)
        out, lse = self.forward_part("whole", q, k, v, layout)
        return out, (q, k, v, out, lse, layout)

    def backward(self, grad: Tensor, saved: Any, into: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        q, k, v, out, lse, layout = saved
        grad_kv = into if into is not None else k.new_empty((len(k), 2, *k.shape[1:]))
        grad = grad.contiguous()
        if self._parts(layout).square:
            grad_q = self.backward_part("whole", grad, q, k, v, out, lse, layout, grad_kv)
        else:
            grad_q = self.backward_part("own", grad, q, k, v, out, lse, layout, grad_kv)
            before = torch.zeros_like(grad_q)
            grad_q += self.backward_part("before", grad, q, k, v, out, lse, layout, grad_kv, before)
        return grad_q, grad_kv[:, 0], grad_kv[:, 1]

    def forward_part(self, part: str, q: Tensor, k: Tensor, v: Tensor, layout: DeviceLayout) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp (rows, heads) of every piece over a part of what it sees.

        `whole`: all of it, k and v being the key ranges. `local`: its own rows, k and v being this
        rank's rows. `before`: the rows before its own, k and v being the key ranges; rows of pieces that
        have none before them are left unwritten. The tensors must be `aligned`.
        """
        parts = self._parts(layout)
        new = torch.zeros if parts.padded else torch.empty
        out = new(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        call = self._call("forward", parts, part, q, k)
        self._run(call, {graphs.Q: q, graphs.K: k, graphs.V: v, graphs.OUT: out, graphs.STATS: lse})
        return out, lse

    def backward_part(
        self,
        part: str,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: DeviceLayout,
        grad_kv: Tensor,
        grad_q: Tensor | None = None,
    ) -> Tensor:
        """The gradient of q from a part (also `own`: as `local`, but in the key ranges).

        `out` and `lse` are those of the whole. Fills `grad_kv` (keys, 2, kv_heads, dim) at the part's rows,
        and `grad_q` where it is given.
        """
        parts = self._parts(layout)
        if grad_q is None:
            grad_q = (torch.zeros if parts.padded else torch.empty)(out.shape, dtype=q.dtype, device=q.device)
        tensors = {
            graphs.Q: q,
            graphs.K: k,
            graphs.V: v,
            graphs.OUT: out,
            graphs.STATS: lse,
            graphs.GRAD: grad,
            graphs.GRAD_Q: grad_q,
            graphs.GRAD_K: grad_kv[:, 0],
            graphs.GRAD_V: grad_kv[:, 1],
        }
        self._run(self._call("backward", parts, part, q, k), tensors)
        return grad_q

    def _parts(self, layout: DeviceLayout) -> _Parts:
        found = layout.tables.get(CudnnKernel)
        if not isinstance(found, _Parts):
            found = layout.tables[CudnnKernel] = _Parts(layout)
        return found

    def _call(self, kind: str, parts: _Parts, part: str, q: Tensor, k: Tensor) -> _Call:
        found = parts.calls.get((kind, part))
        if found is None:
            pieces, device = parts.pieces[part], parts.device
            (_, heads, dim), kv_heads = q.shape, k.shape[1]
            shape = graphs.Shape(*pieces.bounds(), heads, kv_heads, dim, q.dtype, _mask(kind, part, parts.square))
            graph, workspace_bytes = self._compiled(kind, shape, bucket(max(len(q), pieces.keys), 2))
            spare = shape.pieces - len(pieces.query_counts)
            starts_q = to_device(np.pad(pieces.query_starts, (0, spare + 1), mode="edge"), device)
            starts_k = to_device(np.pad(pieces.key_starts, (0, spare + 1), mode="edge"), device)
            found = parts.calls[kind, part] = _Call(
                graph,
                workspace_bytes,
                {
                    graphs.COUNTS_Q: to_device(np.pad(pieces.query_counts, (0, spare)), device, torch.int32),
                    graphs.COUNTS_K: to_device(np.pad(pieces.key_counts, (0, spare)), device, torch.int32),
                    graphs.OFFSETS_Q: starts_q * (heads * dim),
                    graphs.OFFSETS_K: starts_k * (2 * kv_heads * dim),
                    graphs.OFFSETS_STATS: starts_q * heads,
                },
            )
        return found

    def warm(
        self, layout: AttentionLayout, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, overlapped: bool
    ) -> None:
        """Compiles what `layout` will need, so that no iteration waits for it (about 40 ms a graph)."""
        pieces = _pieces(layout)
        square = "before" not in pieces
        forward: tuple[str, ...] = ("whole",)
        backward: tuple[str, ...] = ("whole",) if square else ("own", "before")
        if overlapped and not square:
            forward = backward = ("local", "before")
        for kind, parts in (("forward", forward), ("backward", backward)):
            for part in parts:
                bounds, total = pieces[part].bounds(), bucket(max(layout.rows, pieces[part].keys), 2)
                shape = graphs.Shape(*bounds, heads, kv_heads, dim, dtype, _mask(kind, part, square))
                self._compiled(kind, shape, total)

    def _compiled(self, kind: str, shape: graphs.Shape, total: int) -> tuple[Any, int]:
        key = kind, shape, total if kind == "backward" else 0
        found = self._graphs.get(key)
        if found is None:
            if kind == "forward":
                graph = graphs.forward_graph(self._cudnn, self._handle, shape)
            else:
                graph = graphs.backward_graph(self._cudnn, self._handle, shape, total, self._deterministic)
            found = self._graphs[key] = graph, max(1, graph.get_workspace_size())
        return found

    def _run(self, call: _Call, tensors: dict[int, Tensor]) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        if stream != self._stream:
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            self._stream = stream
        workspace = torch.empty(call.workspace_bytes, dtype=torch.uint8, device=tensors[graphs.Q].device)
        if self._ordered:
            buffers = (*call.tables.values(), *tensors.values())
            call.graph.execute(buffers, workspace, handle=self._handle, tensor_uids=(*call.tables, *tensors))
        else:
            call.graph.execute(call.tables | tensors, workspace, handle=self._handle)


def aligned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q with contiguous rows, k and v side by side: as `Shape` wants them; copies only where they are not."""
    width = k.shape[1] * k.shape[2]
    together = (
        k.stride(0) == 2 * width
        and v.stride(0) == 2 * width
        and v.data_ptr() - k.data_ptr() == (width * k.element_size())
    )
    if not together:
        side_by_side = torch.stack((k, v), 1)
        k, v = side_by_side[:, 0], side_by_side[:, 1]
    return q.contiguous(), k, v


def kernel(deterministic: bool) -> Kernel:
    """The process's cuDNN kernel."""
    return _instance(deterministic)


@functools.cache
def _instance(deterministic: bool) -> CudnnKernel:
    return CudnnKernel(deterministic)
