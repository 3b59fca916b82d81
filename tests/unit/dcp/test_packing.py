"""Packing, zigzag sharding and attention layouts, against plain loops and the known faults."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.dcp.packing import (
    attention_layout,
    earlier_runs,
    lengths_from_offsets,
    offsets_of,
    pack_rank,
    ranges,
    segments_of,
)
from dcpbench.dcp.workload import PaddingRule


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class Documents:
    """Samples with given token ids; labels shifted inside each document."""

    def __init__(self, *documents: list[int]) -> None:
        self._documents = [np.array(d, np.int64) for d in documents]
        self.read: list[tuple[int, int, int]] = []

    def tokens(self, position: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        part = self._documents[position][start:stop]
        self.read.append((position, start, start + len(part)))
        return part

    def labels(self, position: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.append(self._documents[position][1:], -100)[start:stop]

    @property
    def lengths(self) -> np.ndarray:
        return array(*(len(d) for d in self._documents))


def pack(documents: Documents, size: int, rank: int):
    count = len(documents.lengths)
    return pack_rank(documents, list(range(count)), documents.lengths, PaddingRule(), size, rank)


def test_a12_one_document_in_the_pack() -> None:
    layout = attention_layout(array(777), array(777))
    assert layout.query_offsets.tolist() == [0, 777]
    assert layout.query_counts.tolist() == [777]


def test_a22_labels_are_shifted_before_the_cut() -> None:
    documents = Documents(list(range(20, 28)))
    first, second = pack(documents, 2, 0), pack(documents, 2, 1)
    assert first.tokens.tolist() == [20, 21, 26, 27]
    assert first.labels.tolist() == [21, 22, 27, -100]
    assert second.tokens.tolist() == [22, 23, 24, 25]
    assert second.labels.tolist() == [23, 24, 25, 26]


def test_a23_the_last_token_of_a_document_predicts_nothing() -> None:
    packed = pack(Documents([1, 2, 3], [4, 5]), 1, 0)
    assert packed.labels.tolist() == [2, 3, -100, 5, -100]
    assert (packed.labels != -100).sum() == 3


def test_a24_local_boundaries_come_from_padded_lengths() -> None:
    documents = Documents(list(range(100, 107)), list(range(200, 209)))
    packs = [pack(documents, 2, rank) for rank in range(2)]
    alone = pack(documents, 1, 0)
    expected = dict(zip(alone.tokens.tolist(), alone.labels.tolist(), strict=True))
    for packed in packs:
        assert len(packed.tokens) == (8 + 12) // 2
        # Documents never mix: the first 4 rows are document one's, the other 6 document two's.
        real = packed.tokens != 0
        assert (packed.tokens[:4][real[:4]] < 200).all()
        assert (packed.tokens[4:][real[4:]] >= 200).all()
        for token, label in zip(packed.tokens[real].tolist(), packed.labels[real].tolist(), strict=True):
            assert label == expected[token]


def test_a27_offsets_of_either_shape_agree_and_a_scalar_is_refused() -> None:
    assert lengths_from_offsets([0, 5, 11]).tolist() == lengths_from_offsets([[0, 5, 11]]).tolist() == [5, 6]
    with pytest.raises(ValueError, match=r"shape \(n\+1,\) or \(1, n\+1\), not \(\)"):
        lengths_from_offsets(np.int64(5))


@pytest.mark.parametrize("offsets", [[1, 5], [0, 5, 3], [[0, 1], [0, 2]], []])
def test_offsets_that_are_none_are_refused(offsets: list) -> None:
    with pytest.raises(ValueError, match="offsets"):
        lengths_from_offsets(offsets)


def test_a28_one_token_on_two_ranks_is_padded_to_four() -> None:
    packs = [pack(Documents([42]), 2, rank) for rank in range(2)]
    assert [p.tokens.tolist() for p in packs] == [[42, 0], [0, 0]]
    # Padding is the end of its sequence: rank 0 has positions 0 and 3, and each sees what is before it.
    assert packs[0].layout.query_offsets.tolist() == [0, 1, 2]
    assert packs[0].layout.key_offsets.tolist() == [0, 1, 5]
    assert [p.layout.query_rows for p in packs] == [None, None]
    assert sum(len(p.tokens) for p in packs) - 1 == 3


def test_a29_real_and_padded_offsets_are_kept_apart() -> None:
    lengths, padded = array(5, 6), array(8, 8)
    layout = attention_layout(lengths, padded, 2, 0)
    # Rank 0 holds chunks 0 and 3: positions 0,1 and 6,7 of each; only 0,1 are real.
    assert layout.query_rows is not None
    assert layout.query_rows.tolist() == [0, 1, 4, 5]
    assert layout.key_offsets.tolist() == [0, 2, 4]


def test_a30_empty_documents_are_removed() -> None:
    layout = attention_layout(array(0, 1, 0, 1), array(0, 1, 0, 1))
    assert layout.rows == 2
    assert layout.query_offsets.tolist() == layout.key_offsets.tolist() == [0, 1, 2]


def test_a32_a_length_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a multiple of 4"):
        attention_layout(array(1001), array(1001), 2, 0)
    assert attention_layout(array(1001), array(1004), 2, 0).rows == 502


def test_a35_rows_behind_the_last_sequence_are_not_real() -> None:
    layout = attention_layout(array(40, 50), array(40, 50), rows=100)
    assert layout.query_rows is not None
    assert layout.query_rows.tolist() == list(range(90))


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and its padded length"):
        attention_layout(array(5), array(4))
    with pytest.raises(ValueError, match="a rank holds only 9"):
        attention_layout(array(10), array(10), rows=9)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=30))
def test_ranges_is_the_concatenation_of_aranges(pairs: list[tuple[int, int]]) -> None:
    starts, counts = array(*(p[0] for p in pairs)), array(*(p[1] for p in pairs))
    expected = [x for start, count in pairs for x in range(start, start + count)]
    assert ranges(starts, counts).tolist() == expected


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 8))
def test_the_ranks_of_a_group_hold_every_token_once(lengths: list[int], size: int) -> None:
    documents = Documents(*(list(range(1000 * i + 1, 1000 * i + 1 + n)) for i, n in enumerate(lengths)))
    packs = [pack(documents, size, rank) for rank in range(size)]
    held = sorted(t for p in packs for t in p.tokens.tolist() if t)
    assert held == sorted(t for i, n in enumerate(lengths) for t in range(1000 * i + 1, 1000 * i + 1 + n))
    # Every rank has the same number of rows, and nothing was read twice.
    assert len({len(p.tokens) for p in packs}) == 1
    assert sum(stop - start for _, start, stop in documents.read) == sum(lengths)
    for packed in packs:
        real = packed.tokens != 0
        assert (packed.tokens[real] % 1000 - 1 == packed.positions[real]).all()
        assert (packed.labels[~real] == -100).all()


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(0, 3),
)
def test_every_query_sees_its_own_prefix_and_nothing_else(
    sequences: list[tuple[int, int]], size: int, tail: int
) -> None:
    unit = 2 * size if size > 1 else 1
    lengths = array(*(n for n, _ in sequences))
    padded = -(-(lengths + array(*(extra for _, extra in sequences))) // unit) * unit
    local = int(padded.sum()) // size
    rows = local + tail
    # Label every gathered row with (sequence, position); padding and tail rows with None.
    gathered: list[tuple[int, int] | None] = [None] * (rows * size)
    for rank in range(size):
        pieces = segments_of(lengths, padded, size, rank)
        row = rank * rows
        for sequence, first, held, real in zip(
            pieces.sequence.tolist(), pieces.first.tolist(), pieces.rows.tolist(), pieces.real.tolist(), strict=True
        ):
            for offset in range(real):
                gathered[row + offset] = (sequence, first + offset)
            row += held
    seen = set()
    for rank in range(size):
        layout = attention_layout(lengths, padded, size, rank, rows)
        queries = np.arange(rows) if layout.query_rows is None else layout.query_rows
        keys = np.arange(rows) if layout.key_rows is None else layout.key_rows
        for piece in range(len(layout.query_offsets) - 1):
            q0, q1 = layout.query_offsets[piece : piece + 2]
            k0, k1 = layout.key_offsets[piece : piece + 2]
            for row in range(q0, q1):
                own = gathered[rank * rows + queries[row]]
                assert own is not None
                seen.add(own)
                # Causal, aligned to the end of the keys.
                visible = [gathered[key] for key in keys[k0 : k1 - (q1 - 1 - row)]]
                assert visible == [(own[0], position) for position in range(own[1] + 1)]
    assert seen == {(i, p) for i, n in enumerate(lengths.tolist()) for p in range(n)}
    assert offsets_of(lengths)[-1] == len(seen)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=6), st.integers(2, 6))
def test_gradient_rows_find_every_copy_of_a_row(sequences: list[tuple[int, int]], size: int) -> None:
    unit = 2 * size
    lengths = array(*(n for n, _ in sequences))
    padded = -(-(lengths + array(*(extra for _, extra in sequences))) // unit) * unit
    layouts = [attention_layout(lengths, padded, size, rank) for rank in range(size)]
    rows = layouts[0].rows
    copies: dict[int, set[tuple[int, int]]] = {}
    for rank, layout in enumerate(layouts):
        assert layout.key_rows is not None
        for index, origin in enumerate(layout.key_rows.tolist()):
            copies.setdefault(origin, set()).add((rank, index))
    for rank, layout in enumerate(layouts):
        assert layout.gradient_rows is not None
        for row in range(rows):
            found = {(c // 2, int(r)) for c, r in enumerate(layout.gradient_rows[row]) if r >= 0}
            assert found == copies.get(rank * rows + row, set())


@given(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.integers(2, 5), st.integers(0, 4))
def test_earlier_runs_bring_every_row_before_a_piece_and_no_other(lengths: list[int], size: int, rank: int) -> None:
    rank %= size
    padded = -(-array(*lengths) // (2 * size)) * (2 * size)
    layout = attention_layout(array(*lengths), padded, size, rank)
    assert layout.key_rows is not None
    brought = {}
    for run in earlier_runs(layout):
        for offset in range(run.count):
            brought[run.target + offset] = run.rank * layout.rows + run.source + offset
    wanted = {}
    for start, count, own in zip(
        layout.key_offsets.tolist(), layout.key_counts.tolist(), layout.query_counts.tolist(), strict=False
    ):
        wanted |= {row: int(layout.key_rows[row]) for row in range(start, start + count - own)}
    assert brought == wanted
