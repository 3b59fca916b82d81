"""One writer per format; none computes. Every text goes through `redact`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.errors import LogError
from dcpbench.redact import redact
from dcpbench.report import aligned_parquet, csv_table, figures, html, markdown, statistics_json
from dcpbench.runfolder.layout import write_bytes

if TYPE_CHECKING:
    from dcpbench.analysis.pipeline import Analysis


def _text(write: Callable[[Analysis], str]) -> Callable[[Analysis], bytes]:
    return lambda analysis: redact(write(analysis)).encode()


FILES: dict[str, Callable[[Analysis], bytes | None]] = {
    "aligned.parquet": aligned_parquet.write,
    "statistics.json": _text(statistics_json.write),
    "report.md": _text(markdown.write),
    "report.html": _text(html.write),
    "summary.csv": _text(csv_table.write),
    **{f"{name}.png": figures.png(name) for name in figures.CAPTIONS},
}
"""File of the `analysis/` folder -> its writer; None means that this analysis has no such file."""


def write(analysis: Analysis, folder: Path) -> tuple[Path, ...]:
    """Writes every file of `FILES`, each whole or not at all; returns their paths.

    A file that this analysis does not have (no aligned data when there are faults) is removed, so
    that nothing of an earlier analysis stands beside it.

    Raises:
        LogError: the folder cannot be written.
    """
    contents = {name: write(analysis) for name, write in FILES.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            if content is None:
                (folder / name).unlink(missing_ok=True)
            else:
                write_bytes(folder / name, content)
    except OSError as error:
        raise LogError(f"the analysis cannot be written to {folder}: {error.strerror}") from None
    return tuple(folder / name for name, content in contents.items() if content is not None)
