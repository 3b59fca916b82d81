"""Where the time of a profiled iteration went: the files that ranks write and reports read.

`launches/<id>/profile/` holds for each rank and profiled iteration a trace (`rank0-iteration8.json.gz`,
for Perfetto or chrome://tracing) and its summary (`rank0-iteration8.summary.json`), which this module describes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dcpbench.errors import LogError

SCHEMA_VERSION = 1
FOLDER = "profile"

PARTS = ("attention", "gemm", "loss", "optimizer", "other", "exposed_communication", "idle")
"""What an iteration consists of; these times add up to its length.

Where several things run at once the first of this list counts, so communication is exposed only while
nothing is computed. `idle` is time in which the device has nothing to do: it waits for the host.
"""

_SUMMARY = re.compile(r"rank(\d+)-iteration(\d+)\.summary\.json")


@dataclass(frozen=True)
class ProfiledIteration:
    """One profiled iteration of one rank. Times in seconds."""

    rank: int
    iteration: int
    seconds: float
    """From asking for the batch to the end of the last kernel, the profiler's own overhead included."""
    parts: Mapping[str, float]
    """Time for each of PARTS."""
    communication: float
    """All communication, exposed or behind computation."""
    scheduling: float
    """Planning of the batch, which happens behind the iteration before."""
    device: str
    """`cuda`: times of kernels; `cpu`: times of operators on the host, which are coarser."""


@dataclass(frozen=True)
class LaunchProfile:
    """All profiled iterations of a launch."""

    launch: str
    iterations: tuple[ProfiledIteration, ...]

    def mean(self, name: str) -> float:
        """Mean over ranks and iterations of a part, of `communication`, `scheduling` or `seconds`; in seconds."""
        values = [found.parts[name] if name in PARTS else getattr(found, name) for found in self.iterations]
        return float(sum(values) / len(values))


def trace_file(folder: Path, rank: int, iteration: int) -> Path:
    """The trace of one rank's iteration."""
    return folder / f"rank{rank}-iteration{iteration}.json.gz"


def write(folder: Path, profiled: ProfiledIteration) -> None:
    """Writes the summary beside its trace."""
    name = f"rank{profiled.rank}-iteration{profiled.iteration}.summary.json"
    text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(profiled)}, indent=2, allow_nan=False)
    (folder / name).write_text(text + "\n", encoding="utf-8")


def read(launch: str, folder: Path) -> LaunchProfile | None:
    """The profile of a launch from its folder; None where it has none.

    Raises:
        LogError: a summary that cannot be read.
    """
    profile = folder / FOLDER
    if not profile.is_dir():
        return None
    files = sorted(file for file in profile.iterdir() if _SUMMARY.fullmatch(file.name))
    found = tuple(sorted(map(_read, files), key=lambda profiled: (profiled.iteration, profiled.rank)))
    return LaunchProfile(launch, found) if found else None


def _read(file: Path) -> ProfiledIteration:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data.pop("schema_version") != SCHEMA_VERSION:
            raise LogError(f"{file} is of another version of dcpbench; delete it or read it with that version")
        return ProfiledIteration(**{**data, "parts": {part: float(data["parts"][part]) for part in PARTS}})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LogError(f"{file} is no profile summary ({type(error).__name__}); delete it") from None


def table(profiles: Sequence[LaunchProfile]) -> list[tuple[str, list[float], list[float]]]:
    """(row, milliseconds, share of the iteration) for each launch's mean: the parts, then what overlaps with them."""
    rows = []
    for name in (*PARTS, "seconds", "communication", "scheduling"):
        times = [profile.mean(name) for profile in profiles]
        shares = [time / profile.mean("seconds") for time, profile in zip(times, profiles, strict=True)]
        rows.append((name, [1e3 * time for time in times], shares))
    return rows
