"""The iterations of one launch as columns: what every parser makes and what alignment reads.

A million iterations as columns are 100 MB; as objects they would be several GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcpbench.records import Malformed, RunEnd, RunHeader

ABSENT = -1
"""Stands for a missing value in an integer column; float columns hold NaN, text columns the empty word."""

INTEGERS = (
    "line",
    "iteration",
    "total",
    "consumed_samples",
    "consumed_tokens",
    "skipped_samples",
    "samples",
    "tokens",
    "padding_tokens",
    "squared_lengths",
    "longest",
    "token_count",
    "microbatches",
    "order",
    "skipped",
)
FLOATS = (
    "loss",
    "loss_sum",
    "grad_norm",
    "learning_rate",
    "seconds",
    "imbalance",
    "scheduling_seconds",
    "peak_memory_bytes",
    "reserved_memory_bytes",
    "tflops_per_gpu",
    "ended",
    "pass_seconds",
    "update_seconds",
    "gradient_difference",
)
TEXTS = ("batch_digest", "cp_sizes", "case", "gradient_segment")

_ROWS_PER_CHUNK = 1 << 15

Value = float | str
"""A cell while it is collected; integers are floats' subtype here."""


def absent(name: str) -> Value:
    """What a column holds where a record lacks the value."""
    if name in INTEGERS:
        return ABSENT
    return float("nan") if name in FLOATS else ""


@dataclass(frozen=True)
class LaunchTable:
    """All that one launch reported. `columns` maps each name above to an array of shape (records,).

    Rows are in the order in which they were written; nothing has been judged yet, so iterations may
    be missing, repeated or out of order. `line` is the physical line of the source, `total` the
    number of iterations that a console record announces, `skipped` the number of optimizer steps
    not taken. Times are in seconds, memory in bytes, text columns are UTF-8 bytes.
    """

    source: str
    """Name of the file it was read from."""
    format: str
    columns: dict[str, NDArray[Any]]
    header: RunHeader | None = None
    headers: tuple[RunHeader, ...] = ()
    """In lockstep the header of each case; else empty."""
    end: RunEnd | None = None
    malformed: tuple[Malformed, ...] = ()
    problems: dict[int, tuple[str, ...]] | None = None
    """Row -> what is wrong with its numbers, such as `loss is nan`."""
    started: str | None = None
    """Local time of the first record, `YYYY-MM-DD HH:MM:SS.ffffff`, in formats that log one."""
    ends_are_marked: bool = False
    """Whether a complete launch of this format writes an end mark."""
    hint: str = ""
    """What to tell a user who finds no record in this source."""

    @property
    def rows(self) -> int:
        """Number of records."""
        return len(self.columns["iteration"])

    def has(self, name: str) -> bool:
        """Whether any record carries this value."""
        values = self.columns[name]
        if name in INTEGERS:
            return bool((values != ABSENT).any())
        return bool((~np.isnan(values)).any()) if name in FLOATS else bool((values != b"").any())


class TableBuilder:
    """Collects rows and turns them into columns, a chunk at a time.

    Args:
        names: the columns of a row, in its order; every other column is absent.
        divide: column -> divisor that brings a float column to seconds or bytes.
    """

    def __init__(self, names: Sequence[str], divide: dict[str, float] | None = None) -> None:
        self._names = tuple(names)
        self._divide = divide or {}
        self._rows: list[Sequence[Value]] = []
        self._chunks: dict[str, list[NDArray[Any]]] = {name: [] for name in self._names}
        self._count = 0
        self._problems: dict[int, tuple[str, ...]] = {}

    def add(self, row: Sequence[Value], problems: tuple[str, ...] = ()) -> None:
        """Appends one record; `row` holds a value for each name."""
        if problems:
            self._problems[self._count] = problems
        self._rows.append(row)
        self._count += 1
        if len(self._rows) >= _ROWS_PER_CHUNK:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        for name, values in zip(self._names, zip(*self._rows, strict=True), strict=True):
            self._chunks[name].append(_array(name, values))
        self._rows = []

    def columns(self) -> dict[str, NDArray[Any]]:
        """Every column of a `LaunchTable`, those that no row has included."""
        self._flush()
        result: dict[str, NDArray[Any]] = {}
        for name in (*INTEGERS, *FLOATS, *TEXTS):
            chunks = self._chunks.pop(name, [])
            if not chunks:
                # One shared cell: an absent column costs no memory.
                result[name] = np.broadcast_to(_array(name, [absent(name)]), (self._count,))
            elif name in self._divide:
                result[name] = np.concatenate(chunks) / self._divide[name]
            else:
                result[name] = np.concatenate(chunks)
        return result

    @property
    def problems(self) -> dict[int, tuple[str, ...]]:
        """Row -> what is wrong with it."""
        return self._problems


def _array(name: str, values: Sequence[Value]) -> NDArray[Any]:
    if name in INTEGERS:
        return np.array(values, dtype=np.int64)
    if name in FLOATS:
        return np.array(values, dtype=np.float64)
    return np.array([str(value).encode() for value in values], dtype=np.bytes_)
