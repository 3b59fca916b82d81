"""`report.html`: the whole result as one page that needs nothing else: no network, no script, no other file.

Light and dark follow the reader's system; printed, it is light. What `statistics.json` has under a
dotted path is marked with `data-figure`, so that a test can compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from dcpbench.report import figures, refits, same_case, wording
from dcpbench.report.page import bullets, page, paragraph, picture, section, table

if TYPE_CHECKING:
    from dcpbench.analysis.pipeline import Analysis

_MOST_FAULTS = 200


def write(analysis: Analysis) -> str:
    """The whole page."""
    return page(f"{analysis.name}: fixed against dynamic context parallelism", _body(analysis))


def _body(analysis: Analysis) -> Iterator[str]:
    yield from _answer(analysis)
    if analysis.cautions:
        yield section("Cautions") + bullets(analysis.cautions, "cautions")
    if analysis.faults:
        yield section("Faults") + bullets(wording.fault_lines(analysis, _MOST_FAULTS), "faults")
    yield from _figures(analysis)
    if analysis.speedup is not None:
        yield section("The cases") + table(("", *analysis.cases), wording.case_rows(analysis))
        yield paragraph(wording.warmup_sentence(analysis))
        yield section("Speed-up of dcp over baseline")
        yield table(("measure", "times as fast"), wording.speedup_rows(analysis))
        yield table((wording.pair_noun(analysis), "times as fast"), wording.pair_rows(analysis))
        if analysis.lockstep is not None:
            yield section("Lockstep") + paragraph(wording.LOCKSTEP_TEXT)
            yield table(("", ""), wording.lockstep_rows(analysis))
        if rows := same_case.rows(analysis):
            yield section(same_case.TITLE) + paragraph(" ".join(same_case.sentences(analysis)))
            yield table(("", ""), rows)
        if analysis.lengths:
            yield section("Speed-up by length") + table(wording.LENGTH_COLUMNS, wording.length_rows(analysis))
        yield section("Loss parity") + table(wording.GATE_COLUMNS, wording.gate_rows(analysis))
        yield "".join(map(paragraph, wording.gate_sentences(analysis)))
        yield table(("quantity", "value"), wording.parity_rows(analysis))
    yield section("Launches") + table(wording.LAUNCH_COLUMNS, wording.launch_rows(analysis))
    if rows := wording.steady_rows(analysis):
        yield section("Steadiness") + table(wording.STEADY_COLUMNS, rows)
        yield paragraph(f"Times of the measured window over {analysis.workload}, so that all batches compare.")
    if rows := refits.rows(analysis):
        yield section(refits.TITLE) + table(refits.COLUMNS, rows) + paragraph(refits.sentence(analysis))
    if analysis.profiles:
        yield section("Where the time goes")
        yield table(wording.profile_columns(analysis), wording.profile_rows(analysis))
    if rows := wording.setup_rows(analysis):
        yield section("What it stood on") + table(("", *analysis.cases), rows)
    if analysis.provenance:
        yield section("From the manifest") + table(("", ""), analysis.provenance, kind="facts")
    yield (
        "<footer>Tokens are real tokens: padding is left out of every rate. <code>statistics.json</code> beside this "
        "page holds all figures unrounded, <code>aligned.parquet</code> every iteration, <code>manifest.json</code> of "
        "the run folder what is needed to repeat it.</footer>"
    )


def _answer(analysis: Analysis) -> Iterator[str]:
    outcome, speedup, found = analysis.verdict.outcome, analysis.speedup, analysis.interval
    yield f'<section class="answer {outcome}">'
    if speedup is not None:
        ends = "no interval" if analysis.lockstep else "one pair of launches: no interval"
        if found is not None:
            low, high = _keyed("speedup.interval.low", found.low), _keyed("speedup.interval.high", found.high)
            ends = f"95 % interval {low} to {high}"
        verdict = f'<span data-figure="speedup.verdict">{escape(str(analysis.speed))}</span>'
        total = _keyed("speedup.total", speedup.total)
        yield f'<div class="big">{total}&times; <small>as fast as baseline; {ends}; {verdict}</small></div>'
    word = outcome.upper()
    yield f'<p><strong data-figure="verdict">{word}</strong>{escape(wording.headline(analysis).removeprefix(word))}</p>'
    yield "</section>"


def _keyed(key: str, value: float) -> str:
    return f'<span data-figure="{key}">{value:.3f}</span>'


def _figures(analysis: Analysis) -> Iterator[str]:
    drawn = {name: figures.svg(analysis, name) for name in figures.CAPTIONS}
    if not any(drawn.values()):
        return
    yield '<section class="figures">'
    for name, drawing in drawn.items():
        if drawing is not None:
            yield picture(drawing, figures.CAPTIONS[name])
    yield "</section>"
