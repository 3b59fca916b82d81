"""What a calibration asks the worker to time, and what the worker answers: two small JSON documents.

The launch file of a calibration holds a `Calibration`; rank 0 writes a `Timings` to `timings.json` in the launch's
folder. Orchestration and worker share nothing else about it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FILE = "timings.json"
"""Name of the answer, in the folder of the launch."""

Kind = Literal["linear", "attention", "shared", "mixed"]
"""linear: many short samples on one rank. attention: long samples on one rank. shared: the same on a group.
mixed: samples as the data have them."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Point(_Part):
    """A microbatch to time: real lengths in tokens, on every aligned group of `size` ranks at the same time."""

    kind: Kind
    size: int = Field(ge=1)
    lengths: tuple[int, ...] = Field(min_length=1)
    held_out: bool = False
    """Whether it judges the fit and is no part of it."""


class Calibration(_Part):
    """What to time; `seconds` is how long all of it may take beyond the least number of repetitions."""

    points: tuple[Point, ...]
    seconds: float = Field(gt=0)


class Timing(_Part):
    """What one point took, forward and backward: the slowest rank's median of `repetitions`, in seconds."""

    seconds: float = Field(gt=0)
    repetitions: int
    spread: float
    """Half the range of the middle half of the slowest rank's repetitions over their median."""


class Timings(_Part):
    """The answer: one timing for each point, in the same order."""

    backend: str
    timings: tuple[Timing, ...]
