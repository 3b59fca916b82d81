"""The run folder: what lies where, and when a folder may be used again.

    spec.yaml  plan.json  costs.json  ledger.jsonl  data/  launches/<id>/  analysis/  manifest.json

A folder in which a launch was ever started belongs to that run: it is gone on with (`--resume`,
same spec) or left alone, never written over.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dcpbench import config
from dcpbench.dcp import cost_profiles
from dcpbench.errors import LogError, SpecError, UsageError
from dcpbench.plan import Launch, torchrun
from dcpbench.redact import redact_value
from dcpbench.settings.fields import leaves_of
from dcpbench.spec import Spec

_FREE_TO_CHANGE = {"output.dir", "launches.timeout", "launches.grace", "launches.keep_going"}
"""Fields that a resumed run may change: they decide how launches are watched, not what they measure."""


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def spec(self) -> Path:
        """The resolved spec."""
        return self.path / "spec.yaml"

    @property
    def plan(self) -> Path:
        """Every launch, in order."""
        return self.path / "plan.json"

    @property
    def costs(self) -> Path:
        """The cost profile that every launch plans with and that times are predicted with."""
        return self.path / "costs.json"

    @property
    def ledger(self) -> Path:
        """What really happened; see `ledger.py`."""
        return self.path / "ledger.jsonl"

    @property
    def data(self) -> Path:
        """The prepared data."""
        return self.path / "data"

    def launch(self, name: str) -> Path:
        """The folder of one launch."""
        return self.path / "launches" / name

    @property
    def analysis(self) -> Path:
        """What can be deleted and computed again."""
        return self.path / "analysis"

    @property
    def manifest(self) -> Path:
        """The provenance document."""
        return self.path / "manifest.json"


def default_path(spec: Spec) -> Path:
    """`output.dir`, or `runs/<name>-<UTC date and time>` in the working directory."""
    if spec.output.dir is not None:
        return spec.output.dir
    return Path("runs") / f"{spec.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def existing(path: Path) -> RunFolder:
    """The folder of an earlier run.

    Raises:
        LogError: there is none.
    """
    folder = RunFolder(path)
    if not path.is_dir():
        raise LogError(f"{path} is no folder; give the run folder that `dcpbench run` named")
    if not folder.spec.is_file():
        raise LogError(f"{path} is no run folder: it has no spec.yaml")
    return folder


def open_for(spec: Spec, path: Path, *, resume: bool) -> RunFolder:
    """The folder of a new or resumed run. Writes nothing.

    Raises:
        UsageError: the folder is another run's, holds foreign files, or there is nothing to resume.
        SpecError: the run to be resumed was made with another spec.
    """
    folder = RunFolder(path)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; the run folder needs another name (--out)")
    if resume:
        if not folder.spec.is_file():
            raise UsageError(f"there is nothing to resume in {path}; name the folder of the unfinished run with --out")
        _refuse_other_spec(spec, folder)
        return folder
    if folder.ledger.exists():
        raise UsageError(f"{path} holds a run already; go on with it with --resume, or choose another --out")
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in _ours(folder)) if path.is_dir() else []
    if foreign:
        raise UsageError(f"{path} is not empty ({', '.join(foreign[:3])}); choose another --out")
    return folder


def _ours(folder: RunFolder) -> set[str]:
    # What an attempt that ended before its first launch leaves behind; it is written again.
    return {folder.spec.name, folder.plan.name, folder.costs.name, folder.data.name}


def _refuse_other_spec(spec: Spec, folder: RunFolder) -> None:
    stored = dict(leaves_of("", _plain(config.load(folder.spec, environ={}).spec)))
    wanted = dict(leaves_of("", _plain(spec)))
    changed = sorted(
        name for name in {*stored, *wanted} - _FREE_TO_CHANGE if stored.get(name, stored) != wanted.get(name, stored)
    )
    if changed:
        raise SpecError(
            f"the run in {folder.path} was made with another {', '.join(changed)}; --resume needs the same spec: "
            f"use {folder.spec}, or choose another --out"
        )


def _plain(spec: Spec) -> Any:
    return redact_value(spec.model_dump(mode="json"), identity=False)


def describe(folder: RunFolder, spec: Spec, launches: list[Launch]) -> None:
    """Write `spec.yaml`, `plan.json` and, where the launches have a cost profile, `costs.json`."""
    folder.path.mkdir(parents=True, exist_ok=True)
    write_text(folder.spec, config.write_yaml(spec))
    plan = [
        {**launch.model_dump(mode="json", exclude={"spec", "costs", "calibration"}), "argv": torchrun(launch)}
        for launch in launches
    ]
    text = json.dumps({"schema_version": 1, "launches": redact_value(plan)}, indent=2, allow_nan=False)
    write_text(folder.plan, text + "\n")
    if launches and launches[0].costs is not None:
        write_text(folder.costs, cost_profiles.dump(launches[0].costs))


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
