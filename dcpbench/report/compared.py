"""Two runs side by side: a table, JUnit XML, annotations of GitHub Actions, a summary for a pull request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dcpbench.report import ci

if TYPE_CHECKING:
    from dcpbench.analysis.comparison import Comparison

COLUMNS = ("second / first", "95 % interval", "verdict")
"""What follows the two runs' own columns."""


def headline(found: Comparison) -> str:
    """The answer in one sentence."""
    dcp = found.dcp
    return (
        f"{found.outcome.upper()}: dcp of {found.runs[1]} is {dcp.ratio:.3f} times as fast as of {found.runs[0]} "
        f"({dcp.verdict})."
    )


def rows(found: Comparison) -> list[tuple[str, ...]]:
    """(quantity, first, second, ratio, interval, verdict)."""
    return [
        (
            row.quantity,
            _figure(row.first),
            _figure(row.second),
            f"{row.ratio:.3f}",
            "-" if row.interval is None else f"{row.interval.low:.3f} to {row.interval.high:.3f}",
            row.verdict,
        )
        for row in found.rows
    ]


def _figure(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def junit(found: Comparison) -> str:
    """One test case: that dcp has not become slower, or has been decided where that was asked for."""
    checks = [
        ("dcp is no slower than in the run compared with", None if found.outcome == "passed" else headline(found))
    ]
    return ci.suite(f"dcpbench compare {found.runs[0]} {found.runs[1]}", checks, headline(found))


def github(found: Comparison) -> str:
    """Workflow commands: an error where the comparison did not pass, a warning for each note, else a notice."""
    level = "notice" if found.outcome == "passed" else "error"
    lines = [ci.command(level, "dcpbench compare", headline(found))]
    lines += [ci.command("warning", "dcpbench compare", note) for note in found.notes]
    return "\n".join([*lines, ""])


def summary(found: Comparison) -> str:
    """A few lines of Markdown."""
    columns = ("", *found.runs, *COLUMNS)
    lines = ["### dcpbench: two runs compared", "", f"**{ci.cell(headline(found))}**", ""]
    lines += [f"| {' | '.join(map(ci.cell, columns))} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    lines += [f"| {' | '.join(map(ci.cell, row))} |" for row in rows(found)]
    if found.notes:
        lines += ["", *(f"- {ci.cell(note)}" for note in found.notes)]
    return "\n".join([*lines, ""])


FORMATS: dict[str, Callable[[Comparison], str]] = {"junit": junit, "github": github, "summary": summary}
"""Value of `dcpbench compare --format` -> its writer."""
