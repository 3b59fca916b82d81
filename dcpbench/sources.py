"""Where launches come from: a run folder, or console logs made elsewhere.

A run folder's launches are read from `records.jsonl`; where that file is gone, from the console
log. The ledger says which launches failed, whatever their records look like.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dcpbench import plan
from dcpbench.errors import LogError, UsageError
from dcpbench.faults import LaunchInput
from dcpbench.parse import FORMATS, parse_log
from dcpbench.plan import CaseName, Launch
from dcpbench.spec import Spec
from dcpbench.table import LaunchTable, TableBuilder


@dataclass(frozen=True)
class Source:
    """The launches to analyse, in the order of reports, and what is known beside their records."""

    name: str
    launches: tuple[LaunchInput, ...]
    spec: Spec | None = None
    remarks: tuple[str, ...] = ()


def read_logs(baseline: Sequence[Path], dcp: Sequence[Path], format: str = "auto") -> Source:
    """Console logs, one for each launch; the n-th of either case are a pair.

    Raises:
        UsageError: the numbers of logs differ, or there is none.
        LogError: a log cannot be read.
    """
    if not baseline or len(baseline) != len(dcp):
        raise UsageError(
            f"{len(baseline)} baseline and {len(dcp)} dcp logs; give one --baseline-log and one --dcp-log for each pair"
        )
    launches: list[LaunchInput] = []
    for pair, logs in enumerate(zip(baseline, dcp, strict=True), start=1):
        for case, path in zip(_CASE_NAMES, logs, strict=True):
            table = parse_log(path, format)
            launches.append(LaunchInput(id=f"{pair:02d}-{case}", case=case, pair=pair, position=None, table=table))
    return Source("logs", tuple(launches))


def read_run(folder: Path) -> Source:
    """Every launch that the run planned, whether it took place or not.

    Raises:
        LogError: the folder is no run folder, or one of its files cannot be read.
    """
    spec = _spec(folder)
    ledger = _ledger(folder / "ledger.jsonl")
    launches: list[LaunchInput] = []
    remarks: list[str] = []
    for planned in plan.build(spec, folder):
        launch, remark = _launch(planned, ledger)
        launches.append(launch)
        if remark:
            remarks.append(remark)
    launches.sort(key=lambda launch: (launch.pair, _CASE_NAMES.index(launch.case)))
    return Source(spec.name, tuple(launches), spec, tuple(remarks))


_CASE_NAMES: tuple[CaseName, CaseName] = ("baseline", "dcp")


def _spec(folder: Path) -> Spec:
    """The resolved spec, as any of the launches carries it."""
    files = sorted((folder / "launches").glob("*/launch.json"))
    if not files:
        raise LogError(f"{folder} is no run folder: it holds no launches/*/launch.json")
    try:
        return Launch.model_validate_json(files[0].read_bytes()).spec
    except OSError as error:
        raise LogError(f"{files[0]} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise LogError(f"{files[0]}: {where}: {first['msg']}") from None


def _launch(planned: Launch, ledger: dict[str, dict[str, Any]] | None) -> tuple[LaunchInput, str]:
    """The launch as it was recorded, and a remark on which file was read."""
    remark = ""
    try:
        if planned.records.is_file():
            table = FORMATS["jsonl"][1](planned.records)
        elif planned.log.is_file():
            table = FORMATS["native"][1](planned.log)
            remark = f"{planned.id} was read from its console log, at reduced precision: records.jsonl is not there."
        else:
            table = _no_records(planned.id)
    except OSError as error:
        raise LogError(f"the records of launch {planned.id} cannot be read: {error.strerror}") from None
    failure = None if ledger is None else _failure(ledger.get(planned.id))
    launch = LaunchInput(planned.id, planned.case, planned.pair, planned.position, table, failure)
    return launch, remark


def _no_records(launch: str) -> LaunchTable:
    hint = f"launch {launch} left neither records.jsonl nor stdout.log"
    return LaunchTable(source="-", format="none", columns=TableBuilder(()).columns(), hint=hint)


def _ledger(path: Path) -> dict[str, dict[str, Any]] | None:
    """The last event of each launch; None when the run keeps no ledger. A torn line is passed over."""
    if not path.is_file():
        return None
    last: dict[str, dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n"):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and event.get("event") in ("start", "end") and isinstance(event.get("launch"), str):
            last[event["launch"]] = event
    return last


def _failure(event: dict[str, Any] | None) -> str | None:
    """Why the launch failed, as what follows its name in a sentence; None when it completed.

    A launch that exited with 0 before its last iteration did not fail, it is incomplete: its
    records say so.
    """
    if event is None:
        return "was not launched"
    if event["event"] == "start":
        return "was started, and nothing recorded its end"
    status, code = event.get("status"), event.get("exit_code")
    if status == "completed" or (status == "failed" and code == 0):
        return None
    words = str(event.get("reason") or {"timeout": "ran past its time limit"}.get(str(status), f"{status}"))
    return words if code in (None, 0) or str(code) in words else f"{words} (exit code {code})"
