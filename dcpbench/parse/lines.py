"""What console formats share: physical lines, and records of `name: value |` fields anywhere in them.

Logs come with text glued before a record, launcher prefixes, colour codes, carriage returns, bytes
of any encoding, torn lines and several records in a line. So a record is searched for, never
assumed to be a line: from its start expression to its closing field. What begins and does not
close, or holds something that is no field, is malformed, with its line number.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dcpbench.records import Malformed
from dcpbench.table import Value, absent

_BLOCK = 1 << 20
_LONGEST_SEGMENT = 1 << 24
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def segments(path: Path) -> Iterator[tuple[int, str]]:
    """(physical line number, text) of each stretch between line ends, without colour codes.

    A carriage return ends a stretch but not a line, as progress bars use it. Bytes are read as
    Latin-1, which cannot fail and leaves ASCII alone; a UTF-16 byte-order mark (PowerShell's
    redirection) is honoured.

    Raises:
        OSError: the file cannot be read.
    """
    number = 1
    pending: list[str] = []
    length = 0
    with path.open("rb") as file:
        utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        file.seek(0)
        decoder = codecs.getincrementaldecoder("utf-16" if utf16 else "latin-1")(errors="replace")
        while block := file.read(_BLOCK):
            *lines, rest = decoder.decode(block).split("\n")
            for line in lines:
                whole = line
                if pending:
                    whole = "".join((*pending, line))
                    pending.clear()
                    length = 0
                if "\r" in whole or "\x1b" in whole:
                    yield from stretches(number, whole)
                else:
                    yield number, whole
                number += 1
            pending.append(rest)
            length += len(rest)
            if length > _LONGEST_SEGMENT:
                # A file without line feeds must not be held in memory: give out all up to the last CR.
                head, cut, tail = "".join(pending).rpartition("\r")
                yield from stretches(number, head if cut else tail)
                pending = [tail] if cut else []
                length = len(tail) if cut else 0
    if pending:
        yield from stretches(number, "".join(pending))


def stretches(number: int, line: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of each stretch of one physical line, without colour codes; see `segments`."""
    for part in _ESCAPES.sub("", line).split("\r"):
        yield number, part


@dataclass(frozen=True)
class Field:
    """A field that a parser keeps: the table's column and how its text reads."""

    column: str
    kind: Literal["int", "float", "text"]
    nonfinite: bool = True
    """Whether NaN or infinity is a problem of the record; where False it just counts as absent."""


# Of floats only those that cannot overflow to infinity; the general way reads the rest.
_PATTERNS = {"int": r"(\d{1,18})", "float": r"([+-]?[\d.]{1,40}(?:[eE][+-]?\d\d?)?)", "text": r"([\w,.-]{1,4096})"}
_CONVERTERS = {"int": int, "float": float, "text": str}
_INT = re.compile(r"\d{1,18}")
_FLOAT = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|nan|inf(?:inity)?)", re.IGNORECASE)
_TEXT = re.compile(r"[\w,.-]{1,4096}", re.ASCII)
_NAME = re.compile(r"[A-Za-z][\w ()/.%+-]*", re.ASCII)


@dataclass(frozen=True)
class _Layout:
    """The field names of the records of one writer, compiled to one expression."""

    pattern: re.Pattern[str]
    slots: tuple[int, ...]
    converters: tuple[type[int] | type[float] | type[str], ...]


