import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dcpbench.data.rows import ParquetRows, open_rows
from dcpbench.errors import DataError

A, B = {"text": "one"}, {"text": "two"}
Jsonl = Callable[..., Path]


def values(path: Path) -> list[dict[str, Any]]:
    return [row.values for row in open_rows(path).rows(["text"])]


def test_a64_git_lfs_pointer(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2\nsize 12345\n")
    with pytest.raises(DataError, match="this is a Git LFS pointer; fetch the object"):
        open_rows(path)


def test_a66_byte_order_mark(jsonl: Jsonl) -> None:
    path = jsonl(A, B, head=b"\xef\xbb\xbf")
    assert values(path) == [A, B]
    assert open_rows(path).names() == ["text"]


def test_a67_blank_lines(jsonl: Jsonl) -> None:
    path = jsonl(A, b"", b" \r", B)
    rows = list(open_rows(path).rows(()))
    assert [row.values for row in rows] == [A, B]
    assert [row.place for row in rows] == ["rows.jsonl, line 1", "rows.jsonl, line 4"]
    assert open_rows(path).count() == 2


def test_a67_messages_count_physical_lines(jsonl: Jsonl) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl, line 4: not JSON"):
        values(jsonl(A, b"", b"", b"{"))


def test_a68_one_line_of_five_megabytes(jsonl: Jsonl) -> None:
    big = {"text": "x" * 5_000_000}
    assert [len(row["text"]) for row in values(jsonl(A, big, B))] == [3, 5_000_000, 3]


def test_a69_line_separators_inside_strings(jsonl: Jsonl) -> None:
    odd = {"text": "x\u0085y\u2028z\x0c"}
    assert values(jsonl(odd, B)) == [odd, B]


def test_a70_bytes_that_are_not_utf8(jsonl: Jsonl) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: not UTF-8 text \(byte 0x92"):
        values(jsonl(A, b'{"text": "it\x92s"}', B))


def test_a70_bytes_that_are_not_utf8_in_parquet(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"it\x92s", b"fine"], pa.binary())
    table = pa.table({"text": pa.StringArray.from_buffers(3, *raw.buffers()[1:])})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet, row 2: not UTF-8"):
        values(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]", "line 2: the record is an array"),
        (b'"x"', "line 2: the record is a string"),
        (b"null", "line 2: the record is null"),
        (b"7", "line 2: the record is no object"),
        (b'{"text": NaN}', "line 2: not JSON: NaN is no JSON value"),
        (b'{"text": -Infinity}', "line 2: not JSON: -Infinity"),
        (b'{"text": "a"} {}', "line 2: not JSON: Extra data"),
        (b'{"text": ' + b"[" * 100_000, "line 2: not JSON: nested too deeply"),
        (b'{"n": ' + b"1" * 5000 + b"}", "line 2: not JSON"),
    ],
)
def test_lines_that_are_no_record(jsonl: Jsonl, line: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        values(jsonl(A, line))


def test_files_that_cannot_be_read(tmp_path: Path, jsonl: Jsonl) -> None:
    with pytest.raises(DataError, match=r"data\.path: .*none\.jsonl does not exist"):
        open_rows(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="is empty"):
        open_rows(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="is a directory"):
        open_rows(tmp_path)
    with pytest.raises(DataError, match="only blank lines"):
        open_rows(jsonl(b"", b" ")).names()
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(DataError, match=r"compressed \(gzip\)"):
        open_rows(tmp_path / "rows.jsonl.gz")


def test_parquet_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b'{"text": "a"}\n')
    with pytest.raises(DataError, match="is not a Parquet file"):
        open_rows(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        open_rows(tmp_path / "b.parquet")


def test_a73_parquet_gives_lists(tmp_path: Path) -> None:
    calls = [{"name": "f"}, {"name": "g"}]
    table = pa.table({"messages": [[{"role": "assistant", "tool_calls": calls}]] * 300, "other": list(range(300))})
    pq.write_table(table, tmp_path / "t.parquet")
    file = open_rows(tmp_path / "t.parquet")
    assert isinstance(file, ParquetRows)
    assert file.names() == ["messages", "other"]
    assert file.count() == 300
    rows = list(file.rows(["messages", "absent"]))
    assert len(rows) == 300
    assert rows[299].place == "t.parquet, row 300"
    assert rows[299].values == {"messages": [{"role": "assistant", "tool_calls": calls}]}
    assert type(rows[0].values["messages"][0]["tool_calls"]) is list
