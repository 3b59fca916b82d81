"""What a check found: a level, a short stable name of the rule, and the sentence for the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `refuse` forbids a launch."""

    level: Literal["ok", "warn", "refuse"]
    rule: str
    message: str


def ok(rule: str, message: str) -> Finding:
    """Looked at, and fine."""
    return Finding("ok", rule, message)


def warn(rule: str, message: str) -> Finding:
    """Worth knowing, no reason to stop."""
    return Finding("warn", rule, message)


def refuse(rule: str, message: str) -> Finding:
    """Nothing is launched."""
    return Finding("refuse", rule, message)
