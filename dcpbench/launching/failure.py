"""Why a launch failed, in one line: the first error of the rank that failed first.

torchrun ends with 1 whatever a worker ended with, and its "root cause" is a guess when several
ranks fail within one of its polls: it stamps them with the same second. The order of the lines in
the log is better evidence, because the ranks write to one stream as things happen. What only
echoes another rank's end (a closed connection, torchrun's own traceback) is no cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LENGTH = 300
"""Characters of an error message that are shown."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_PREFIX = re.compile(r"^(?:\[(?:rank|default)(?P<rank>\d+)\]:? ?)+")
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):")
_PLACE = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*_*[A-Z]\w*[a-z]\w*(?P<message>: .*)?$")
_CAUSE = "The above exception was the direct cause"

_WORKER = re.compile(r"^dcpbench worker: rank (?P<rank>\d+): (?P<text>.+)")
"""What a worker of ours says last; its traceback, without the rank, may stand above."""

_NATIVE = re.compile(
    r"Watchdog caught collective operation timeout"
    r"|^terminate called after throwing"
    r"|^Fatal Python error:"
    r"|^\S*python\S*: (?:No module named|can't open file) "
    r"|error while loading shared libraries:"
    r"|^Segmentation fault|^Killed$|^Bus error"
    r"|^\S+\.py: error: |Failed to compile the C\+\+ dataset helper"
)
"""Errors that come without a Python traceback."""

_ECHO = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
    r"|remote process exited|communicator was aborted|Some NCCL operations have failed"
    r"|recvValue failed|sendBytes failed|SignalException|ChildFailedError|^KeyboardInterrupt\b|^SystemExit\b"
)
"""What a rank says when another one has gone."""

_AGENT = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+) ")
_SUMMARY_RANK = re.compile(r"^\s*rank\s+: (\d+)")
_SUMMARY_CODE = re.compile(r"^\s*exitcode\s+: (-?\d+)")
_ROOT = "Root Cause (first observed failure):"


@dataclass(frozen=True)
class Failure:
    """What the log says about a failed launch; each part is None where the log has nothing."""

    rank: int | None = None
    exit_code: int | None = None
    """Of the worker; negative: minus the number of the signal that ended it."""
    error: str | None = None
    line: int | None = None
    """Where `error` stands in the log, counted from 1."""
    error_rank: int | None = None

    def sentence(self, log: str) -> str:
        """The one line for the user; empty when the log explains nothing."""
        parts = []
        if self.exit_code is not None:
            who = "a worker" if self.rank is None else f"rank {self.rank}"
            parts.append(f"{who} {ended(self.exit_code)}")
        if self.error is not None:
            by = "" if self.error_rank in {None, self.rank} else f" by rank {self.error_rank}"
            parts.append(f"{self.error} ({log}:{self.line}{by})")
        return ": ".join(parts)


@dataclass(frozen=True)
class _Error:
    line: int
    rank: int | None
    text: str

    @property
    def echo(self) -> bool:
        return _ECHO.search(self.text) is not None


def ended(code: int) -> str:
    """An exit status in words: `exited with code 7`, `was ended by SIGKILL`."""
    if code >= 0:
        return f"exited with code {code}"
    if code == -signal.SIGKILL:
        return "was ended by SIGKILL (the usual cause is that the machine ran out of memory)"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def first_failure(log: Path) -> Failure:
    """Read the log of a failed launch; a log that is missing gives an empty answer."""
    codes: dict[int, int] = {}
    root: int | None = None
    errors: list[_Error] = []
    open_tracebacks: dict[int | None, bool] = {}  # per rank; true: what follows replaces the last error
    places: dict[int | None, str] = {}
    rank_of_block: int | None = None
    in_root = False
    for number, rank, text in _lines(log):
        if match := _AGENT.search(text):
            codes.setdefault(int(match["rank"]), int(match["code"]))
            root = int(match["rank"]) if root is None else root
        elif _ROOT in text:
            in_root = True
        elif match := _SUMMARY_RANK.match(text):
            rank_of_block = int(match[1])
            root = rank_of_block if in_root else root
        elif (match := _SUMMARY_CODE.match(text)) and rank_of_block is not None:
            codes[rank_of_block] = int(match[1])
        elif match := _WORKER.match(text):
            _name(errors, _Error(number, int(match["rank"]), match["text"]))
        elif _TRACEBACK.match(text):
            open_tracebacks.setdefault(rank, False)
        elif text.startswith(_CAUSE):
            open_tracebacks[rank] = True
        elif rank in open_tracebacks and (match := _PLACE.match(text)):
            places[rank] = f"{Path(match['file']).name} line {match['line']}"
        elif rank in open_tracebacks and (match := _EXCEPTION.match(text)):
            place = "" if match["message"] or rank not in places else f" in {places[rank]}"
            _add(errors, _Error(number, rank, text + place), open_tracebacks.pop(rank))
        elif _NATIVE.search(text):
            errors.append(_Error(number, rank, text))
    return _judge(codes, root, errors)


def _add(errors: list[_Error], error: _Error, replaces: bool) -> None:
    # `raise A from B` translates B into a better sentence; any other chain hides its first error.
    if replaces:
        last = next((i for i in reversed(range(len(errors))) if errors[i].rank == error.rank), None)
        if last is not None:
            errors[last] = error
            return
    errors.append(error)


def _name(errors: list[_Error], error: _Error) -> None:
    for i, known in enumerate(errors):
        if known.rank is None and known.text.endswith(error.text):
            errors[i] = _Error(known.line, error.rank, error.text)
            return
    errors.append(error)


def _judge(codes: dict[int, int], root: int | None, errors: list[_Error]) -> Failure:
    causes = [error for error in errors if not error.echo]
    first = causes[0] if causes else None
    told = {error.rank for error in errors}
    # A rank that ended by itself, without a word, ended before those that complain about it.
    silent = [rank for rank, code in codes.items() if rank not in told and code not in {0, -signal.SIGTERM}]
    rank = root
    if first is not None and first.rank in codes:
        rank = first.rank
    elif first is None and silent and root not in silent:
        rank = silent[0]
    code = codes.get(rank) if rank is not None else None
    if first is None and code in {1, None}:  # an uncaught exception; all there is to show of it is an echo
        first = next((error for error in errors if error.rank in {rank, None}), None)
    if first is None:
        return Failure(rank, code)
    return Failure(rank, code, _one_line(first.text), first.line, first.rank)


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LENGTH else text[: _LENGTH - 3] + "..."


def _lines(log: Path) -> Iterator[tuple[int, int | None, str]]:
    """(line number, rank where a prefix names one, text without prefix and colour)."""
    if not log.is_file():
        return
    with log.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            text = _ANSI.sub("", raw.decode("utf-8", "replace")).rstrip("\r\n")
            text = text.rpartition("\r")[2]  # what a progress bar left on the line
            rank = None
            if match := _PREFIX.match(text):
                rank = int(match["rank"])
                text = text[match.end() :]
            yield number, rank, text
