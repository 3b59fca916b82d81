"""What `gpu.csv` knows of a launch that may have slowed it: heat, power faults, other programs on its GPUs."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

_CAUSES = {
    "hardware_slowdown": "a hardware slowdown",
    "software_thermal": "thermal throttling",
    "hardware_thermal": "thermal throttling by the hardware",
    "power_brake": "an external power brake",
    "reliability": "a voltage limit for reliability",
}
"""Throttling reasons (`telemetry.THROTTLE_REASONS`) that are no part of ordinary work. A power cap is: under
load it holds for whole launches."""


def read(path: Path) -> tuple[str, ...]:
    """What disturbed the launch whose telemetry this is; empty where there is none, or nothing did."""
    counts: Counter[str] = Counter()
    samples = 0
    try:
        with path.open(encoding="utf-8", newline="", errors="replace") as file:
            for row in csv.DictReader(file):
                samples += 1
                words = (row.get("throttle_reasons") or "").split("+")
                counts.update({_CAUSES[word] for word in words if word in _CAUSES})
                foreign = row.get("foreign_processes") or "0"
                if foreign.isdecimal() and int(foreign) > 0:
                    counts["another program on its GPU"] += 1
    except OSError:
        return ()
    return tuple(f"{cause} in {count} of {samples} samples" for cause, count in sorted(counts.items()))
