"""Sweeps: which capacity, CP size and smallest group each scheduler should have, within what memory allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dcpbench.errors import UsageError
from dcpbench.planner.planning import Comparison, Figures, Setting

KEYS = ("capacity", "cp", "min_cp")
MOST_SETTINGS = 2000


def parse(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The values of each key, ascending, from texts like `capacity=1024:8192,cp=2,4`.

    A value is a number, `A:B` for A, 2A, 4A, ... up to B, or `A:B:STEP`. Numbers after a comma belong to the key
    before them.

    Raises:
        UsageError: names the part that is wrong and what is allowed.
    """
    found: dict[str, set[int]] = {}
    for text in texts:
        key = ""
        for part in text.split(","):
            name, sign, value = part.partition("=")
            if sign:
                key = name.strip()
                if key not in KEYS:
                    raise UsageError(f"--sweep: there is no {key!r}; it takes {', '.join(KEYS)}")
            elif not key:
                raise UsageError(f"--sweep: {part.strip()!r} has no key; write for example capacity=1024,2048")
            else:
                value = name
            found.setdefault(key, set()).update(_values(key, value.strip()))
    return {key: tuple(sorted(values)) for key, values in found.items()}


def _values(key: str, text: str) -> list[int]:
    if not re.fullmatch(r"[0-9]{1,12}(:[0-9]{1,12}){0,2}", text):
        raise UsageError(f"--sweep: {key}={text} is no number, A:B (doubling) or A:B:STEP")
    numbers = [int(number) for number in text.split(":")]
    if min(numbers) < 1:
        raise UsageError(f"--sweep: {key}={text}: values are at least 1")
    if len(numbers) == 1:
        return numbers
    low, high = numbers[:2]
    if high < low:
        raise UsageError(f"--sweep: {key}={text} ends before it begins")
    if len(numbers) == 3:
        if (high - low) // numbers[2] >= MOST_SETTINGS:
            raise UsageError(f"--sweep: {key}={text} is more than {MOST_SETTINGS:,} values; take a larger step")
        return list(range(low, high + 1, numbers[2]))
    return [low << power for power in range((high // low).bit_length())]


def settings(names: Sequence[str], configured: Setting, swept: dict[str, tuple[int, ...]]) -> list[Setting]:
    """Every setting of the sweep, and each scheduler as `configured`. Only what matters to a scheduler is varied.

    Raises:
        UsageError: more settings than anybody wants to wait for.
    """
    made: dict[Setting, None] = {}
    for name in names:
        made[as_configured(name, configured)] = None
    for name in names:
        usual = as_configured(name, configured)
        for capacity in swept.get("capacity", (usual.capacity,)):
            for cp in swept.get("cp", (usual.cp,)) if usual.fixed else (usual.cp,):
                for least in (usual.min_size,) if usual.fixed else swept.get("min_cp", (usual.min_size,)):
                    made[Setting(name, capacity, cp, least)] = None
    if len(made) > MOST_SETTINGS:
        raise UsageError(f"--sweep asks for {len(made):,} settings; at most {MOST_SETTINGS:,} are planned at once")
    return list(made)


def as_configured(name: str, configured: Setting) -> Setting:
    """A scheduler with the capacity and sizes of the spec; equal for all that do not matter to it."""
    plain = Setting(name, configured.capacity, configured.cp, configured.min_size)
    return Setting(name, plain.capacity, plain.cp, 1) if plain.fixed else plain


@dataclass(frozen=True)
class Choice:
    """One scheduler as configured and at its best; None where no setting of it can be used."""

    scheduler: str
    configured: Figures | None
    best: Figures | None


@dataclass(frozen=True)
class Answer:
    """What a sweep found."""

    limit: int
    """Tokens per rank that memory is taken to hold."""
    rows: tuple[Figures, ...]
    """Fastest first; those above the limit after all others."""
    within: int
    """How many rows are within the limit; they come first."""
    choices: tuple[Choice, ...]
    beyond: Figures | None
    """The fastest above the limit, where it is faster than all within."""

    @property
    def best(self) -> Figures | None:
        """The fastest within the limit."""
        return self.rows[0] if self.within else None


def answer(comparison: Comparison, names: Sequence[str], configured: Setting, limit: int) -> Answer:
    """Sort what was planned. A setting is within the limit if no rank holds more tokens at once in any batch."""
    rows = sorted(comparison.rows, key=lambda row: (row.peak_tokens > limit, row.mean_ms, row.setting.capacity))
    within = [row for row in rows if row.peak_tokens <= limit]
    beyond = rows[len(within)] if len(within) < len(rows) else None
    choices = []
    for name in names:
        usual = as_configured(name, configured)
        choices.append(
            Choice(
                name,
                next((row for row in rows if row.setting == usual), None),
                next((row for row in within if row.setting.scheduler == name), None),
            )
        )
    faster = beyond is not None and (not within or beyond.mean_ms < within[0].mean_ms)
    return Answer(limit, tuple(rows), len(within), tuple(choices), beyond if faster else None)
