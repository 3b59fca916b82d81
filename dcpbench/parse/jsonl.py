"""`records.jsonl`, the file form of a launch's records at full precision."""

from __future__ import annotations

import re
from pathlib import Path

from dcpbench import records
from dcpbench.records import IterationRecord, Malformed, RunEnd, RunHeader
from dcpbench.table import ABSENT, FLOATS, INTEGERS, LaunchTable, TableBuilder, Value

_LINE = re.compile(r'\s*\{"kind":\s*"(?:header|iteration|end)"')

_INTEGERS = tuple(name for name in INTEGERS if name not in ("line", "total", "skipped", "skipped_samples"))
_FLOATS = tuple(name for name in FLOATS if name != "imbalance")
_NAMES = ("line", "skipped", "batch_digest", "cp_sizes", "case", "gradient_segment", "imbalance", *_INTEGERS, *_FLOATS)


def recognises(text: str) -> bool:
    """Whether the text is a line of a `records.jsonl`."""
    return _LINE.match(text) is not None


def parse(path: Path) -> LaunchTable:
    """The records of a `records.jsonl`. A launch that completed has written an end record.

    Raises:
        OSError: the file cannot be read.
    """
    builder = TableBuilder(_NAMES)
    malformed: list[Malformed] = []
    headers: list[RunHeader] = []
    end: RunEnd | None = None
    for number, record in records.stream(path):
        if isinstance(record, IterationRecord):
            builder.add(_row(number, record), record.problems)
        elif isinstance(record, Malformed):
            malformed.append(record)
        elif isinstance(record, RunHeader):
            if records.second_header(headers, record):
                malformed.append(Malformed(number, "a second header; the file holds more than one launch"))
            headers.append(record)
        else:
            end = record
    return LaunchTable(
        source=path.name,
        format="jsonl",
        columns=builder.columns(),
        header=headers[0] if headers else None,
        headers=tuple(header for header in headers if header.mode == "lockstep"),
        end=end,
        malformed=tuple(malformed),
        problems=builder.problems,
        ends_are_marked=True,
        hint=f"no records in {path.name}; the launch ended before its first iteration did",
    )


def _row(number: int, record: IterationRecord) -> list[Value]:
    row: list[Value] = [number, int(record.skipped), record.batch_digest or "", records.cp_text(record.cp_sizes)]
    row += [record.case or "", record.gradient_segment or "", _imbalance(record.rank_seconds)]
    for name in _INTEGERS:
        value = getattr(record, name)
        row.append(ABSENT if value is None else value)
    for name in _FLOATS:
        value = getattr(record, name)
        row.append(float("nan") if value is None else value)
    return row


def _imbalance(rank_seconds: tuple[float, ...]) -> float:
    """The slowest rank's time over the ranks' mean time; NaN where it is not recorded."""
    total = sum(rank_seconds)
    return max(rank_seconds) * len(rank_seconds) / total if total > 0 else float("nan")
