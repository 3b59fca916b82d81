import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dcpbench.data import prepare as module
from dcpbench.data.identity import DataIdentity
from dcpbench.data.prepare import longest, prepare
from dcpbench.data.stream import SampleStream
from dcpbench.errors import DataError, ExitCode
from dcpbench.spec import CsvData, ListData, LognormalData, Spec, UniformData

Jsonl = Callable[..., Path]
TextSpec = Callable[..., Spec]
MakeSpec = Callable[..., Spec]

PAIRS = [
    {"question": "2+2?", "answer": "4"},
    {"question": "Who?", "answer": "Ada Lovelace"},
    {"question": "a", "answer": "b"},
]


def ids(stream: SampleStream, position: int) -> bytes:
    return bytes(stream.tokens(position).clip(0, 255).astype("u1").tolist())


def test_pairs_end_to_end(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    spec = text_spec(jsonl(*PAIRS), iterations=2, global_batch_size=2, loss_on="response")
    identity = prepare(spec, tmp_path / "run" / "data")
    stream = SampleStream.open(tmp_path / "run" / "data")
    assert stream.lengths(np.arange(4)).tolist() == [9, 20, 6, 9]
    assert stream.tokens(0).tolist() == [258, *b"2+2?", 256, 259, ord("4"), 256]
    assert stream.labels(0).tolist() == [-100] * 6 + [ord("4"), 256, -100]
    assert stream.supervised(np.arange(4)).tolist() == [2, 13, 2, 2]
    assert stream.labels(1, 6, 9).tolist() == [ord("A"), ord("d"), ord("a")]
    assert identity.kind == "text"
    assert (identity.rows, identity.samples, identity.draws) == (3, 3, 4)
    assert identity.columns == ("question", "answer")
    assert (identity.total_tokens, identity.supervised_tokens) == (44, 19)
    assert (identity.shortest, identity.longest, identity.mean_length) == (6, 20, 11.0)
    assert identity.length_histogram == {4: 1, 8: 2, 16: 1}
    assert identity.tokenizer is not None
    assert identity.tokenizer.name == "byte"


def test_same_samples_from_jsonl_and_parquet(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}, {"name": "g"}]}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    lines = prepare(text_spec(jsonl(*rows)), tmp_path / "a")
    parquet = prepare(text_spec(tmp_path / "rows.parquet"), tmp_path / "b")
    assert lines.content_sha256 == parquet.content_sha256
    assert lines.file_sha256 != parquet.file_sha256


