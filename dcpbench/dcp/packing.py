"""Samples of one microbatch as packed (THD) rows, cut for one rank of its CP group.

Sequences of real lengths `n_i` are padded to `s_i` (a multiple of 2k on a group of k > 1 ranks) and
concatenated. Zigzag sharding cuts every sequence into 2k chunks of `s_i / 2k` rows; rank r holds
chunks r and 2k-1-r, so that each rank has the same share of the causal triangle. Rows of padding
are never used as keys and never produce output: only the real lengths reach the kernels.

Everything here is NumPy on the host: index arithmetic is done once per microbatch, off the device,
and shared by all layers and by the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dcpbench.data.stream import IGNORE_INDEX
from dcpbench.dcp.workload import PaddingRule

Ints = NDArray[np.int64]


def lengths_from_offsets(offsets: object) -> Ints:
    """Sequence lengths from cumulative offsets of shape (n+1,) or (1, n+1).

    Raises:
        ValueError: any other shape, a first offset that is not 0, or decreasing offsets.
    """
    array = np.asarray(offsets)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"cumulative offsets must have shape (n+1,) or (1, n+1), not {np.asarray(offsets).shape}")
    array = array.astype(np.int64)
    lengths: Ints = array[1:] - array[:-1]
    if array[0] != 0 or (lengths < 0).any():
        raise ValueError("cumulative offsets must start at 0 and never decrease")
    return lengths


def offsets_of(lengths: Ints) -> Ints:
    """Cumulative offsets, shape (n+1,), first 0."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ranges(starts: Ints, counts: Ints) -> Ints:
    """The concatenation of arange(start, start + count) for each pair, without a Python loop."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    shifts: Ints = np.repeat(starts - (ends - counts), counts)
    shifts += np.arange(total, dtype=np.int64)
    return shifts


@dataclass(frozen=True)
class Segments:
    """The contiguous pieces of sequences that one rank holds, in the order of its rows.

    All arrays have one entry per piece: which sequence, its first position in that sequence, its
    rows (padding included) and how many of them are real. Pieces without any row do not occur.
    """

    sequence: Ints
    first: Ints
    rows: Ints
    real: Ints


def segments_of(lengths: Ints, padded: Ints, size: int, rank: int) -> Segments:
    """The pieces of rank `rank` in a CP group of `size` ranks (zigzag).

    Raises:
        ValueError: a padded length that cannot be cut into 2 x size equal chunks.
    """
    if size == 1:
        index = np.arange(len(padded), dtype=np.int64)
        first, rows = np.zeros(len(padded), np.int64), padded
    else:
        wrong = np.flatnonzero(padded % (2 * size))
        if wrong.size:
            raise ValueError(
                f"sequence {wrong[0]} has {padded[wrong[0]]} padded tokens; on {size} ranks it must be a multiple of "
                f"{2 * size}"
            )
        chunk = padded // (2 * size)
        index = np.repeat(np.arange(len(padded), dtype=np.int64), 2)
        first = np.stack([chunk * rank, chunk * (2 * size - 1 - rank)], axis=1).reshape(-1)
        rows = np.repeat(chunk, 2)
    real = np.clip(lengths[index] - first, 0, rows)
    held = rows > 0
    return Segments(index[held], first[held], rows[held], real[held])


@dataclass(frozen=True)
class AttentionLayout:
    """Which rows of a rank attend to which rows of its CP group; host arrays, no tensor.

    A *piece* is a run of query rows of one sequence, at most two a sequence and rank. Each piece has a
    *key range*: a copy of all the real rows it may see, everything before it in its sequence and
    itself, one range after the other. A kernel then needs causal masking aligned to the end of the
    keys. `key_rows` says where each row of the ranges comes from, among the rows of all ranks of the
    group laid one rank after the other.
    """

    size: int
    rank: int
    lengths: Ints
    """Real lengths of the sequences, whole."""
    padded: Ints
    """Their lengths in memory, whole."""
    rows: int
    """Rows this rank holds, padding included."""
    query_starts: Ints
    """First row of each piece, shape (pieces,)."""
    query_counts: Ints
    """Real rows of each piece, shape (pieces,)."""
    key_counts: Ints
    """Rows each piece sees, its own included, shape (pieces,)."""
    key_rows: Ints | None
    """Origin of each row of the key ranges; None when they are this rank's rows in order."""
    gradient_rows: Ints | None
    """Shape (rows, 2 x size), None for one rank: where the gradients of each own row are found. Column
    2j + h holds the row in rank j's key ranges that its h-th kind of piece keeps for it, or -1."""

    @property
    def query_rows(self) -> Ints | None:
        """The real rows of this rank in order; None when all rows are real."""
        if int(self.query_counts.sum()) == self.rows:
            return None
        return ranges(self.query_starts, self.query_counts)

    @property
    def query_offsets(self) -> Ints:
        """Cumulative real query rows of the pieces, shape (pieces + 1,)."""
        return offsets_of(self.query_counts)

    @property
    def key_offsets(self) -> Ints:
        """Start of each piece's key range, shape (pieces + 1,)."""
        return offsets_of(self.key_counts)

    @property
    def pieces(self) -> int:
        """Number of query pieces."""
        return len(self.query_counts)

    @property
    def keys_per_query(self) -> float:
        """How many keys a real query row sees on average: what decides which kernel is fastest."""
        queries = self.query_counts.astype(np.float64)
        seen = (queries * (self.key_counts - queries) + queries * (queries + 1) / 2).sum()
        return float(seen / max(1.0, queries.sum()))


