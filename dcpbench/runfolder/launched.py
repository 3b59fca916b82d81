"""The launches of a run as they happened: the ledger's order, and what each said of itself in its record header."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dcpbench import records
from dcpbench.plan import LAYOUT_CONTROL
from dcpbench.provenance.schema import LaunchFacts
from dcpbench.records import RunHeader
from dcpbench.runfolder import ledger
from dcpbench.runfolder.layout import RunFolder
from dcpbench.spec import CASES

_WORKER_FACTS = (
    "device",
    "dtype",
    "attention",
    "scheduler",
    "costs",
    "padding",
    "capacity",
    "cp_sizes",
    "parameters",
    "group_memory_bytes",
)
"""Fields of a run header that the manifest repeats."""
_CASE_FACTS = ("scheduler", "cp_sizes", "costs")
"""Those in which the cases of a lockstep launch differ."""


def launches(run: RunFolder) -> list[LaunchFacts]:
    """Every start in the ledger's order; the folder of an id belongs to its last start."""
    entries = ledger.read(run.ledger)
    starts = [place for place, entry in enumerate(entries) if entry.event == "start"]
    last = {entries[place].launch: place for place in starts}
    facts: list[LaunchFacts] = []
    for place in starts:
        name = entries[place].launch
        following = next((entry for entry in entries[place + 1 :] if entry.launch == name), None)
        end = following if following is not None and following.event == "end" else None
        headers = run_headers(run, name) if last[name] == place else []
        pair, _, case = name.partition("-") if name != LAYOUT_CONTROL else ("", "", "baseline")  # a control has no pair
        facts.append(
            LaunchFacts(
                id=name,
                case=case if case in (*CASES, "lockstep") else None,
                pair=int(pair) if pair.isdecimal() else None,
                started=entries[place].time,
                ended=end.time if end else None,
                status=(end.status or "unknown") if end else "unfinished",
                exit_code=end.exit_code if end else None,
                reason=end.reason if end else None,
                worker=_facts(headers) if headers else None,
            )
        )
    return facts


def _facts(headers: list[RunHeader]) -> dict[str, Any]:
    """What the launch said of itself; in lockstep with what differs between its cases under `cases`."""
    facts = {name: getattr(headers[0], name) for name in _WORKER_FACTS}
    if headers[0].mode != "lockstep":
        return facts
    own = {name: facts.pop(name) for name in _CASE_FACTS}
    return {**facts, "cases": {header.case: {name: getattr(header, name) for name in own} for header in headers}}


def run_headers(run: RunFolder, launch: str) -> list[RunHeader]:
    """The headers with which a launch's records begin: one, in lockstep one for each case."""
    path: Path = run.launch(launch) / "records.jsonl"
    found: list[RunHeader] = []
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            while isinstance(record := records.from_json(file.readline()), RunHeader):
                found.append(record)
    except (OSError, ValueError):
        pass  # what is no record ends the headers; analysis names it
    return found


def run_header(run: RunFolder, launch: str) -> RunHeader | None:
    """The first of `run_headers`, if there is one."""
    return next(iter(run_headers(run, launch)), None)


def loaded_versions(run: RunFolder, launched: Iterable[str]) -> dict[str, str]:
    """Each version that the launches loaded, by name; where they differ, all of them, with ` | ` between."""
    found: dict[str, dict[str, None]] = {}
    for launch in launched:
        header = run_header(run, launch)
        for name, version in (header.versions if header else {}).items():
            found.setdefault(name, {})[version] = None
    return {name: " | ".join(versions) for name, versions in found.items()}
