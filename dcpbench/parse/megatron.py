"""Megatron-LM's training log: the lines of `training_log`, printed by the last rank.

Facts this parser rests on (Megatron-LM, `megatron/training/training.py`): fields are separated and
ended by ` |`; a loss is printed only when it is >= 0, so a NaN loss has no field; a skipped step
prints loss 0 and raises the skip counter; the record of the first iteration of a process resets
neither sums nor timer nor counters, so the second record is the mean of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dcpbench.parse.lines import Field, RecordReader, segments
from dcpbench.records import Malformed
from dcpbench.table import LaunchTable, TableBuilder, Value

HINT = "Megatron prints on the last rank"

_START = r"(?<!dcpbench )iteration\s+(\d{1,18})/\s*(\d{1,18}) \|(?= consumed samples:)"
_FIELDS = {
    "consumed samples": Field("consumed_samples", "int"),
    "skipped samples": Field("skipped_samples", "int"),
    "elapsed time per iteration (ms)": Field("seconds", "float"),
    "throughput per GPU (TFLOP/s/GPU)": Field("tflops_per_gpu", "float", nonfinite=False),
    "learning rate": Field("learning_rate", "float"),
    "global batch size": Field("samples", "int"),
    "lm loss": Field("loss", "float"),
    "grad norm": Field("grad_norm", "float"),
    "number of skipped iterations": Field("skipped", "int"),
}
_CLOSING = "number of nan iterations"
_RESTART = "[before the start of training step]"
_RECORD = re.compile(_START, re.ASCII)
_RESTARTED = re.compile(r"\[before the start of training step\] datetime: (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", re.ASCII)
_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)\]\s+iteration\s", re.ASCII)


def recognises(text: str) -> bool:
    """Whether the text holds the start of one of Megatron-LM's training records."""
    return "consumed samples:" in text and _RECORD.search(text) is not None


class LogReader:
    """Finds the records in the lines of one log, with the averaging of the second record undone."""

    def __init__(self) -> None:
        self._records = RecordReader(_START, _FIELDS, closing=_CLOSING, literals=("iteration",))
        self._averaging = _Averaging(self._records.names)
        self.names = self._records.names
        """Columns of the rows that `read` gives; `seconds` holds milliseconds."""
        self.started: str | None = None
        """The time of the first record, as logged."""
        self._latest, self._starts = "", 0

    @property
    def malformed(self) -> list[Malformed]:
        """What began like a record and was none."""
        return self._records.malformed

    def read(self, number: int, text: str) -> Iterator[tuple[list[Value], tuple[str, ...]]]:
        """(row, problems) of each record in one stretch of text."""
        if _RESTART in text:
            self._starts += 1
            if not self._held_up(text):
                self._averaging.restart()
        for row, problems in self._records.read(number, text):
            if self.started is None and (match := _TIME.search(text)):
                self.started = match[1]
            self._averaging.undo(row)
            self._latest = text
            yield row, problems

    def _held_up(self, text: str) -> bool:
        """Whether the line of a start is that of the process whose records are being read, and not of another one.

        The first rank prints it and the last one the records, so a buffer may bring it after any number of them: then
        it is the first such line of the log, and tells of a time before the latest record.
        """
        if self._starts > 1:
            return False
        begun, written = _RESTARTED.search(text), _TIME.findall(self._latest)
        return begun is not None and bool(written) and begun[1] <= written[-1][: len(begun[1])]


def parse(path: Path) -> LaunchTable:
    """The records of a Megatron-LM console log, with the averaging of the second record undone.

    Raises:
        OSError: the file cannot be read.
    """
    reader = LogReader()
    builder = TableBuilder(reader.names, {"seconds": 1e3})
    for number, text in segments(path):
        for row, problems in reader.read(number, text):
            builder.add(row, problems)
    return LaunchTable(
        source=path.name,
        format="megatron",
        columns=builder.columns(),
        malformed=tuple(reader.malformed),
        problems=builder.problems,
        started=reader.started,
        hint=f"no records here ({path.name}); {HINT}",
    )


@dataclass
class _First:
    iteration: float
    elapsed: float
    loss: float
    skipped: float
    tflops: float


class _Averaging:
    """Undoes the mean in the second record of each process: x2 = 2 * mean - x1."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._at = {name: slot for slot, name in enumerate(names)}
        self._iteration = self._at["iteration"]
        self._records = 0
        self._last = 0.0
        self._first: _First | None = None

    def restart(self) -> None:
        """A process begins. Too near to the last start it is the same one, its line held up by a buffer."""
        if self._records > 2:
            self._records = 0

    def undo(self, row: list[Value]) -> None:
        """Corrects `row` in place where it is the second record of its process."""
        at = self._at
        iteration = float(row[self._iteration])
        self._records = 1 if iteration <= self._last else self._records + 1
        self._last = iteration
        if self._records > 2:
            return
        elapsed, loss, skipped, tflops = (
            float(row[at[name]]) for name in ("seconds", "loss", "skipped", "tflops_per_gpu")
        )
        if self._records == 1:
            self._first = _First(iteration, elapsed, loss, skipped, tflops)
            return
        first = self._first
        if first is None or iteration != first.iteration + 1:
            return
        exact = 2 * elapsed - first.elapsed
        if exact <= 0:
            # No mean of two positive times is at most half of one of them: this log does not average.
            return
        row[at["seconds"]] = exact
        # Logged with the FLOPs of this iteration over the mean time.
        row[at["tflops_per_gpu"]] = tflops * elapsed / exact
        if skipped >= 0 and first.skipped >= 0:
            row[at["skipped"]] = int(skipped - first.skipped)
        if first.skipped <= 0 and row[at["skipped"]] == 0:
            # The loss is a mean over the steps taken only.
            row[at["loss"]] = 2 * loss - first.loss
