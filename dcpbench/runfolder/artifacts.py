"""The files of a run folder: which there are, their hashes, what changed, and whether a secret is in one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dcpbench.provenance.secretscan import kinds_in_bytes
from dcpbench.redact import scan

MANIFEST = "manifest.json"
_BLOCK = 1 << 20


def files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Relative name and path of every file of a run; neither the manifest, nor unfinished files, nor links."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != MANIFEST and not path.name.startswith("."):
            yield path.relative_to(folder).as_posix(), path


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read as a stream."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes(folder: Path, under: str = "") -> dict[str, dict[str, Any]]:
    """`sha256` and `bytes` of every file, or of those in the folder `under`, by name."""
    return {
        name: {"sha256": sha256(path), "bytes": path.stat().st_size}
        for name, path in files(folder)
        if not under or name.startswith(f"{under}/")
    }


def changed(folder: Path, listed: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for every file that is gone, changed or not listed."""
    there = dict(files(folder))
    for name, item in listed.items():
        hint = (
            "; `dcpbench analyze` computes it again and refreshes the manifest" if name.startswith("analysis/") else ""
        )
        if name not in there:
            yield f"{name}: the file is gone{hint}"
        elif isinstance(item, Mapping) and item.get("sha256") != sha256(there[name]):
            yield f"{name}: the file is not the one that the manifest lists{hint}"
    for name in there:
        if name not in listed:
            yield f"{name}: the file is not in the manifest"


def secrets(folder: Path) -> Iterator[str]:
    """A sentence for every kind of secret that a file of the run holds, with the first line; never the secret.

    The manifest must also be free of home directories, user and host names. The other files may hold
    paths: workers need them.
    """
    manifest = folder / MANIFEST
    for name, path in [*([(MANIFEST, manifest)] if manifest.is_file() else []), *files(folder)]:
        first: dict[str, int] = {}
        for number, kind in _found(path, identity=name == MANIFEST):
            first.setdefault(kind, number)
        yield from (f"{name} line {number}: {kind}" if number else f"{name}: {kind}" for kind, number in first.items())


def _found(path: Path, *, identity: bool) -> Iterator[tuple[int, str]]:
    """(line from 1, kind); line 0 in files that are no text."""
    with path.open("rb") as file:
        binary = b"\0" in file.read(_BLOCK)
        file.seek(0)
        line = 0
        # A block of text ends with a line; a block of other bytes ends where it ends.
        while block := file.read(_BLOCK) + (b"" if binary else file.readline()):
            if binary:
                yield from ((0, kind) for kind in kinds_in_bytes(block))
                continue
            for finding in scan(block.decode(errors="replace"), identity=identity):
                yield line + finding.line, finding.kind
            line += block.count(b"\n")
