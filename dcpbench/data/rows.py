"""Rows of a JSON Lines or Parquet file, one at a time, each with the place that messages name.

JSON Lines is read as bytes and split at line feeds only: U+0085, U+2028 and their like are
ordinary characters inside a JSON string. A line may have any length.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from dcpbench.data.identity import check_readable
from dcpbench.errors import DataError

_PARQUET_MAGIC = b"PAR1"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2"}
_PARQUET_BATCH = 256


@dataclass(frozen=True)
class Row:
    """One record; `place` is the file's name and the physical line (JSON Lines) or row (Parquet), from 1."""

    place: str
    values: dict[str, Any]


class RowFile(Protocol):
    """A file of records."""

    def names(self) -> list[str]:
        """The column names: a Parquet file's schema, the first record of JSON Lines."""

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Every record in order, with at least `columns` where they exist.

        Raises:
            DataError: a record cannot be read; names its place.
        """

    def count(self) -> int:
        """Number of records, unreadable ones included."""


def open_rows(path: Path) -> RowFile:
    """The reader of a data file, chosen by what the file holds.

    Raises:
        DataError: the file is missing, empty, a Git LFS pointer, compressed, or no Parquet despite its name.
    """
    check_readable(path, "data.path")
    with path.open("rb") as file:
        head = file.read(4)
    if head == _PARQUET_MAGIC:
        return ParquetRows(path)
    if path.suffix.lower() == ".parquet":
        raise DataError(f"data.path: {path} is not a Parquet file: it does not begin with PAR1")
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise DataError(f"data.path: {path} is compressed ({name}); unpack it first")
    return JsonLines(path)


class JsonLines:
    """One JSON object a line; blank lines and a byte-order mark are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> list[str]:
        """See `RowFile`."""
        first = next(self.rows(()), None)
        if first is None:
            raise DataError(f"data.path: {self._path} holds no record, only blank lines")
        return list(first.values)

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """See `RowFile`."""
        for number, line in self._lines():
            place = f"{self._path.name}, line {number}"
            yield Row(place, _parse_object(line, place))

    def count(self) -> int:
        """See `RowFile`."""
        return sum(1 for _ in self._lines())

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield number, text


class ParquetRows:
    """The rows of a Parquet file as plain Python values (lists and dicts, never arrays)."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa  # noqa: PLC0415  (slow to import; only this format needs it)
        import pyarrow.parquet as pq  # noqa: PLC0415

        self._path = path
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"data.path: {path} cannot be read as Parquet: {_first_line(error)}") from None

    def names(self) -> list[str]:
        """See `RowFile`."""
        return list(self._file.schema_arrow.names)

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """See `RowFile`."""
        import pyarrow as pa  # noqa: PLC0415

        number = 0
        wanted = [name for name in self.names() if name in columns]
        batches = self._file.iter_batches(batch_size=_PARQUET_BATCH, columns=wanted, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self._path.name}, after row {number}: {_first_line(error)}") from None
            if batch is None:
                return
            for values in self._values(batch, number):
                number += 1
                yield Row(f"{self._path.name}, row {number}", values)

    def _values(self, batch: Any, before: int) -> list[dict[str, Any]]:
        try:
            return list(batch.to_pylist())
        except UnicodeDecodeError:
            pass
        # Arrow checks text only when it becomes Python strings; row by row, the culprit shows itself.
        for index in range(batch.num_rows):
            try:
                batch.slice(index, 1).to_pylist()
            except UnicodeDecodeError:
                place = f"{self._path.name}, row {before + index + 1}"
                raise DataError(f"{place}: not UTF-8 text; convert the file or remove the row") from None
        raise AssertionError("a batch that cannot be converted has no row that cannot")

    def count(self) -> int:
        """See `RowFile`."""
        return int(self._file.metadata.num_rows)


def parse_json(text: str) -> Any:
    """The value of strict JSON text: no NaN or Infinity.

    Raises:
        ValueError: it is not JSON; says why, in a few words.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _parse_object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise DataError(
            f"{place}: not UTF-8 text (byte 0x{byte:02x} at {error.start}); save the file as UTF-8"
        ) from None
    except ValueError as error:
        raise DataError(f"{place}: not JSON: {error}; write one object per line") from None
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", type(None): "null"}.get(type(value), "no object")
        raise DataError(f"{place}: the record is {kind}; write one JSON object per line")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value; write null")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
