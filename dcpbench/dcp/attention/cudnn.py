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
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcpbench.dcp.attention.kernels import Kernel
from dcpbench.dcp.attention.layout import DeviceLayout, to_device
from dcpbench.dcp.packing import Ints, offsets_of

HEAD_DIMS = (64, 128)
"""Head sizes for which forward and backward are fused on Hopper."""

# Identifiers of the tensors of a graph; any distinct numbers do.
_Q, _K, _V, _O, _STATS, _DO, _DQ, _DK, _DV = range(1, 10)
_LEN_Q, _LEN_K, _OFF_Q, _OFF_K, _OFF_O, _OFF_STATS, _OFF_DQ, _OFF_DK = range(10, 18)


@functools.cache
def frontend() -> ModuleType | None:
    """The `cudnn` module (package nvidia-cudnn-frontend), or None where it or cuDNN is missing."""
    try:
        import cudnn  # noqa: PLC0415  # optional, and slow to import
    except (ImportError, OSError):
        return None
    return cudnn


def usable(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether this kernel can serve on the current CUDA device."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and head_dim in HEAD_DIMS
        and torch.cuda.get_device_capability() >= (9, 0)
        and frontend() is not None
    )


def bucket(value: int, step: int) -> int:
    """The smallest power of `step` that is at least `value` (and 1)."""
    result = 1
    while result < value:
        result *= step
    return result


@dataclass(frozen=True)
class _Shape:
    """What a graph is compiled for. Strides are in elements per row."""

    pieces: int
    max_query: int
    max_key: int
    heads: int
    kv_heads: int
    dim: int
    query_stride: int
    key_stride: int
    dtype: torch.dtype
    mask: str
    """`end` (causal, aligned to the last key), `start` (causal, aligned to the first key) or `none`."""


class _Tables:
    """Lengths and starts of the pieces of a layout on the device; element offsets per row stride."""

    def __init__(self, query_starts: Ints, query_counts: Ints, key_starts: Ints, key_counts: Ints,
                 device: torch.device) -> None:  # fmt: skip
        self.pieces = bucket(len(query_counts), 2)
        spare = self.pieces - len(query_counts)
        self.query_counts = to_device(np.pad(query_counts, (0, spare)), device, torch.int32)
        self.key_counts = to_device(np.pad(key_counts, (0, spare)), device, torch.int32)
        self._starts = {
            "q": to_device(np.pad(query_starts, (0, spare + 1), mode="edge"), device),
            "k": to_device(np.pad(key_starts, (0, spare + 1), mode="edge"), device),
        }
        self._offsets: dict[tuple[str, int], Tensor] = {}
        self.max_query = bucket(max(int(query_counts.max()), 256), 4)
        self.max_key = bucket(max(int(key_counts.max()), 256), 4)

    def offsets(self, which: str, stride: int) -> Tensor:
        """Element offsets of the pieces, shape (pieces + 1,) int64."""
        key = which, stride
        if key not in self._offsets:
            self._offsets[key] = self._starts[which] * stride
        return self._offsets[key]


_MASKS = {"local": "start", "before": "none"}


@dataclass(frozen=True)
class _Call:
    """A compiled graph with what stays the same during a microbatch: the lengths and offsets of its pieces."""

    graph: Any
    workspace_bytes: int
    pointers: dict[int, int]


class _Parts:
    """The pieces of a layout as cuDNN sees them, and the calls made for them."""

    def __init__(self, layout: DeviceLayout) -> None:
        host, device = layout.host, layout.device
        starts = offsets_of(host.key_counts)[:-1]
        before = host.key_counts - host.query_counts
        late = before > 0
        self.square = not bool(late.any())
        """Whether every piece sees its own rows only: sequences that are not cut."""
        self.padded = layout.query_rows is not None
        self.tables = {"whole": _Tables(host.query_starts, host.query_counts, starts, host.key_counts, device)}
        if not self.square:
            self.tables |= {
                # The piece's own rows where they lie in its key range, and where they lie on this rank.
                "own": _Tables(host.query_starts, host.query_counts, starts + before, host.query_counts, device),
                "local": _Tables(host.query_starts, host.query_counts, host.query_starts, host.query_counts, device),
                # The rows before it, for the pieces that have any.
                "before": _Tables(host.query_starts[late], host.query_counts[late], starts[late], before[late], device),
            }
        self.calls: dict[tuple[str, str, int, int], _Call] = {}


