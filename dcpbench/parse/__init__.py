"""Console logs -> records: one module per format, one line each in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dcpbench.errors import LogError
from dcpbench.parse import jsonl, megatron, native
from dcpbench.parse.lines import segments
from dcpbench.table import LaunchTable, TableBuilder

FORMATS: dict[str, tuple[Callable[[str], bool], Callable[[Path], LaunchTable]]] = {
    "jsonl": (jsonl.recognises, jsonl.parse),
    "native": (native.recognises, native.parse),
    "megatron": (megatron.recognises, megatron.parse),
}
"""Name -> (whether a stretch of text shows this format, the parser). Detection asks in this order."""

_LOG_SUFFIXES = {".log", ".txt", ".out", ".jsonl"}


def parse_log(path: Path, format: str = "auto") -> LaunchTable:
    """The records of one launch's console log, or of a folder of per-rank logs of one launch.

    A log without a record is no error here: its table is empty, which alignment reports as a fault.

    Args:
        path: a file, or a folder in which exactly one log holds records (such as torchrun's `--log-dir`).
        format: a name in `FORMATS`, or `auto` for the first one that the text shows.

    Raises:
        LogError: the path cannot be read, the format is unknown, or several files of a folder hold records.
    """
    if format != "auto" and format not in FORMATS:
        raise LogError(f"unknown log format {format!r}; choose auto, {', '.join(FORMATS)}")
    try:
        return _parse_folder(path, format) if path.is_dir() else _parse_file(path, format)
    except OSError as error:
        raise LogError(f"the log {path} cannot be read: {error.strerror}") from None


def _parse_file(path: Path, format: str) -> LaunchTable:
    name = detect(path) if format == "auto" else format
    if name is None:
        hint = f"no records of a known format in {path.name}; {megatron.HINT}"
        return LaunchTable(source=path.name, format="unknown", columns=TableBuilder(()).columns(), hint=hint)
    return FORMATS[name][1](path)


def _parse_folder(folder: Path, format: str) -> LaunchTable:
    logs = sorted(file for file in folder.rglob("*") if file.suffix in _LOG_SUFFIXES and file.is_file())
    if not logs:
        raise LogError(f"the folder {folder} holds no {', '.join(sorted(_LOG_SUFFIXES))} file; name the log itself")
    holding = [log for log in logs if detect(log) is not None]
    if len(holding) > 1:
        names = ", ".join(str(log.relative_to(folder)) for log in holding)
        raise LogError(f"several logs in {folder} hold records ({names}); name one of them")
    return _parse_file(holding[0] if holding else logs[-1], format)


def detect(path: Path) -> str | None:
    """The name of the first format whose records appear in the file; None when there are none."""
    for _, text in segments(path):
        for name, (recognises, _parse) in FORMATS.items():
            if recognises(text):
                return name
    return None
