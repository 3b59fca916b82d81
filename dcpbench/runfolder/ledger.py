"""The launches as they really happened: `ledger.jsonl`, one line when each begins and one when it ends.

Only ever appended to, and on the disk before anything else happens, so that a run that was killed
knows afterwards what it had done.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from dcpbench.errors import LogError
from dcpbench.redact import redact


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line. `status`, `exit_code` and `reason` belong to an end; a start without an end was cut off."""

    time: str
    """UTC, ISO 8601."""
    event: Literal["start", "end"]
    launch: str
    status: str | None = None
    """completed, failed, timeout or interrupted."""
    exit_code: int | None = None
    reason: str | None = None


def append(path: Path, event: Literal["start", "end"], launch: str, **details: str | int | None) -> None:
    """Add a line and wait until it is on the disk.

    Args:
        path: the ledger; it is created if need be.
        event: what happened.
        launch: id of the launch.
        **details: `status`, `exit_code` and `reason` of an end.
    """
    reason = details.pop("reason", None)
    entry = {
        **asdict(Entry(time=datetime.now(UTC).isoformat(timespec="milliseconds"), event=event, launch=launch)),
        **details,
        "reason": None if reason is None else redact(str(reason)),
    }
    with path.open("ab+") as file:
        torn = file.tell() > 0 and _last_byte(path) != b"\n"
        file.write((b"\n" if torn else b"") + json.dumps(entry, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def read(path: Path) -> list[Entry]:
    """All entries in order; none where there is no file. A line torn by a crash is passed over.

    Raises:
        LogError: the file is there and cannot be read.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror}") from None
    entries = []
    for line in lines:
        try:
            data = json.loads(line)
            entries.append(Entry(**{key: data[key] for key in Entry.__dataclass_fields__}))
        except (ValueError, TypeError, KeyError):
            continue
    return entries


def last_end(path: Path) -> dict[str, Entry | None]:
    """Per launch that was started, its last entry if that is an end; None where it was cut off."""
    state: dict[str, Entry | None] = {}
    for entry in read(path):
        state[entry.launch] = entry if entry.event == "end" else None
    return state