class CudnnKernel:
    """See the module. One instance per process; it owns a cuDNN handle and the compiled graphs."""

    name = "cudnn"

    def __init__(self, deterministic: bool = False) -> None:
        module = frontend()
        if module is None:
            raise RuntimeError("the cudnn attention kernel needs the package nvidia-cudnn-frontend")
        self._cudnn = module
        self._handle = module.create_handle()
        self._stream: int | None = None
        self._deterministic = deterministic
        self._graphs: dict[tuple[str, _Shape, int], tuple[Any, int]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: DeviceLayout) -> tuple[Tensor, Any]:
        """See `Kernel.forward`."""
        parts = self._parts(layout)
        new = torch.zeros if parts.padded else torch.empty
        out = new(q.shape, dtype=q.dtype, device=q.device)
        stats = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        call = self._call("forward", parts, "whole", "start" if parts.square else "end", q, k)
        self._run(call, {_Q: q, _K: k, _V: v, _O: out, _STATS: stats})
        return out, (q, k, v, out, stats, layout)

    def backward(self, grad: Tensor, saved: Any, into: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        q, k, v, out, stats, layout = saved
        parts = self._parts(layout)
        new = torch.zeros if parts.padded else torch.empty
        grad_q = new(out.shape, dtype=q.dtype, device=q.device)
        grad_kv = into if into is not None else k.new_empty((len(k), 2, *k.shape[1:]))
        tensors = {_Q: q, _K: k, _V: v, _O: out, _STATS: stats, _DO: grad.contiguous(), _DQ: grad_q, _DK: grad_kv,
                   _DV: grad_kv[:, 1]}  # fmt: skip
        if parts.square:
            self._run(self._call("backward", parts, "whole", "start", q, k), tensors)
        else:
            self._run(self._call("backward", parts, "own", "start", q, k), tensors)
            before = torch.zeros_like(grad_q)
            self._run(self._call("backward", parts, "before", "none", q, k), tensors | {_DQ: before})
            grad_q += before
        return grad_q, grad_kv[:, 0], grad_kv[:, 1]

    def forward_part(self, part: str, q: Tensor, k: Tensor, v: Tensor, layout: DeviceLayout) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp (rows, heads) of every piece over a part of what it sees.

        `local`: its own rows, k and v being this rank's rows. `before`: the rows before its own, k and
        v being the key ranges; rows of pieces that have none before them are left unwritten.
        """
        parts = self._parts(layout)
        new = torch.zeros if parts.padded and part == "local" else torch.empty
        out = new(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        call = self._call("forward", parts, part, _MASKS[part], q, k)
        self._run(call, {_Q: q, _K: k, _V: v, _O: out, _STATS: lse})
        return out, lse

    def backward_part(
        self, part: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: DeviceLayout,
        grad_kv: Tensor,
    ) -> Tensor:  # fmt: skip
        """The gradient of q from a part, with the output and log-sum-exp of the whole; fills `grad_kv`, (.., 2, ..)."""
        parts = self._parts(layout)
        new = torch.zeros if parts.padded and part == "local" else torch.empty
        grad_q = new(out.shape, dtype=q.dtype, device=q.device)
        call = self._call("backward", parts, part, _MASKS[part], q, k)
        self._run(
            call,
            {_Q: q, _K: k, _V: v, _O: out, _STATS: lse, _DO: grad, _DQ: grad_q, _DK: grad_kv, _DV: grad_kv[:, 1]},
        )
        return grad_q

    def _parts(self, layout: DeviceLayout) -> _Parts:
        found = layout.tables.get(CudnnKernel)
        if not isinstance(found, _Parts):
            found = layout.tables[CudnnKernel] = _Parts(layout)
        return found

    def _call(self, kind: str, parts: _Parts, part: str, mask: str, q: Tensor, k: Tensor) -> _Call:
        key = kind, part, q.stride(0), k.stride(0)
        found = parts.calls.get(key)
        if found is None:
            tables = parts.tables[part]
            (_, heads, dim), kv_heads = q.shape, k.shape[1]
            shape = _Shape(
                tables.pieces, tables.max_query, tables.max_key, heads, kv_heads, dim, q.stride(0), k.stride(0),
                q.dtype, mask,
            )  # fmt: skip
            graph, workspace_bytes = self._compiled(kind, shape, bucket(max(len(q), len(k)), 2))
            fixed = {
                _LEN_Q: tables.query_counts,
                _LEN_K: tables.key_counts,
                _OFF_Q: tables.offsets("q", q.stride(0)),
                _OFF_K: tables.offsets("k", k.stride(0)),
                _OFF_O: tables.offsets("q", heads * dim),
                _OFF_STATS: tables.offsets("q", heads),
            }
            if kind == "backward":
                fixed[_OFF_DK] = tables.offsets("k", 2 * kv_heads * dim)
            found = parts.calls[key] = _Call(
                graph, workspace_bytes, {uid: tensor.data_ptr() for uid, tensor in fixed.items()}
            )
        return found

    def _compiled(self, kind: str, shape: _Shape, total: int) -> tuple[Any, int]:
        key = kind, shape, total if kind == "backward" else 0
        found = self._graphs.get(key)
        if found is None:
            graph = self._forward_graph(shape) if kind == "forward" else self._backward_graph(shape, total)
            found = self._graphs[key] = graph, max(1, graph.get_workspace_size())
        return found

    def _run(self, call: _Call, tensors: dict[int, Tensor]) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        if stream != self._stream:
            # Telling cuDNN its stream costs more than an attention call on a short pack.
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            self._stream = stream
        workspace = torch.empty(call.workspace_bytes, dtype=torch.uint8, device=tensors[_Q].device)
        pointers = call.pointers | {uid: tensor.data_ptr() for uid, tensor in tensors.items()}
        call.graph._execute(pointers, workspace.data_ptr(), self._handle)

    def _graph(self, dtype: torch.dtype) -> Any:
        types = self._cudnn.data_type
        io = types.BFLOAT16 if dtype == torch.bfloat16 else types.HALF
        return self._cudnn.pygraph(
            io_data_type=io, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=self._handle
        )

    def _mask(self, mask: str) -> dict[str, Any]:
        if mask == "none":
            return {}
        alignment = self._cudnn.diagonal_alignment
        return {
            "diagonal_band_right_bound": 0,
            "diagonal_alignment": alignment.BOTTOM_RIGHT if mask == "end" else alignment.TOP_LEFT,
        }

    def _forward_graph(self, shape: _Shape) -> Any:
        graph = self._graph(shape.dtype)
        inputs = _Inputs(graph, shape, self._cudnn)
        out, stats = graph.sdpa(
            q=inputs.rows(_Q, "q", shape.query_stride, _OFF_Q),
            k=inputs.rows(_K, "k", shape.key_stride, _OFF_K),
            v=inputs.rows(_V, "k", shape.key_stride, _OFF_K),
            generate_stats=True,
            attn_scale=shape.dim**-0.5,
            use_padding_mask=True,
            seq_len_q=inputs.counts(_LEN_Q),
            seq_len_kv=inputs.counts(_LEN_K),
            **self._mask(shape.mask),
        )
        inputs.output(out, _O, "q", shape.heads * shape.dim, _OFF_O)
        stats.set_data_type(self._cudnn.data_type.FLOAT)
        stats.set_uid(_STATS).set_output(True).set_dim((shape.pieces, shape.heads, shape.max_query, 1))
        stats.set_stride((shape.max_query * shape.heads, 1, shape.heads, 1))
        stats.set_ragged_offset(inputs.offsets(_OFF_STATS))
        return self._build(graph)

    def _backward_graph(self, shape: _Shape, total: int) -> Any:
        graph = self._graph(shape.dtype)
        inputs = _Inputs(graph, shape, self._cudnn)
        width = shape.heads * shape.dim
        stats = graph.tensor(
            uid=_STATS,
            dim=(shape.pieces, shape.heads, shape.max_query, 1),
            stride=(shape.max_query * shape.heads, 1, shape.heads, 1),
            data_type=self._cudnn.data_type.FLOAT,
        )
        stats.set_ragged_offset(inputs.offsets(_OFF_STATS))
        grad_q, grad_k, grad_v = graph.sdpa_backward(
            q=inputs.rows(_Q, "q", shape.query_stride, _OFF_Q),
            k=inputs.rows(_K, "k", shape.key_stride, _OFF_K),
            v=inputs.rows(_V, "k", shape.key_stride, _OFF_K),
            o=inputs.rows(_O, "q", width, _OFF_O),
            dO=inputs.rows(_DO, "q", width, _OFF_O),
            stats=stats,
            attn_scale=shape.dim**-0.5,
            use_padding_mask=True,
            seq_len_q=inputs.counts(_LEN_Q),
            seq_len_kv=inputs.counts(_LEN_K),
            max_total_seq_len_q=total,
            max_total_seq_len_kv=total,
            use_deterministic_algorithm=self._deterministic,
            **self._mask(shape.mask),
        )
        inputs.output(grad_q, _DQ, "q", width, _OFF_O)
        inputs.output(grad_k, _DK, "k", 2 * shape.kv_heads * shape.dim, _OFF_DK)
        inputs.output(grad_v, _DV, "k", 2 * shape.kv_heads * shape.dim, _OFF_DK)
        return self._build(graph)

    def _build(self, graph: Any) -> Any:
        modes = self._cudnn.heur_mode
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph


class _Inputs:
    """Declares the tensors of one graph."""

    def __init__(self, graph: Any, shape: _Shape, module: ModuleType) -> None:
        self._graph, self._shape, self._types = graph, shape, module.data_type
        self._io = module.data_type.BFLOAT16 if shape.dtype == torch.bfloat16 else module.data_type.HALF
        self._offsets: dict[int, Any] = {}

    def rows(self, uid: int, which: str, stride: int, offsets: int) -> Any:
        """A packed tensor whose pieces start at the element offsets with that identifier."""
        dim, strides = self._layout(which, stride)
        tensor = self._graph.tensor(uid=uid, dim=dim, stride=strides, data_type=self._io)
        tensor.set_ragged_offset(self.offsets(offsets))
        return tensor

    def output(self, tensor: Any, uid: int, which: str, stride: int, offsets: int) -> None:
        """Marks a result of the graph as a packed output."""
        dim, strides = self._layout(which, stride)
        tensor.set_uid(uid).set_output(True).set_dim(dim).set_stride(strides)
        tensor.set_ragged_offset(self.offsets(offsets))

    def counts(self, uid: int) -> Any:
        """The lengths of the pieces."""
        return self._graph.tensor(
            uid=uid, dim=(self._shape.pieces, 1, 1, 1), stride=(1, 1, 1, 1), data_type=self._types.INT32
        )

    def offsets(self, uid: int) -> Any:
        """The element offsets of the pieces; one tensor however often it is used."""
        if uid not in self._offsets:
            self._offsets[uid] = self._graph.tensor(
                uid=uid, dim=(self._shape.pieces + 1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=self._types.INT64
            )
        return self._offsets[uid]

    def _layout(self, which: str, stride: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape = self._shape
        heads, longest = (shape.heads, shape.max_query) if which == "q" else (shape.kv_heads, shape.max_key)
        return (shape.pieces, heads, longest, shape.dim), (longest * stride, shape.dim, stride, 1)


def kernel(deterministic: bool) -> Kernel:
    """The process's cuDNN kernel."""
    return _instance(deterministic)


@functools.cache
def _instance(deterministic: bool) -> CudnnKernel:
    return CudnnKernel(deterministic)
