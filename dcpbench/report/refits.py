"""Refits of the cost profile while launches ran, as a table for every format. Formats numbers, computes none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dcpbench.report.wording import Row, number

if TYPE_CHECKING:
    from dcpbench.analysis.pipeline import Analysis

TITLE = "Refits of the cost profile"
COLUMNS = ("launch", "refit after iteration", "applies from", "iterations", "error before", "error after", "")
_MOST = 24


def rows(analysis: Analysis) -> list[Row]:
    """One row for each refit, under `COLUMNS`; of very many, the first."""
    return list(_rows(analysis))[:_MOST]


def _rows(analysis: Analysis) -> Iterator[Row]:
    for found in analysis.refits:
        for refit in found.log.refits:
            yield (
                found.launch,
                f"{refit.after:,}",
                f"{refit.applies_from:,}",
                f"{refit.iterations}",
                number(refit.error_before, ".1%"),
                number(refit.error_after, ".1%"),
                "adopted" if refit.adopted else f"not adopted: {refit.why_not}",
            )


def sentence(analysis: Analysis) -> str:
    """How to read the table."""
    total = sum(len(found.log.refits) for found in analysis.refits)
    more = f" Shown are {_MOST} of {total}; statistics.json has all." if total > _MOST else ""
    return (
        "While a launch ran, the coefficients it planned with were refitted to its own iterations. The error is that "
        f"of iterations held out, recent ones weighing more; refits.json of the launch has the coefficients.{more}"
    )


def plain(analysis: Analysis) -> list[dict[str, Any]]:
    """All refits as plain data."""
    return [
        {"launch": found.launch, "case": found.case, **found.log.model_dump(mode="json")} for found in analysis.refits
    ]
