"""What `gpu.csv` knows of a launch that may have slowed it, as a whole and in single iterations.

Heat, power faults and lowered clocks, other programs on its GPUs or its cores, while it worked: what a GPU does before
training starts and when it has ended is nobody's time. Samples and records carry the time
of day of one machine, so that a sample is known to belong to an iteration.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

_CAUSES = {
    "hardware_slowdown": "a hardware slowdown",
    "software_thermal": "thermal throttling",
    "hardware_thermal": "thermal throttling by the hardware",
    "power_brake": "an external power brake",
    "reliability": "a voltage limit for reliability",
}
"""Throttling reasons (`telemetry.THROTTLE_REASONS`) that are no part of ordinary work. A power cap is: under
load it holds for whole launches."""
_POWER_CAP = "software_power_cap"
_RARE = 0.2
"""A power cap in less than this share of the samples is no part of ordinary work either."""
_LOW_CLOCK = 0.9
"""Below this share of the GPU's median clock in the launch, a clock is lowered."""
_BUSY_CORES = 1.0
"""Cores that other programs must take beyond their median in the launch to count."""
_AT_WORK = 50.0
"""Percent of the time that a kernel must have run for the sample to count; a GPU at rest lowers its clock."""
_AROUND = 1.0
"""Seconds before and after an iteration of which a sample still tells: they come about once a second."""


@dataclass(frozen=True)
class Sample:
    """One row of `gpu.csv`: when, and what was out of the ordinary."""

    time: float | None
    """Seconds since 1970; None where the row has no time that can be read."""
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Telemetry:
    """The samples of one launch; none where there is no `gpu.csv`."""

    samples: tuple[Sample, ...] = ()

    @property
    def causes(self) -> tuple[str, ...]:
        """What disturbed the launch, and in how many samples; empty where nothing did."""
        counts = Counter(cause for sample in self.samples for cause in sample.causes)
        return tuple(f"{cause} in {count} of {len(self.samples)} samples" for cause, count in sorted(counts.items()))

    def during(self, start: float, end: float) -> tuple[str, ...]:
        """What disturbed the time from `start` to `end`, in seconds since 1970."""
        found = {
            cause
            for sample in self.samples
            if sample.time is not None and start - _AROUND <= sample.time <= end + _AROUND
            for cause in sample.causes
        }
        return tuple(sorted(found))


def read(path: Path) -> Telemetry:
    """The telemetry of a launch from its `gpu.csv`; empty where there is none."""
    try:
        with path.open(encoding="utf-8", newline="", errors="replace") as file:
            rows = [row for row in csv.DictReader(file) if _at_work(row)]
    except OSError:
        return Telemetry()
    clocks: dict[str, list[float]] = {}
    for row in rows:
        if (clock := _number(row, "sm_clock_mhz")) is not None:
            clocks.setdefault(row.get("gpu") or "", []).append(clock)
    usual = {gpu: median(values) for gpu, values in clocks.items()}
    taken = [cores for row in rows if (cores := _number(row, "other_cpu_cores")) is not None]
    quiet = median(taken) if taken else 0.0
    capped = sum(_POWER_CAP in _words(row) for row in rows)
    rare = 0 < capped < _RARE * len(rows)
    return Telemetry(tuple(Sample(_time(row), tuple(_causes(row, usual, quiet, rare))) for row in rows))


def _causes(row: Mapping[str, str | None], usual: Mapping[str, float], quiet: float, rare_cap: bool) -> list[str]:
    words = _words(row)
    found = [_CAUSES[word] for word in words if word in _CAUSES]
    if rare_cap and _POWER_CAP in words:
        found.append("a power cap")
    if (_number(row, "foreign_processes") or 0) > 0:
        found.append("another program on its GPU")
    clock, usually = _number(row, "sm_clock_mhz"), usual.get(row.get("gpu") or "")
    if clock is not None and usually and clock < _LOW_CLOCK * usually:
        found.append("a lowered clock")
    if (_number(row, "other_cpu_cores") or 0.0) > quiet + _BUSY_CORES:
        found.append("other programs on the machine's cores")
    return list(dict.fromkeys(found))


def _at_work(row: Mapping[str, str | None]) -> bool:
    utilisation = _number(row, "utilisation_percent")
    return utilisation is None or utilisation >= _AT_WORK


def _words(row: Mapping[str, str | None]) -> list[str]:
    return (row.get("throttle_reasons") or "").split("+")


def _number(row: Mapping[str, str | None], name: str) -> float | None:
    try:
        return float(row.get(name) or "")
    except ValueError:
        return None


def _time(row: Mapping[str, str | None]) -> float | None:
    try:
        found = datetime.fromisoformat(row.get("time") or "")
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
