"""The run folders below a folder: when each was made, what it compared, and what came out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcpbench import config
from dcpbench.errors import DcpbenchError, LogError
from dcpbench.runfolder import ledger
from dcpbench.runfolder.layout import RunFolder


@dataclass(frozen=True)
class Run:
    """One run folder; what could not be read is None."""

    path: str
    when: str | None
    """Start of its first launch, as the ledger has it."""
    spec: str
    pairs: int
    speedup: float | None
    low: float | None
    high: float | None
    speed: str | None
    """Verdict on the speed-up."""
    verdict: str | None
    """Verdict on the comparison."""
    mode: str = "launches"
    """`lockstep` where both cases shared a launch; `pairs` then counts those."""
    aa: float | None = None
    """Speed-up that the A/A control of lockstep found between the baseline and itself."""
    aa_low: float | None = None
    aa_high: float | None = None


def runs(folder: Path) -> list[Run]:
    """Every run folder in `folder`, or `folder` itself where it is one; oldest first, never launched last.

    Raises:
        LogError: the folder does not exist.
    """
    if not folder.is_dir():
        raise LogError(f"{folder} is no folder; name the one that holds your run folders")
    paths = [folder] if RunFolder(folder).spec.is_file() else sorted(path for path in folder.iterdir() if path.is_dir())
    found = [run for path in paths if (run := _run(path)) is not None]
    return sorted(found, key=lambda run: (run.when is None, run.when or "", run.path))


def _run(path: Path) -> Run | None:
    folder = RunFolder(path)
    if not folder.spec.is_file():
        return None
    try:
        spec = config.load(folder.spec, environ={}).spec
        name, pairs = spec.name, spec.lockstep.launches if spec.mode == "lockstep" else spec.launches.pairs
        entries = ledger.read(folder.ledger) if folder.ledger.is_file() else []
    except DcpbenchError:
        return Run(str(path), None, "unreadable spec or ledger", 0, None, None, None, None, None)
    statistics = _statistics(folder.analysis / "statistics.json")
    speedup = statistics.get("speedup") or {}
    ends = speedup.get("interval") or {}
    control = statistics.get("lockstep_control") or {}
    same = control.get("interval") or {}
    return Run(
        path=str(path),
        when=next((entry.time for entry in entries if entry.event == "start"), None),
        spec=name,
        pairs=pairs,
        speedup=speedup.get("total"),
        low=ends.get("low"),
        high=ends.get("high"),
        speed=speedup.get("verdict"),
        verdict=statistics.get("verdict"),
        mode=spec.mode,
        aa=control.get("speedup"),
        aa_low=same.get("low"),
        aa_high=same.get("high"),
    )


def _statistics(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
