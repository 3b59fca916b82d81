"""Refits of the cost profile while a launch runs: when they start and apply, and the file that tells of them.

A refit is started after every `schedule.refit` finished iterations and applies as many iterations later, so every rank
knows beforehand in which iteration its coefficients may change. Rank 0 writes one `RefitLog` to `refits.json` in the
folder of the launch. With it plans can be made again: see `RefitLog.in_force`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dcpbench.dcp.cost_profiles import Coefficients, CostProfile, cost_of
from dcpbench.dcp.costs import CostModel
from dcpbench.errors import LogError
from dcpbench.spec import FEWEST_TO_REFIT, Training

FILE = "refits.json"
"""Name of the file, in the folder of the launch."""
READY = "ready"
"""The first line that the process which refits writes to rank 0: everything is loaded. Each further one answers."""
HALF_LIFE = 2
"""Intervals between refits after which an iteration weighs half: clocks drift, and old times tell less."""
WINDOW = 8
"""Intervals that a refit looks back; what is older would weigh less than 1/16."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class Refitted(_Part):
    """One refit. Errors are means of absolute relative errors of the iterations held out, recent ones weighing more."""

    after: int
    """The iteration after which it was started: the last whose time it knows."""
    applies_from: int
    """The first iteration that is planned with its coefficients, if it was adopted."""
    adopted: bool
    why_not: str | None = None
    """Why it was not adopted."""
    iterations: int = 0
    """How many it is fitted to or judged by."""
    error_before: float | None = None
    """With the coefficients in use."""
    error_after: float | None = None
    """With its own."""
    coefficients: Coefficients | None = None
    """What was fitted, adopted or not; None where it could not be made."""
    iteration_seconds: float | None = None
    """What an iteration takes beside its microbatches, by the same fit."""
    seconds: float = Field(0.0, ge=0)
    """How long the fit took, beside the training."""

    @property
    def cost(self) -> CostModel:
        """The cost model of an adopted refit."""
        assert self.coefficients is not None, "what was adopted has coefficients"
        return cost_of(self.coefficients, f"refit-{self.after}", assumed=False)


class RefitLog(_Part):
    """All refits of a launch, in order."""

    schema_version: Literal[1] = 1
    interval: int = Field(ge=FEWEST_TO_REFIT)
    """`schedule.refit`: iterations between refits."""
    half_life: int
    """Iterations after which one weighs half."""
    basis: str
    """What the launch planned with at first, as `RunHeader.costs` has it."""
    refits: tuple[Refitted, ...] = ()

    @property
    def adopted(self) -> tuple[Refitted, ...]:
        """Those whose coefficients came into force."""
        return tuple(refit for refit in self.refits if refit.adopted)

    def in_force(self, iteration: int, profile: CostProfile) -> tuple[CostModel, float]:
        """What an iteration was planned with, and the seconds an iteration takes beside its microbatches.

        Args:
            iteration: from 1.
            profile: what the launch began with.
        """
        last = max((one for one in self.adopted if one.applies_from <= iteration), key=_place, default=None)
        if last is None:
            return profile.cost, profile.iteration_seconds
        return last.cost, last.iteration_seconds or 0.0


def _place(refit: Refitted) -> int:
    return refit.applies_from


def usable(training: Training, interval: int, after: int) -> list[int]:
    """The iterations that a refit after iteration `after` may use: no warm-up, no profiled one, none long ago."""
    first = max(training.warmup_iterations, after - WINDOW * interval) + 1
    return [number for number in range(first, after + 1) if number not in training.profile_iterations]


def starts(training: Training, interval: int) -> list[int]:
    """The iterations after which a refit is started; what it finds applies from `interval` iterations later.

    Too early there is too little to fit to, and too late no iteration would be planned with it.
    """
    if not interval:
        return []
    return [
        after
        for after in range(interval, training.iterations - interval + 1, interval)
        if len(usable(training, interval, after)) >= FEWEST_TO_REFIT
    ]


def write(folder: Path, log: RefitLog) -> None:
    """Writes the file of a launch so that it is there whole or not at all."""
    unfinished = folder / f".{FILE}.{os.getpid()}"
    unfinished.write_text(json.dumps(log.model_dump(mode="json"), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(folder / FILE)


def read(folder: Path) -> RefitLog | None:
    """The refits of the launch in this folder; None where it made none.

    Raises:
        LogError: the file cannot be read.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        return RefitLog.model_validate_json(file.read_bytes())
    except OSError as error:
        raise LogError(f"{file} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the file"
        raise LogError(
            f"{file} does not tell of refits: {where}: {problem['type'].replace('_', ' ')}; it was changed, or is of "
            "another version of dcpbench"
        ) from None
