"""The result on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dcpbench.redact import redact
from dcpbench.report import refits, same_case, wording

if TYPE_CHECKING:
    from dcpbench.analysis.pipeline import Analysis

_MOST_FAULTS = 40


def render(analysis: Analysis) -> RenderableType:
    """Headline, tables of both cases, of the speed-up, of loss parity and of the launches, cautions and faults."""
    return Group(*_parts(analysis))


def _parts(analysis: Analysis) -> Iterator[RenderableType]:
    good = analysis.verdict.outcome == "passed"
    yield _text(wording.headline(analysis), "bold green" if good else "bold red")
    if analysis.speedup is not None:
        yield Text()
        yield _table(("", *analysis.cases), wording.case_rows(analysis))
        yield _table(("speed-up of dcp (above 1: faster)", "times"), wording.speedup_rows(analysis))
        if analysis.lockstep is not None:
            yield _table(("lockstep", ""), wording.lockstep_rows(analysis))
            yield _text(wording.LOCKSTEP_TEXT)
        if rows := same_case.rows(analysis):
            yield _table((same_case.TITLE, ""), rows)
            yield _text(" ".join(same_case.sentences(analysis)))
        if analysis.lengths:
            yield _table(wording.LENGTH_COLUMNS, wording.length_rows(analysis))
        yield _table(("loss parity", ""), wording.parity_rows(analysis))
        yield _table(wording.GATE_COLUMNS, wording.gate_rows(analysis))
        for sentence in wording.gate_sentences(analysis):
            yield _text(sentence)
        yield _text(wording.warmup_sentence(analysis))
        yield _text(f"Aligned on {', '.join(analysis.aligned_on)}.")
    yield Text()
    yield _table(wording.LAUNCH_COLUMNS, wording.launch_rows(analysis))
    if rows := refits.rows(analysis):
        yield _table(refits.COLUMNS, rows)
        yield _text(refits.sentence(analysis))
    if analysis.profiles:
        yield _table(wording.profile_columns(analysis), wording.profile_rows(analysis))
    for caution in analysis.cautions:
        yield _text(f"Caution: {caution}", "yellow")
    for line in wording.fault_lines(analysis, _MOST_FAULTS):
        yield _text(f"Fault: {line}", "red")


def _text(text: str, style: str = "") -> Text:
    # Text, not markup: brackets in a message are no styles.
    return Text(redact(text), style=style)


def _table(columns: Sequence[str], rows: Sequence[wording.Row]) -> Table:
    table = Table(title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    return table
