"""Transformer Engine's `DotProductAttention` on packed rows, with its own context-parallel communication.

It is handed what Megatron-LM hands it: the rows of this rank in zigzag order, the cumulative real
and padded lengths of the *whole* sequences, and the CP group of the microbatch, which may change
from one microbatch to the next. Its communication wants a process group of exactly those ranks, with a
communicator in device memory, so it serves only as many different groups as can be made beforehand.

Padding is handed over as the end of its sequence, and what comes out of it is replaced by zero. The results of real
rows are the same: none sees what comes later, and a row without a gradient gives none. Handed over as padding between
sequences, it left part of the gradient of values unwritten where heads share values and a rank has no real row of
a sequence (version 2.20 with cuDNN 9.19; only sequences of less than 4 x CP size tokens are so short).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dcpbench.dcp.attention.layout import to_device
from dcpbench.dcp.groups import CpGroup, RuntimeGroups
from dcpbench.dcp.packing import AttentionLayout, attention_layout, offsets_of, ranges

FIRST_ROWS = 256
"""Rows of each rank in the call that makes a group's connections."""


@dataclass(frozen=True)
class _Call:
    backend: TransformerEngineBackend
    group: CpGroup
    held: int
    """Rows of the sequences with their padding; a rank may have more behind them."""
    offsets: Tensor
    longest: int
    nothing: Tensor | None
    """(rows, 1, 1) bool: rows that no token is in; None where there are none."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.backend.attend(self, q, k, v)

    def finish(self) -> None:
        """Nothing outlives a call."""


class TransformerEngineBackend:
    """One attention module for all layers; the group is set before each call that needs another."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        communication: str,
        groups: RuntimeGroups,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        from transformer_engine.pytorch import DotProductAttention  # noqa: PLC0415  # optional, slow to import

        self.name = f"te/{communication}"
        self._communication, self._device = communication, device
        self._module: Any = DotProductAttention(
            heads,
            dim,
            num_gqa_groups=kv_heads,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal",
        )
        self._stream = torch.cuda.Stream(device)
        self._current: tuple[int, int] | None = None
        for group in groups.communicators:
            # Heads are what this communication divides among ranks: it cannot serve every size.
            if communication != "a2a" or (heads % group.size == 0 and kv_heads % group.size == 0):
                self._connect(group, heads, kv_heads, dim, dtype)

    def prepare(self, layout: AttentionLayout, group: CpGroup) -> _Call:
        """The attention of one microbatch of this rank."""
        return _Call(
            self,
            group,
            int(layout.padded.sum()) // layout.size,
            to_device(offsets_of(layout.padded), self._device, torch.int32),
            int(layout.padded.max()),
            self._nothing(layout),
        )

    def _nothing(self, layout: AttentionLayout) -> Tensor | None:
        if int(layout.query_counts.sum()) == layout.rows:
            return None
        nothing = np.ones((layout.rows, 1, 1), np.bool_)
        nothing[ranges(layout.query_starts, layout.query_counts)] = False
        return to_device(nothing, self._device, torch.bool)

    def warm(self, layouts: Iterable[AttentionLayout]) -> None:
        """Transformer Engine compiles on first use."""

    def attend(self, call: _Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of this rank's rows."""
        group = call.group
        block = (group.first, group.size)
        if block != self._current:
            if group.alone:
                self._module.set_context_parallel_group(None, None, None)
            else:
                members = list(range(group.first, group.first + group.size))
                self._module.set_context_parallel_group(group.group, members, self._stream, self._communication)
            self._current = block
        out = self._module(
            *(x[: call.held].contiguous() for x in (q, k, v)),
            cu_seqlens_q=call.offsets,
            cu_seqlens_kv=call.offsets,
            cu_seqlens_q_padded=call.offsets,
            cu_seqlens_kv_padded=call.offsets,
            max_seqlen_q=call.longest,
            max_seqlen_kv=call.longest,
            pad_between_seqs=False,
        ).view(call.held, *q.shape[1:])
        if call.nothing is None:
            return out
        return F.pad(out, (0, 0, 0, 0, 0, len(q) - call.held)).masked_fill(call.nothing, 0.0)

    def _connect(self, group: CpGroup, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        """Attention and its backward, once: the communicator connects ranks at the first use of each kind."""
        lengths = np.array([FIRST_ROWS * group.size], np.int64)
        call = self.prepare(attention_layout(lengths, lengths, group.size, group.rank), group)
        q, k, v = (
            torch.zeros(FIRST_ROWS, count, dim, dtype=dtype, device=self._device, requires_grad=True)
            for count in (heads, kv_heads, kv_heads)
        )
        out = self.attend(call, q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
