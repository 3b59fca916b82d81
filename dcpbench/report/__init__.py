"""One writer per format; none computes. Every text goes through `redact`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dcpbench.redact import redact
from dcpbench.report import aligned_parquet, csv_table, markdown, statistics_json

if TYPE_CHECKING:
    from dcpbench.analysis import Analysis


def _text(write: Callable[[Analysis], str]) -> Callable[[Analysis], bytes]:
    return lambda analysis: redact(write(analysis)).encode()


FILES: dict[str, Callable[[Analysis], bytes | None]] = {
    "aligned.parquet": aligned_parquet.write,
    "statistics.json": _text(statistics_json.write),
    "report.md": _text(markdown.write),
    "summary.csv": _text(csv_table.write),
}
"""File of the `analysis/` folder -> its writer; None means that this analysis has no such file."""