def test_identity_survives_json_and_holds_no_directory(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    identity = prepare(text_spec(jsonl(*PAIRS)), tmp_path / "data")
    assert DataIdentity.from_dict(json.loads(json.dumps(identity.to_dict(), allow_nan=False))) == identity
    text = (tmp_path / "data" / "data.json").read_text()
    assert str(tmp_path) not in text
    assert "rows.jsonl" in text
    assert DataIdentity.from_dict(json.loads(text)["identity"]) == identity


def test_a66_byte_order_mark_changes_nothing(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    plain = prepare(text_spec(jsonl(*PAIRS[:2])), tmp_path / "a")
    marked = prepare(text_spec(jsonl(*PAIRS[:2], head=b"\xef\xbb\xbf")), tmp_path / "b")
    assert plain.content_sha256 == marked.content_sha256
    assert plain.samples == marked.samples == 2


def test_content_hash_sees_tokens_mask_and_order(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    path = jsonl(*PAIRS[:2])
    specs = [
        text_spec(path),
        text_spec(path, loss_on="response"),
        text_spec(jsonl(*PAIRS[1::-1], name="swapped.jsonl")),
        text_spec(jsonl(PAIRS[0], PAIRS[2], name="other.jsonl")),
    ]
    hashes = {prepare(spec, tmp_path / str(i)).content_sha256 for i, spec in enumerate(specs)}
    assert len(hashes) == 4


def test_generated_samples_are_known_by_lengths_and_recipe(make_spec: MakeSpec, tmp_path: Path) -> None:
    csv = tmp_path / "lengths.csv"
    csv.write_text("7\n9\n")
    specs = [
        make_spec(ListData(lengths=(7, 9))),
        make_spec(CsvData(path=csv)),
        make_spec(ListData(lengths=(9, 7))),
        make_spec(ListData(lengths=(7, 9), tokens="zipf")),
        make_spec(ListData(lengths=(7, 9), tokens="zipf", seed=1)),
        make_spec(ListData(lengths=(7, 9)), vocab_size=64),
    ]
    identities = [prepare(spec, tmp_path / str(i)) for i, spec in enumerate(specs)]
    assert identities[0].content_sha256 == identities[1].content_sha256
    assert len({i.content_sha256 for i in identities}) == 5
    assert (identities[1].file_name, identities[1].rows) == ("lengths.csv", 2)
    assert identities[1].file_sha256 is not None


@pytest.mark.parametrize("data", [LognormalData(), UniformData(tokens="zipf", seed=4), ListData(lengths=(2, 3))])
def test_mock_streams_do_not_depend_on_the_window(data: Any, make_spec: MakeSpec, tmp_path: Path) -> None:
    """More iterations, or another division into batches, go on with the same samples."""
    prepare(make_spec(data, 2, 4), tmp_path / "short")
    prepare(make_spec(data, 8, 2), tmp_path / "long")
    short, long = SampleStream.open(tmp_path / "short"), SampleStream.open(tmp_path / "long")
    for position in range(8):
        assert short.tokens(position).tolist() == long.tokens(position).tolist()
        assert short.labels(position).tolist() == long.labels(position).tolist()
    assert short.sample_ids(np.arange(8)).tolist() == long.sample_ids(np.arange(8)).tolist()
    assert np.array_equal(short.supervised(np.arange(8)), short.lengths(np.arange(8)) - 1)


@pytest.mark.parametrize("data", [LognormalData(), UniformData(), ListData(lengths=(5, 90, 7))])
def test_longest_agrees_with_the_stream(data: Any, make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(data)
    identity = prepare(spec, tmp_path / "data")
    assert longest(spec) == identity.longest == SampleStream.open(tmp_path / "data").longest
    assert prepare(spec, tmp_path / "data") == identity


def test_longest_of_text(jsonl: Jsonl, text_spec: TextSpec) -> None:
    assert longest(text_spec(jsonl(*PAIRS))) == 20
    assert longest(text_spec(jsonl(*PAIRS), global_batch_size=1)) == 9


def test_a11_a_dropped_sample_leaves_full_batches(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    rows = [{"text": "x" * (900 if i == 7 else 10)} for i in range(30)]
    spec = text_spec(jsonl(*rows), iterations=3, global_batch_size=12, max_length=512, too_long="drop")
    identity = prepare(spec, tmp_path / "data")
    stream = SampleStream.open(tmp_path / "data")
    assert (identity.rows, identity.samples, identity.dropped) == (30, 29, 1)
    drawn = [i for t in (1, 2, 3) for i in stream.sample_ids(stream.batch(t)).tolist()]
    assert drawn == [i % 29 for i in range(36)]


def test_a17_an_iteration_without_supervised_token(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    rows = [PAIRS[0]] * 2 + [{"question": "long " * 10, "answer": "x"}] * 2
    spec = text_spec(jsonl(*rows), iterations=2, global_batch_size=2, loss_on="response", max_length=30, too_long="cut")
    with pytest.raises(DataError, match="iteration 2 has no token to train on: none of its 2 samples"):
        prepare(spec, tmp_path / "data")
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_a17_is_found_where_the_stream_wraps(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    silent = {"messages": [{"role": "user", "content": "q"}]}
    spoken = {"messages": [{"role": "assistant", "content": "ab"}]}
    path = jsonl(spoken, silent, silent)
    prepare(text_spec(path, iterations=2, loss_on="response"), tmp_path / "two")
    with pytest.raises(DataError, match="iteration 3 has no token to train on"):
        prepare(text_spec(path, iterations=3, loss_on="response"), tmp_path / "three")


def test_a17_one_supervised_sample_is_enough(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    silent = {"messages": [{"role": "user", "content": "q"}]}
    spoken = {"messages": [{"role": "assistant", "content": "a"}]}
    identity = prepare(text_spec(jsonl(silent, spoken), loss_on="response"), tmp_path / "data")
    assert (identity.unsupervised_samples, identity.supervised_tokens) == (1, 2)


def test_a67_refusals_count_physical_lines(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^rows\.jsonl, line 4: the text of text is empty"):
        prepare(text_spec(jsonl({"text": "a b"}, b"", b"", {"text": ""})), tmp_path / "data")


def test_a67_blank_lines_are_no_samples(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    plain = prepare(text_spec(jsonl(*PAIRS[:2])), tmp_path / "a")
    blank = prepare(text_spec(jsonl(PAIRS[0], b"", b"", PAIRS[1])), tmp_path / "b")
    assert (blank.rows, blank.content_sha256) == (2, plain.content_sha256)


def test_a76_every_length_two_is_refused(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"every sample of rows\.jsonl has 2 tokens"):
        prepare(text_spec(jsonl({"text": "a"}, {"text": "b"})), tmp_path / "data")


@pytest.mark.parametrize(
    ("policy", "dropped", "cut", "lengths"), [("drop", 1, 0, [100, 100]), ("cut", 0, 1, [100, 512])]
)
def test_a79_length_policy(
    policy: str, dropped: int, cut: int, lengths: list[int], jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path
) -> None:
    path = jsonl({"text": "x" * 99}, {"text": "y" * 899})
    identity = prepare(text_spec(path, max_length=512, too_long=policy), tmp_path / "data")
    assert (identity.max_length, identity.too_long, identity.dropped, identity.cut) == (512, policy, dropped, cut)
    assert SampleStream.open(tmp_path / "data").lengths([0, 1]).tolist() == lengths


def test_a79_length_policy_refuse(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    path = jsonl({"text": "x" * 99}, {"text": "y" * 899})
    with pytest.raises(DataError, match=r"line 2: 900 tokens, above data\.max_length 512"):
        prepare(text_spec(path, max_length=512), tmp_path / "data")
    with pytest.raises(DataError, match="no usable sample: 2 of 2 rows dropped"):
        prepare(text_spec(path, max_length=50, too_long="drop"), tmp_path / "data")


def test_vocabulary_too_small(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    spec = text_spec(jsonl({"text": "abc"}, {"text": "d"}), vocab_size=256)
    with pytest.raises(
        DataError, match=r"^model\.vocab_size 256 is too small: .* needs model\.vocab_size 261"
    ) as caught:
        prepare(spec, tmp_path / "data")
    assert caught.value.exit_code is ExitCode.USAGE
    prepare(text_spec(jsonl({"text": "abc"}, {"text": "d"}), vocab_size=257), tmp_path / "data")


def test_plain_text_has_no_response(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.loss_on: response needs messages"):
        prepare(text_spec(jsonl({"text": "abc"}), loss_on="response"), tmp_path / "data")


def test_unknown_role_names_the_line(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    row = {"messages": [{"role": "critic", "content": "x"}]}
    with pytest.raises(DataError, match=r"^rows\.jsonl, line 1: the byte tokenizer has no mark for the role 'critic'"):
        prepare(text_spec(jsonl(row)), tmp_path / "data")


def test_rows_behind_the_window_are_counted_only(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    identity = prepare(text_spec(jsonl(*PAIRS, b"not read")), tmp_path / "data")
    assert (identity.rows, identity.samples) == (4, 2)


def test_same_request_is_prepared_once(
    jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = text_spec(jsonl(*PAIRS))
    first = prepare(spec, tmp_path / "data")
    moved = tmp_path / "elsewhere.jsonl"
    (tmp_path / "rows.jsonl").rename(moved)
    monkeypatch.setattr(module, "_write_text", None)
    assert prepare(text_spec(moved), tmp_path / "data") == first


@pytest.mark.parametrize(
    ("change", "field"),
    [({"loss_on": "response"}, "data"), ({"vocab_size": 300}, "vocab_size"), ({"iterations": 2}, "iterations")],
)
def test_another_request_is_refused(
    change: dict[str, Any], field: str, jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path
) -> None:
    path = jsonl(*PAIRS)
    prepare(text_spec(path), tmp_path / "data")
    before = {p.name: p.read_bytes() for p in (tmp_path / "data").iterdir()}
    with pytest.raises(DataError, match=rf"prepared for another request \({field} differ"):
        prepare(text_spec(path, **change), tmp_path / "data")
    assert {p.name: p.read_bytes() for p in (tmp_path / "data").iterdir()} == before


def test_changed_file_is_refused(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    prepare(text_spec(jsonl(*PAIRS)), tmp_path / "data")
    with pytest.raises(DataError, match="file_sha256 differ"):
        prepare(text_spec(jsonl(*PAIRS[::-1])), tmp_path / "data")


def test_prepared_folder_that_lost_a_file(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(LognormalData())
    prepare(spec, tmp_path / "data")
    (tmp_path / "data" / "lengths.npy").unlink()
    with pytest.raises(DataError, match="damaged"):
        prepare(spec, tmp_path / "data")


def test_failure_or_interrupt_leaves_nothing(
    jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path, make_spec: MakeSpec
) -> None:
    def interrupted(done: int, needed: int) -> None:
        raise KeyboardInterrupt

    spec = text_spec(jsonl(*PAIRS))
    with pytest.raises(KeyboardInterrupt):
        prepare(spec, tmp_path / "data", interrupted)
    assert os.listdir(tmp_path) == ["rows.jsonl"]
    (tmp_path / "data").mkdir()
    assert prepare(spec, tmp_path / "data").samples == 2
    assert sorted(os.listdir(tmp_path)) == ["data", "rows.jsonl"]
    with pytest.raises(DataError, match="cannot be written beside"):
        prepare(make_spec(LognormalData()), tmp_path / "rows.jsonl" / "data")


def test_progress_counts_to_the_window(jsonl: Jsonl, text_spec: TextSpec, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    prepare(text_spec(jsonl(*PAIRS)), tmp_path / "data", lambda done, needed: calls.append((done, needed)))
    assert calls == [(1, 2), (2, 2)]


def test_importing_the_data_stage_loads_nothing_heavy() -> None:
    code = (
        "import sys, dcpbench.data.prepare, dcpbench.data.stream;"
        "print([m for m in ('torch', 'pandas', 'pyarrow', 'scipy', 'transformers', 'rich') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
