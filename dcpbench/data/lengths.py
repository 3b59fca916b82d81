"""Lengths of generated samples: lognormal, uniform, a list, a CSV file.

A length counts the tokens of a sample; one of n tokens trains on n - 1 of them. Draws come from
NumPy's legacy generator, whose streams are frozen: a seed gives the same lengths on every version.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dcpbench.data.identity import check_readable
from dcpbench.errors import DataError
from dcpbench.spec import CsvData, ListData, LognormalData, UniformData

DRAWS = 1_000_000
"""Lengths that Megatron-LM's mock draws."""
TRAINING_SPLIT = DRAWS // 3
"""Its training split is the first third, indices 0 to 333 332; later ones wrap round."""
LONGEST = 2**31 - 1

MockData = LognormalData | UniformData | ListData | CsvData


def dataset_lengths(data: MockData) -> NDArray[np.int64]:
    """Lengths in tokens of the whole dataset, in its order; the sample stream wraps round its end.

    Raises:
        DataError: a CSV file cannot be used; names the file, line and cell.
    """
    if isinstance(data, LognormalData):
        return lognormal_draws(data)[:TRAINING_SPLIT]
    if isinstance(data, UniformData):
        draws = np.random.RandomState(data.seed).randint(data.min_length, data.max_length + 1, TRAINING_SPLIT, np.int64)
        return np.asarray(draws, dtype=np.int64)
    if isinstance(data, ListData):
        return np.array(data.lengths, dtype=np.int64)
    return csv_lengths(data.path, data.column)


def lognormal_draws(data: LognormalData) -> NDArray[np.int64]:
    """All million draws, clipped to [min_length, max_length], then truncated to integers.

    The underlying normal has mean ln(mean) - sigma^2 / 2, so that `mean` is the lognormal's own mean
    before clipping. Source: Megatron-LM's mock of variable-length data, which fixes seed 0.
    """
    mu = np.log(data.mean) - data.sigma**2 / 2
    draws = np.random.RandomState(data.seed).lognormal(mu, data.sigma, DRAWS)
    return np.clip(draws, data.min_length, data.max_length).astype(np.int64)


def csv_lengths(path: Path, column: str | None = None) -> NDArray[np.int64]:
    """Every length in a CSV file: all columns row by row, or one `column` of a file with a header.

    The first line is data when its cells are numbers, and a header when none is. A byte-order
    mark, blank lines and any line ending are accepted; numbers may be written as 512, 512.0 or 5.12e2.

    Raises:
        DataError: no such file or column, or a cell that is no length of at least 2 tokens; names
            the file, the physical line and the cell.
    """
    rows = _csv_rows(path)
    line, first = next(rows, (0, []))
    if not first:
        raise DataError(f"data.path: {path} holds no length")
    numeric = [_is_number(cell) for cell in first]
    pick: int | None = None
    if column is not None:
        if any(numeric) and column not in first:
            raise DataError(f"{path.name}, line {line}: no header, so there is no column {column!r}; unset data.column")
        if first.count(column) != 1:
            problem = "no column" if column not in first else "more than one column"
            raise DataError(f"{path.name}, line {line}: {problem} {column!r}; the columns are {', '.join(first)}")
        pick = first.index(column)
    lengths: list[int] = []
    if pick is None and any(numeric):
        lengths.extend(_length(cell, path, line) for cell in first)
    for line, row in rows:
        if pick is not None and pick >= len(row):
            raise DataError(f"{path.name}, line {line}: no cell in column {column!r}")
        lengths.extend(_length(cell, path, line, len(row)) for cell in (row if pick is None else row[pick : pick + 1]))
    if not lengths:
        raise DataError(f"data.path: {path} holds no length, only a header")
    return np.array(lengths, dtype=np.int64)


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(physical line, stripped cells) of every line that is not blank."""
    check_readable(path, "data.path")
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path.name}, line {line}: not UTF-8 text; save the file as UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in reader:
            row = [cell.strip() for cell in cells]
            if any(row):
                yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path.name}, line {reader.line_num}: not CSV: {error}") from None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def _length(cell: str, path: Path, line: int, columns: int = 1) -> int:
    where = f"{path.name}, line {line}"
    shown = cell if len(cell) <= 40 else cell[:37] + "..."
    value = float(cell) if re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", cell, re.ASCII) else None
    if value is None or not value.is_integer():
        raise DataError(f"{where}: {shown!r} is not a length; every cell must be a whole number of tokens")
    if not 2 <= value <= LONGEST:
        hint = "; choose one column with data.column" if columns > 1 else ""
        raise DataError(f"{where}: length {shown} is outside 2 to {LONGEST} tokens{hint}")
    return int(value)
