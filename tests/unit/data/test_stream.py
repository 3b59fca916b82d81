import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.data.prepare import prepare
from dcpbench.data.stream import SampleStream
from dcpbench.data.tokens import Stored
from dcpbench.errors import DataError
from dcpbench.spec import ListData, LognormalData, Spec


def stored(*documents: list[int], masks: list[list[bool]] | None = None, size: int = 2, n: int = 4) -> SampleStream:
    """A stream over the given token ids."""
    lengths = np.array([len(d) for d in documents], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = None if masks is None else np.concatenate([np.array(m, np.bool_) for m in masks])
    supervised = lengths - 1 if masks is None else np.array([sum(m[1:]) for m in masks], np.int64)
    ids = np.concatenate([np.array(d, np.int32) for d in documents])
    return SampleStream(lengths, supervised, Stored(ids, offsets, mask), global_batch_size=size, iterations=n)


def opened(spec: Spec, folder: Path) -> SampleStream:
    prepare(spec, folder)
    return SampleStream.open(folder)


def test_a22_labels_are_shifted_before_the_cp_cut() -> None:
    stream = stored(list(range(20, 28)))

    def chunks(read: Callable[[int, int, int], np.ndarray], *bounds: int) -> list[int]:
        return [int(x) for start in bounds for x in read(0, start, start + 2)]

    assert chunks(stream.tokens, 0, 6) == [20, 21, 26, 27]
    assert chunks(stream.labels, 0, 6) == [21, 22, 27, -100]
    assert chunks(stream.tokens, 2, 4) == [22, 23, 24, 25]
    assert chunks(stream.labels, 2, 4) == [23, 24, 25, 26]


def test_a23_the_last_token_of_a_document_predicts_nothing() -> None:
    stream = stored([1, 2, 3], [4, 5])
    labels = [*stream.labels(0).tolist(), *stream.labels(1).tolist()]
    assert labels == [2, 3, -100, 5, -100]
    assert sum(label != -100 for label in labels) == stream.supervised([0, 1]).sum() == 3


def test_labels_leave_out_what_the_mask_leaves_out() -> None:
    stream = stored([7, 8, 9, 7, 9], masks=[[True, False, True, True, False]])
    assert stream.labels(0).tolist() == [-100, 9, 7, -100, -100]
    assert stream.supervised(0) == 2


@given(data=st.data())
def test_any_stretch_equals_the_slice_of_the_whole(data: st.DataObject) -> None:
    documents = data.draw(st.lists(st.lists(st.integers(0, 99), min_size=2, max_size=12), min_size=1, max_size=4))
    masks = data.draw(
        st.none() | st.tuples(*[st.lists(st.booleans(), min_size=len(d), max_size=len(d)) for d in documents])
    )
    stream = stored(*documents, masks=None if masks is None else list(masks))
    position = data.draw(st.integers(0, 7))
    start, stop = data.draw(st.integers(0, 14)), data.draw(st.integers(0, 14))
    for read in (stream.tokens, stream.labels):
        assert read(position, start, stop).tolist() == read(position)[start : max(start, stop)].tolist()
    labels = stream.labels(position)
    assert (labels != -100).sum() == stream.supervised(position)
    assert labels.size == stream.lengths(position)


def test_negative_bounds_are_no_slice_from_the_end() -> None:
    with pytest.raises(ValueError, match="negative"):
        stored([1, 2, 3]).tokens(0, -1)


def test_a13_no_sample_is_lost_between_batches() -> None:
    stream = stored([1] * 60, [2] * 50, [3] * 30, [4] * 40, size=1)
    ids = [stream.sample_ids(stream.batch(iteration)).tolist() for iteration in (1, 2, 3, 4)]
    assert ids == [[0], [1], [2], [3]]
    assert stream.tokens(int(stream.batch(2)[0]))[0] == 2


def test_a14_every_batch_is_full_whatever_the_number_of_samples(make_spec: Callable[..., Spec], tmp_path: Path) -> None:
    spec = make_spec(ListData(lengths=tuple(range(2, 15))), iterations=5, global_batch_size=6)
    stream = opened(spec, tmp_path / "data")
    ids = [stream.sample_ids(stream.batch(t)).tolist() for t in range(1, 6)]
    assert [len(batch) for batch in ids] == [6] * 5
    assert [i for batch in ids for i in batch] == [i % 13 for i in range(30)]


def test_window_shorter_than_the_dataset(make_spec: Callable[..., Spec], tmp_path: Path) -> None:
    stream = opened(make_spec(ListData(lengths=tuple(range(2, 100))), 3, 4), tmp_path / "data")
    assert stream.samples == 12
    assert stream.sample_ids(stream.batch(3)).tolist() == [8, 9, 10, 11]
    assert stream.lengths(stream.batch(3)).tolist() == [10, 11, 12, 13]
    assert stream.longest == 13


def test_batch_larger_than_the_dataset(make_spec: Callable[..., Spec], tmp_path: Path) -> None:
    stream = opened(make_spec(ListData(lengths=(5, 9)), 1, 5), tmp_path / "data")
    assert stream.lengths(stream.batch(1)).tolist() == [5, 9, 5, 9, 5]


@pytest.mark.parametrize("iteration", [0, 3])
def test_iterations_outside_the_window(iteration: int) -> None:
    with pytest.raises(DataError, match=f"iteration {iteration} is outside"):
        stored([1, 2], n=2).batch(iteration)


def test_digest_tells_batches_apart() -> None:
    stream = stored([1, 2], [1, 2, 3], [1, 2], [1, 2], n=4)
    digests = [stream.batch_digest(t) for t in (1, 2, 3)]
    assert digests[0] == digests[2] != digests[1]
    assert all(len(d) == 16 and int(d, 16) >= 0 for d in digests)
    assert stored([9, 9], [9, 9, 9]).batch_digest(1) == digests[0]
    assert stored([9, 9, 9], [9, 9]).batch_digest(1) != digests[0]


def test_only_the_bytes_of_the_sample_are_read(tmp_path: Path) -> None:
    """Ids behind a hole that cannot be read: what is not asked for is not touched."""

    class Guarded(np.ndarray):
        def __getitem__(self, key: object) -> np.ndarray:
            assert isinstance(key, slice)
            touched.append((key.start, key.stop))
            return np.ndarray.__getitem__(self, key).view(np.ndarray)

    touched: list[tuple[int, int]] = []
    ids = np.arange(30, dtype=np.int32).view(Guarded)
    lengths = np.array([10, 10, 10], np.int64)
    source = Stored(ids, np.array([0, 10, 20, 30], np.int64))
    stream = SampleStream(lengths, lengths - 1, source, global_batch_size=1, iterations=3)
    assert stream.tokens(1, 2, 5).tolist() == [12, 13, 14]
    assert stream.labels(1, 8, 10).tolist() == [19, -100]
    assert touched == [(12, 15), (19, 20)]


def test_threads_read_the_same(make_spec: Callable[..., Spec], tmp_path: Path) -> None:
    stream = opened(make_spec(LognormalData(tokens="zipf"), 4, 8), tmp_path / "data")
    expected = [stream.tokens(p).tolist() for p in range(32)]
    seen: dict[int, list[list[int]]] = {}

    def read(thread: int) -> None:
        order = np.random.default_rng(thread).permutation(32)
        found = {int(p): stream.tokens(int(p)).tolist() for p in order}
        seen[thread] = [found[p] for p in range(32)]

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seen[i] for i in range(4)] == [expected] * 4


def test_damaged_folders(tmp_path: Path, text_spec: Callable[..., Spec], jsonl: Callable[..., Path]) -> None:
    good = tmp_path / "good"
    prepare(text_spec(jsonl({"text": "one"}, {"text": "two!"})), good)
    with pytest.raises(DataError, match=r"no prepared data in .*: data\.json"):
        SampleStream.open(tmp_path / "nothing")

    def broken(name: str, content: bytes | None) -> Path:
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        return folder

    for name, content, message in [
        ("tokens.bin", None, "damaged"),
        ("tokens.bin", b"\0" * 8, "should hold 9 tokens"),
        ("tokens.bin", b"\0" * 40, "should hold 9 tokens"),
        ("lengths.npy", b"nothing", "damaged"),
        ("supervised.npy", (good / "tokens.bin").read_bytes(), "damaged"),
        ("data.json", b"{", "not JSON"),
        ("data.json", json.dumps({"format": 99}).encode(), "another format"),
        ("data.json", json.dumps({"format": 1}).encode(), "damaged"),
    ]:
        with pytest.raises(DataError, match=message):
            SampleStream.open(broken(name, content))
