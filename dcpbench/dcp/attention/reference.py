"""Attention as its definition says: the oracle that every other backend is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale) v for one sequence, causal, aligned to the end of the keys.

    Shapes: q (m, heads, dim), k and v (n, kv_heads, dim) with m <= n and heads a multiple of
    kv_heads; the result has q's shape. Query row i sees keys 0 .. n - m + i. Computed in q's type
    with a materialised score matrix; `scale` defaults to 1/sqrt(dim).
    """
    m, heads, dim = q.shape
    n, kv_heads, _ = k.shape
    k = k.repeat_interleave(heads // kv_heads, dim=1)
    v = v.repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("mhd,nhd->hmn", q, k) * (dim**-0.5 if scale is None else scale)
    hidden = torch.ones(m, n, dtype=torch.bool, device=q.device).triu(n - m + 1)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("hmn,nhd->mhd", weights, v)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], padded: Sequence[int]) -> Tensor:
    """Causal attention of every sequence of an unsharded pack; rows of padding give zero.

    Shapes: q (rows, heads, dim), k and v (rows, kv_heads, dim); sequence i starts at
    sum(padded[:i]) and has lengths[i] real rows.
    """
    out = torch.zeros_like(q)
    start = 0
    for length, room in zip(lengths, padded, strict=True):
        rows = slice(start, start + length)
        if length:
            out[rows] = causal_attention(q[rows], k[rows], v[rows])
        start += room
    return out
