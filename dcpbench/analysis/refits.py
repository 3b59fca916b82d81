"""Refits of the cost profile that the launches of a run made while they ran, as they told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dcpbench.dcp import refit_log
from dcpbench.dcp.refit_log import RefitLog
from dcpbench.faults import LaunchInput
from dcpbench.runfolder.layout import RunFolder


@dataclass(frozen=True)
class LaunchRefits:
    """The refits of one launch."""

    launch: str
    case: str
    log: RefitLog


def read(folder: Path, launches: Sequence[LaunchInput]) -> tuple[LaunchRefits, ...]:
    """What the launches of a run folder wrote of refits; nothing for those that made none.

    Raises:
        LogError: a file is damaged.
    """
    found = []
    for launch in launches:
        log = refit_log.read(RunFolder(folder).launch(launch.folder_name))
        if log is not None:
            found.append(LaunchRefits(launch.id, launch.case, log))
    return tuple(found)


def caution(refits: Sequence[LaunchRefits]) -> tuple[str, ...]:
    """What a reader must know where plans depend on the times of their own launch."""
    changed = [one.launch for one in refits if one.log.adopted]
    if not changed:
        return ()
    return (
        f"The cost profile was refitted while {', '.join(changed)} ran (schedule.refit), each launch to its own times: "
        "launches of the same case need not have the same plans.",
    )