@dataclass
class RecordReader:
    """Finds the records of one format in a log.

    Args:
        start: expression of a record's start, with groups (iteration, total) and the bar after them.
        fields: name -> what is kept of it. Other well-formed fields are ignored.
        closing: name of the field that ends every record.
        literals: words of which every start and every closing field contains one; a quick test.
    """

    start: str
    fields: Mapping[str, Field]
    closing: str
    literals: tuple[str, ...]
    malformed: list[Malformed] = field(default_factory=list)
    names: tuple[str, ...] = ()
    """Columns of the rows that `read` gives: `line`, `iteration`, `total`, then the fields' columns."""

    def __post_init__(self) -> None:
        self._start = re.compile(self.start, re.ASCII)
        self._closing = re.compile(r"\|\s*" + re.escape(self.closing) + r":[^|]*\|")
        kept = tuple(dict.fromkeys(known.column for known in self.fields.values()))
        self.names = ("line", "iteration", "total", *kept)
        self._slot = {column: slot for slot, column in enumerate(self.names)}
        self._blank: list[Value] = [absent(name) for name in self.names]
        self._layout: _Layout | None = None
        self._open = False

    def read(self, number: int, text: str) -> Iterator[tuple[list[Value], tuple[str, ...]]]:
        """(row, problems) of each record in one stretch of text; malformed ones go to `malformed`."""
        for literal in self.literals:
            if literal in text:
                break
        else:
            return
        match = self._start.search(text)
        if match is None:
            if self._closing.search(text):
                if not self._open:
                    self.malformed.append(Malformed(number, "the end of a record without its beginning"))
                self._open = False
            return
        while match is not None:
            # Nearly always the record looks like the one before it: one expression reads it all.
            row = self._by_layout(number, text, match.start())
            if row is not None:
                values, stop = row
                self._open = False
                yield values, ()
                match = self._start.search(text, stop) if stop < len(text) else None
                continue
            following = self._start.search(text, match.end())
            limit = following.start() if following else len(text)
            closing = self._closing.search(text, match.end() - 1, limit)
            if closing is None:
                self._tear(number, match, "the record is interrupted before its end")
            else:
                self._open = False
                try:
                    yield self._by_fields(number, match, text[match.end() : closing.end()])
                except ValueError as error:
                    self.malformed.append(Malformed(number, str(error), _iteration(match)))
            match = following

    def _tear(self, number: int, match: re.Match[str], message: str) -> None:
        self.malformed.append(Malformed(number, message, _iteration(match)))
        self._open = True

    def _by_layout(self, number: int, text: str, position: int) -> tuple[list[Value], int] | None:
        """(row, where the record stops) if the record has the layout of the last one and finite numbers."""
        layout = self._layout
        match = layout.pattern.match(text, position) if layout else None
        if layout is None or match is None:
            return None
        row = self._blank.copy()
        row[0] = number
        try:
            for slot, convert, word in zip(layout.slots, layout.converters, match.groups(), strict=True):
                row[slot] = convert(word)
        except ValueError:
            return None
        return row, match.end()

    def _by_fields(self, number: int, match: re.Match[str], body: str) -> tuple[list[Value], tuple[str, ...]]:
        """Row and problems of a record of any layout.

        Raises:
            ValueError: a field is torn, repeated, or its value is not what its name promises.
        """
        row = self._blank.copy()
        row[0], row[1], row[2] = number, int(match[1]), int(match[2])
        problems: list[str] = []
        seen: list[str] = []
        for part in body.split("|")[:-1]:
            name, colon, word = (piece.strip() for piece in part.partition(":"))
            if not colon or not _NAME.fullmatch(name) or ":" in word:
                raise ValueError(f"unexpected text {_shown(part)} inside a record")
            if name in seen:
                raise ValueError(f"the field {name!r} appears twice in a record")
            seen.append(name)
            known = self.fields.get(name)
            if known is None:
                continue
            value = _convert(name, word, known)
            if isinstance(value, float) and not math.isfinite(value):
                if known.nonfinite:
                    problems.append(f"{name} is {word.lower()}")
                    row[self._slot[known.column]] = value
                continue
            row[self._slot[known.column]] = value
        self._layout = self._learn(seen)
        return row, tuple(problems)

    def _learn(self, names: list[str]) -> _Layout:
        pattern = self.start
        slots, kinds = [1, 2], ["int", "int"]
        for name in names:
            known = self.fields.get(name)
            pattern += f" {re.escape(name)}: *" + (_PATTERNS[known.kind] if known else "[^|: ]+") + r" \|"
            if known:
                slots.append(self._slot[known.column])
                kinds.append(known.kind)
        return _Layout(re.compile(pattern, re.ASCII), tuple(slots), tuple(_CONVERTERS[kind] for kind in kinds))


def _iteration(match: re.Match[str]) -> int:
    return int(match[1])


def _convert(name: str, word: str, known: Field) -> Value:
    if known.kind == "int" and _INT.fullmatch(word):
        return int(word)
    if known.kind == "float" and _FLOAT.fullmatch(word):
        return float(word)
    if known.kind == "text" and _TEXT.fullmatch(word):
        return word
    noun = {"int": "a whole number", "float": "a number", "text": "one word"}[known.kind]
    raise ValueError(f"{name} {_shown(word)} is not {noun}")


def _shown(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")
