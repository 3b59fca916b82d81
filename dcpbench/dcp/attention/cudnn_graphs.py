"""The graphs that cuDNN compiles for packed attention, through its Python frontend.

A graph is made for a `Shape`: how many pieces, how long the longest, which strides, which mask. What
differs between microbatches of one shape is data: int32 lengths and int64 element offsets of the
pieces, read on the device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

# Identifiers of the tensors of a graph; any distinct numbers do.
Q, K, V, OUT, STATS, GRAD, GRAD_Q, GRAD_K, GRAD_V = range(1, 10)
COUNTS_Q, COUNTS_K, OFFSETS_Q, OFFSETS_K, OFFSETS_STATS = range(10, 15)


@functools.cache
def frontend() -> ModuleType | None:
    """The `cudnn` module (package nvidia-cudnn-frontend), or None where it or cuDNN is missing."""
    try:
        import cudnn  # noqa: PLC0415  # optional, and slow to import
    except (ImportError, OSError):
        return None
    return cudnn


@dataclass(frozen=True)
class Shape:
    """What a graph is compiled for.

    Rows of q, of the output and of their gradients are contiguous; k and v lie side by side, row by
    row, and so do their gradients. A tensor and its gradient must agree in this: where their strides
    differ, the backward is wrong or traps (seen with cuDNN 9.14 and 9.19), as if it took the offsets of
    one for both.
    """

    pieces: int
    max_query: int
    max_key: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    mask: str
    """`end` (causal, aligned to the last key), `start` (causal, aligned to the first key) or `none`."""


def forward_graph(module: ModuleType, handle: Any, shape: Shape) -> Any:
    """A compiled forward: inputs Q K V and the tables, outputs OUT and STATS (the log-sum-exp)."""
    graph = _graph(module, handle, shape.dtype)
    inputs = _Inputs(graph, shape, module)
    out, stats = graph.sdpa(
        q=inputs.rows(Q, "q"),
        k=inputs.rows(K, "k"),
        v=inputs.rows(V, "k"),
        generate_stats=True,
        attn_scale=shape.dim**-0.5,
        use_padding_mask=True,
        seq_len_q=inputs.counts(COUNTS_Q),
        seq_len_kv=inputs.counts(COUNTS_K),
        **_mask(module, shape.mask),
    )
    inputs.output(out, OUT, "q")
    stats.set_data_type(module.data_type.FLOAT)
    stats.set_uid(STATS).set_output(True).set_dim((shape.pieces, shape.heads, shape.max_query, 1))
    stats.set_stride((shape.max_query * shape.heads, 1, shape.heads, 1))
    stats.set_ragged_offset(inputs.offsets(OFFSETS_STATS))
    return _build(module, graph)


def backward_graph(module: ModuleType, handle: Any, shape: Shape, total: int, deterministic: bool) -> Any:
    """A compiled backward: inputs Q K V OUT GRAD STATS and the tables, outputs GRAD_Q GRAD_K GRAD_V.

    `total` bounds the rows of queries and of keys, for the workspace.
    """
    graph = _graph(module, handle, shape.dtype)
    inputs = _Inputs(graph, shape, module)
    stats = graph.tensor(
        uid=STATS,
        dim=(shape.pieces, shape.heads, shape.max_query, 1),
        stride=(shape.max_query * shape.heads, 1, shape.heads, 1),
        data_type=module.data_type.FLOAT,
    )
    stats.set_ragged_offset(inputs.offsets(OFFSETS_STATS))
    grad_q, grad_k, grad_v = graph.sdpa_backward(
        q=inputs.rows(Q, "q"),
        k=inputs.rows(K, "k"),
        v=inputs.rows(V, "k"),
        o=inputs.rows(OUT, "q"),
        dO=inputs.rows(GRAD, "q"),
        stats=stats,
        attn_scale=shape.dim**-0.5,
        use_padding_mask=True,
        seq_len_q=inputs.counts(COUNTS_Q),
        seq_len_kv=inputs.counts(COUNTS_K),
        max_total_seq_len_q=total,
        max_total_seq_len_kv=total,
        use_deterministic_algorithm=deterministic,
        **_mask(module, shape.mask),
    )
    inputs.output(grad_q, GRAD_Q, "q")
    inputs.output(grad_k, GRAD_K, "k")
    inputs.output(grad_v, GRAD_V, "k")
    return _build(module, graph)


def _graph(module: ModuleType, handle: Any, dtype: torch.dtype) -> Any:
    types = module.data_type
    io = types.BFLOAT16 if dtype == torch.bfloat16 else types.HALF
    return module.pygraph(
        io_data_type=io, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=handle
    )


def _mask(module: ModuleType, mask: str) -> dict[str, Any]:
    if mask == "none":
        return {}
    alignment = module.diagonal_alignment
    return {
        "diagonal_band_right_bound": 0,
        "diagonal_alignment": alignment.BOTTOM_RIGHT if mask == "end" else alignment.TOP_LEFT,
    }


def _build(module: ModuleType, graph: Any) -> Any:
    modes = module.heur_mode
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([modes.A, modes.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph


class _Inputs:
    """Declares the tensors of one graph."""

    def __init__(self, graph: Any, shape: Shape, module: ModuleType) -> None:
        self._graph, self._shape, self._types = graph, shape, module.data_type
        self._io = module.data_type.BFLOAT16 if shape.dtype == torch.bfloat16 else module.data_type.HALF
        self._offsets: dict[int, Any] = {}

    def rows(self, uid: int, which: str) -> Any:
        """An input of packed rows, of queries (`q`) or of keys or values (`k`)."""
        dim, strides = self._layout(which)
        tensor = self._graph.tensor(uid=uid, dim=dim, stride=strides, data_type=self._io)
        tensor.set_ragged_offset(self.offsets(OFFSETS_Q if which == "q" else OFFSETS_K))
        return tensor

    def output(self, tensor: Any, uid: int, which: str) -> None:
        """Marks a result of the graph as an output of packed rows."""
        dim, strides = self._layout(which)
        tensor.set_uid(uid).set_output(True).set_dim(dim).set_stride(strides)
        tensor.set_ragged_offset(self.offsets(OFFSETS_Q if which == "q" else OFFSETS_K))

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

    def _layout(self, which: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape = self._shape
        if which == "q":
            heads, longest, row = shape.heads, shape.max_query, shape.heads * shape.dim
        else:
            heads, longest, row = shape.kv_heads, shape.max_key, 2 * shape.kv_heads * shape.dim
        return (shape.pieces, heads, longest, shape.dim), (longest * row, shape.dim, row, 1)
