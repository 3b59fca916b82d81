"""`report.html`: the whole result as one page that needs nothing else: no network, no script, no other file.

Light and dark follow the reader's system; printed, it is light. What `statistics.json` has under a
dotted path is marked with `data-figure`, so that a test can compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from dcpbench.report import figures, wording

if TYPE_CHECKING:
    from dcpbench.analysis import Analysis

_MOST_FAULTS = 200

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --dim: #56646f; --page: #ffffff; --card: #f4f6f8;
  --rule: #d5dbe1; --good: #12703a; --bad: #b3261e; --warn: #7a5200; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --dim: #a3b0bc; --page: #12171d; --card: #1b222a;
  --rule: #35404b; --good: #63d392; --bad: #ff8a80; --warn: #f0c060; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { max-width: 50rem; }
.answer { background: var(--card); border-left: .35rem solid var(--bad); padding: 1rem 1.2rem; }
.answer.passed { border-color: var(--good); } .answer.inconclusive { border-color: var(--warn); }
.answer p { margin: .4rem 0 0; }
.big { font-size: 2.6rem; line-height: 1.1; font-weight: 650; font-variant-numeric: tabular-nums; }
.big small { display: block; margin-top: .4rem; font-size: 1rem; line-height: 1.4;
  font-weight: 400; color: var(--dim); }
.cautions li { margin: .3rem 0; max-width: 50rem; }
.faults li { color: var(--bad); }
.figures { display: grid; margin-top: 2rem; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 29rem), 1fr)); }
figure { margin: 0; break-inside: avoid; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .3rem; }
svg { display: block; width: 100%; height: auto; color: var(--dim); }
.wide { overflow-x: auto; break-inside: avoid; }
.wide + .wide { margin-top: 1rem; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .28rem .8rem .28rem 0; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top; }
td:not(:first-child) { white-space: nowrap; }
th { color: var(--dim); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
footer { margin-top: 3rem; color: var(--dim); font-size: .9rem; }
@media print { :root { --ink: #000; --dim: #444; --page: #fff; --card: #f4f4f4; --rule: #bbb; --good: #12703a;
  --bad: #b3261e; --warn: #7a5200; } body { font-size: 11pt; max-width: none; padding: 0; } }
"""


def write(analysis: Analysis) -> str:
    """The whole page."""
    title = escape(f"{analysis.name}: fixed against dynamic context parallelism")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{title}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            f"<h1>{title}</h1>",
            *_body(analysis),
            "</body>",
            "</html>",
            "",
        ]
    )


def _body(analysis: Analysis) -> Iterator[str]:
    yield from _answer(analysis)
    if analysis.cautions:
        yield _section("Cautions") + _list(analysis.cautions, "cautions")
    if analysis.faults:
        yield _section("Faults") + _list(wording.fault_lines(analysis, _MOST_FAULTS), "faults")
    yield from _figures(analysis)
    if analysis.speedup is not None:
        yield _section("The cases") + _table(("", *analysis.cases), wording.case_rows(analysis))
        yield _paragraph(wording.warmup_sentence(analysis))
        yield _section("Speed-up of dcp over baseline")
        yield _table(("measure", "times as fast"), wording.speedup_rows(analysis))
        yield _table(("pair", "times as fast"), wording.pair_rows(analysis))
        if analysis.lengths:
            yield _section("Speed-up by length") + _table(wording.LENGTH_COLUMNS, wording.length_rows(analysis))
        yield _section("Loss parity") + _table(wording.GATE_COLUMNS, wording.gate_rows(analysis))
        yield "".join(map(_paragraph, wording.gate_sentences(analysis)))
        yield _table(("quantity", "value"), wording.parity_rows(analysis))
    yield _section("Launches") + _table(wording.LAUNCH_COLUMNS, wording.launch_rows(analysis))
    if rows := wording.steady_rows(analysis):
        yield _section("Steadiness") + _table(wording.STEADY_COLUMNS, rows)
        yield _paragraph(f"Times of the measured window over {analysis.workload}, so that all batches compare.")
    if analysis.profiles:
        yield _section("Where the time goes")
        yield _table(wording.profile_columns(analysis), wording.profile_rows(analysis))
    if rows := wording.setup_rows(analysis):
        yield _section("What it stood on") + _table(("", *analysis.cases), rows)
    yield (
        "<footer>Tokens are real tokens: padding is left out of every rate. <code>statistics.json</code> beside this "
        "page holds all figures unrounded, <code>aligned.parquet</code> every iteration, <code>manifest.json</code> of "
        "the run folder what is needed to repeat it.</footer>"
    )


def _answer(analysis: Analysis) -> Iterator[str]:
    outcome, speedup, found = analysis.verdict.outcome, analysis.speedup, analysis.interval
    yield f'<section class="answer {outcome}">'
    if speedup is not None:
        ends = "one pair of launches: no interval"
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
    for name, picture in drawn.items():
        if picture is not None:
            caption = escape(figures.CAPTIONS[name])
            named = picture.replace("<svg", f'<svg role="img" aria-label="{caption}"', 1)
            yield f"<figure><figcaption>{caption}</figcaption>{named}</figure>"
    yield "</section>"


def _section(title: str) -> str:
    return f"<h2>{escape(title)}</h2>"


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _list(lines: Sequence[str], kind: str) -> str:
    return f'<ul class="{kind}">' + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(columns: Sequence[str], rows: Sequence[wording.Row]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