def attention_layout(
    lengths: Ints, padded: Ints, size: int = 1, rank: int = 0, rows: int | None = None
) -> AttentionLayout:
    """The layout of rank `rank` for sequences of real `lengths` stored at `padded` lengths.

    `rows` is the number of rows a rank holds where it is more than the sequences need (tail
    padding); the rows behind the last sequence give zero output and zero gradient.

    Raises:
        ValueError: lengths and padded lengths that do not fit each other, the group, or `rows`.
    """
    if lengths.shape != padded.shape or (lengths > padded).any() or (lengths < 0).any():
        raise ValueError("every real length must lie between 0 and its padded length")
    pieces = segments_of(lengths, padded, size, rank)
    held = int(pieces.rows.sum())
    rows = held if rows is None else rows
    if rows < held:
        raise ValueError(f"the sequences need {held} rows per rank, but a rank holds only {rows}")

    live = pieces.real > 0
    starts, counts = offsets_of(pieces.rows)[:-1][live], pieces.real[live]
    visible = pieces.first[live] + counts
    key_rows = ranges(np.zeros(len(visible), np.int64), visible)
    if size == 1:
        key_rows += np.repeat(starts, visible)
        return AttentionLayout(
            size, rank, lengths, padded, rows, starts, counts, visible,
            None if len(key_rows) == rows else key_rows, None,
        )  # fmt: skip
    sequence = np.repeat(pieces.sequence[live], visible)
    chunk = (padded // (2 * size))[sequence]
    local = (offsets_of(padded)[:-1] // size)[sequence]
    part, within = np.divmod(key_rows, chunk)
    late = part >= size
    owner = np.where(late, 2 * size - 1 - part, part)
    key_rows = owner * rows + local + np.where(late, chunk, 0) + within
    gradient_rows = _gradient_rows(lengths, padded, size, pieces, rows)
    return AttentionLayout(size, rank, lengths, padded, rows, starts, counts, visible, key_rows, gradient_rows)


def training_layout(padded: Ints, size: int, rank: int) -> AttentionLayout:
    """The layout of a training microbatch: padding counts as the end of its sequence.

    No real row sees it, as it comes later; and it gives nothing back, since rows without a label have no
    gradient. So nothing need be selected before attention and spread out behind it, a dozen
    launches a layer, for the few tokens of work that this saves.
    """
    return attention_layout(padded, padded, size, rank)


def _gradient_rows(lengths: Ints, padded: Ints, size: int, pieces: Segments, rows: int) -> Ints:
    """Where every rank of the group keeps its part of the gradients of this rank's rows."""
    table = np.full((rows, 2 * size), -1, np.int64)
    own = np.flatnonzero(pieces.real > 0)
    row = ranges(offsets_of(pieces.rows)[:-1][own], pieces.real[own])
    sequence = np.repeat(pieces.sequence[own], pieces.real[own])
    position = ranges(pieces.first[own], pieces.real[own])
    chunk = padded // (2 * size)
    for rank in range(size):
        first = np.stack([chunk * rank, chunk * (2 * size - 1 - rank)], axis=1)
        real = np.clip(lengths[:, None] - first, 0, chunk[:, None])
        visible = np.where(real > 0, first + real, 0)
        starts = offsets_of(visible.reshape(-1))[:-1].reshape(-1, 2)
        for half in range(2):
            seen = position < visible[sequence, half]
            table[row[seen], 2 * rank + half] = starts[sequence[seen], half] + position[seen]
    return table


@dataclass(frozen=True)
class Run:
    """Consecutive rows that lie consecutively elsewhere: rows [source, source + count) of `rank` go to `target`."""

    rank: int
    source: int
    target: int
    count: int


def earlier_runs(layout: AttentionLayout) -> list[Run]:
    """Where the rows before each piece's own come from, as few copies as there can be; targets are key-range rows."""
    assert layout.key_rows is not None
    before = layout.key_counts - layout.query_counts
    targets = ranges(layout.key_offsets[:-1], before)
    origins = layout.key_rows[targets]
    if not len(targets):
        return []
    owner, source = np.divmod(origins, layout.rows)
    cut = (np.diff(origins) != 1) | (np.diff(targets) != 1) | (np.diff(owner) != 0)
    first = np.concatenate([[0], np.flatnonzero(cut) + 1])
    counts = np.diff(np.append(first, len(targets)))
    return [
        Run(*numbers)
        for numbers in zip(
            owner[first].tolist(), source[first].tolist(), targets[first].tolist(), counts.tolist(), strict=True
        )
    ]


@dataclass(frozen=True)
class RankPack:
    """The rows of one rank in one microbatch: token ids, labels (-100: no loss), positions, attention layout."""

    tokens: Ints
    labels: Ints
    positions: Ints
    layout: AttentionLayout


class SampleReader(Protocol):
    """What packing needs of a sample stream: the token ids and labels of a part of one sample."""

    def tokens(self, position: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        """Token ids [start, stop) of the sample at `position`."""

    def labels(self, position: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        """Labels [start, stop), shifted within the whole sample so that a cut never separates a pair."""


def padded_lengths(lengths: Ints, padding: PaddingRule, size: int) -> Ints:
    """`lengths` padded for a group of `size` ranks."""
    unit = padding.multiple(size)
    return -(-lengths // unit) * unit


def pack_rank(
    reader: SampleReader, positions: Sequence[int], lengths: Ints, padding: PaddingRule, size: int, rank: int
) -> RankPack:
    """Reads the rows that rank `rank` of a CP group of `size` ranks holds of the samples at `positions`.

    Only this rank's chunks are read: over all ranks of the group every token is read once. Padding
    rows have token 0, no label, and the position that a real token would have there.
    """
    padded = padded_lengths(lengths, padding, size)
    pieces = segments_of(lengths, padded, size, rank)
    rows = int(pieces.rows.sum())
    tokens = np.zeros(rows, np.int64)
    labels = np.full(rows, IGNORE_INDEX, np.int64)
    row = 0
    for sequence, first, held, real in zip(
        pieces.sequence.tolist(), pieces.first.tolist(), pieces.rows.tolist(), pieces.real.tolist(), strict=True
    ):
        if real:
            tokens[row : row + real] = reader.tokens(positions[sequence], first, first + real)
            labels[row : row + real] = reader.labels(positions[sequence], first, first + real)
        row += held
    return RankPack(
        tokens,
        labels,
        ranges(pieces.first, pieces.rows),
        training_layout(padded, size, rank),
    )
