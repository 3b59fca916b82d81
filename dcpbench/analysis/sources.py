"""Where launches come from: a run folder, or console logs made elsewhere.

A run folder's launches are read from `records.jsonl`; where that file is gone, from the console
log. The ledger says which launches failed, whatever their records look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dcpbench import config, plan, profiles
from dcpbench.analysis import lockstep
from dcpbench.errors import LogError, UsageError
from dcpbench.faults import LaunchInput
from dcpbench.parse import FORMATS, parse_log
from dcpbench.plan import CaseName, Launch
from dcpbench.profiles import LaunchProfile
from dcpbench.runfolder import layout as runfolder
from dcpbench.runfolder import ledger
from dcpbench.runfolder.ledger import Entry
from dcpbench.spec import Spec
from dcpbench.table import LaunchTable, TableBuilder


@dataclass(frozen=True)
class Source:
    """The launches to analyse, in the order of reports, and what is known beside their records."""

    name: str
    launches: tuple[LaunchInput, ...]
    spec: Spec | None = None
    remarks: tuple[str, ...] = ()
    profiles: tuple[LaunchProfile, ...] = ()
    control: LaunchInput | None = None
    """The layout control, where one was launched; it belongs to no pair and no case's numbers."""
    mode: Literal["launches", "lockstep"] = "launches"
    lockstep_control: tuple[LaunchInput, ...] = ()
    """Both sides of the A/A control of lockstep, where one was launched."""


def read_logs(baseline: Sequence[Path], dcp: Sequence[Path], format: str = "auto") -> Source:
    """Console logs, one for each launch; the n-th of either case are a pair.

    The log of a lockstep launch holds both cases, and is given for both.

    Raises:
        UsageError: the numbers of logs differ, there is none, or lockstep is compared with launches.
        LogError: a log cannot be read.
    """
    if not baseline or len(baseline) != len(dcp):
        raise UsageError(
            f"{len(baseline)} baseline and {len(dcp)} dcp logs; give one --baseline-log and one --dcp-log for each pair"
        )
    launches: list[LaunchInput] = []
    modes: set[Literal["launches", "lockstep"]] = set()
    for pair, logs in enumerate(zip(baseline, dcp, strict=True), start=1):
        for case, path in zip(_CASE_NAMES, logs, strict=True):
            table = parse_log(path, format)
            modes.add("lockstep" if table.headers else "launches")
            table = lockstep.series(table)[case] if table.headers else table
            launches.append(LaunchInput(id=f"{pair:02d}-{case}", case=case, pair=pair, position=None, table=table))
    if len(modes) > 1 or (modes == {"lockstep"} and any(a != b for a, b in zip(baseline, dcp, strict=True))):
        raise UsageError(
            "the log of a lockstep launch holds both cases at the same weights and is comparable with nothing else; "
            "give it as --baseline-log and as --dcp-log"
        )
    return Source("logs", tuple(_positions(launches)), mode=modes.pop())


def read_run(path: Path) -> Source:
    """Every launch that the run planned, whether it took place or not.

    Raises:
        LogError: the folder is no run folder, or one of its files cannot be read.
        SpecError: its `spec.yaml` is broken.
    """
    folder = runfolder.existing(path)
    spec = config.load(folder.spec, environ={}).spec
    ends = ledger.last_end(folder.ledger) if folder.ledger.exists() else None
    started = _start_order(folder.ledger)
    launches: list[LaunchInput] = []
    remarks: list[str] = _profiling(spec)
    profiled: list[LaunchProfile] = []
    plans = plan.build(spec, path)
    for planned in plans:
        if (profile := profiles.read(planned.id, planned.folder)) is not None:
            profiled.append(profile)
        table = _table(planned)
        if table.format == "megatron":
            table, remark = _with_what_is_known(planned, table)
            remarks += remark
        failure = None if ends is None else _failure(planned.id, ends)
        if table.format == "native" and failure is None:
            remarks.append(
                f"{planned.id} was read from its console log, at reduced precision: it has no records.jsonl."
            )
        position = started.get(planned.id, planned.position if ends is None else None)
        launches += _inputs(planned, position, table, failure)
    if spec.runner == "megatron_lm" and any(launch.table.has("tokens") for launch in launches):
        remarks.append("Token counts are those of the prepared data: Megatron-LM logs samples only.")
    launches.sort(key=lambda launch: (launch.pair, _CASE_NAMES.index(launch.case)))
    control = _control(plans, ends, started)
    one = control[0] if control and spec.mode == "launches" else None
    both = tuple(control) if spec.mode == "lockstep" else ()
    return Source(spec.name, tuple(launches), spec, tuple(remarks), tuple(profiled), one, spec.mode, both)


def _inputs(planned: Launch, position: int | None, table: LaunchTable, failure: str | None) -> list[LaunchInput]:
    """What a launch gives to compare: its case or, in lockstep, both sides."""
    if planned.case != "lockstep":
        return [LaunchInput(planned.id, planned.case, planned.pair, position, table, failure)]
    return [
        LaunchInput(f"{planned.id}-{case}", case, planned.pair, position, own, failure, planned.id)
        for case, own in lockstep.series(table).items()
    ]


def _control(
    launches: Sequence[Launch], ends: dict[str, Entry | None] | None, started: dict[str, int]
) -> list[LaunchInput]:
    """The control, in lockstep both its sides; empty where none was launched."""
    planned = plan.control(launches, cpu=False)
    if planned is None or not planned.folder.is_dir():
        return []
    failure = None if ends is None else _failure(planned.id, ends)
    return _inputs(planned, started.get(planned.id), _table(planned), failure)


_CASE_NAMES: tuple[CaseName, CaseName] = ("baseline", "dcp")
_LOG_FORMATS = {"builtin": "native", "megatron_lm": "megatron"}
"""The format of a launch's console log, by runner."""


def _with_what_is_known(planned: Launch, table: LaunchTable) -> tuple[LaunchTable, list[str]]:
    from dcpbench.megatron import recorded  # noqa: PLC0415 - the data stream, for this runner only

    table, remark = recorded.completed(
        table, planned.spec, planned.case, planned.id, folder=planned.folder, data=planned.data
    )
    return table, [remark] if remark else []


def _positions(launches: Sequence[LaunchInput]) -> list[LaunchInput]:
    """The launches with their places in time, where every log tells when it began and no two began together."""
    starts = [launch.table.started for launch in launches]
    if None in starts or len(set(starts)) < len(starts):
        return list(launches)
    order = sorted(map(str, starts))
    return [replace(launch, position=order.index(str(launch.table.started)) + 1) for launch in launches]


def _profiling(spec: Spec) -> list[str]:
    measured = [i for i in spec.training.profile_iterations if i > spec.training.warmup_iterations]
    if not measured:
        return []
    return [
        f"A profiler ran in measured iterations ({', '.join(map(str, measured))}) and slowed them down; profile in a "
        "run of its own, or in iterations of the warm-up."
    ]


def _start_order(path: Path) -> dict[str, int]:
    """Place in time, from 1, of each launch's last start: a resumed run may have made them in another order."""
    starts = [entry.launch for entry in ledger.read(path) if entry.event == "start"]
    last = {launch: number for number, launch in enumerate(starts)}
    return {launch: place for place, launch in enumerate(sorted(last, key=last.__getitem__), start=1)}


def _table(planned: Launch) -> LaunchTable:
    """What the launch recorded: its records file, or else what its console log holds."""
    try:
        if planned.records.is_file():
            return FORMATS["jsonl"][1](planned.records)
        if planned.log.is_file():
            return FORMATS[_LOG_FORMATS[planned.spec.runner]][1](planned.log)
    except OSError as error:
        raise LogError(f"the records of launch {planned.id} cannot be read: {error.strerror}") from None
    hint = f"launch {planned.id} left neither records.jsonl nor stdout.log"
    return LaunchTable(source="-", format="none", columns=TableBuilder(()).columns(), hint=hint)


def _failure(launch: str, ends: dict[str, Entry | None]) -> str | None:
    """Why the launch failed, as what follows its name in a sentence; None when it completed.

    A launch that exited with 0 before its last iteration did not fail, it is incomplete: its
    records say so.
    """
    if launch not in ends:
        return "was not launched"
    end = ends[launch]
    if end is None:
        return "was started, and nothing recorded its end"
    if end.status == "completed" or (end.status == "failed" and end.exit_code == 0):
        return None
    words = end.reason or {"timeout": "ran past its time limit"}.get(str(end.status), str(end.status))
    return words if not end.exit_code or str(end.exit_code) in words else f"{words} (exit code {end.exit_code})"
