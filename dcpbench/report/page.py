"""The frame of an HTML page that needs nothing else: no network, no script, no other file.

Light and dark follow the reader's system; printed, a page is light.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

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
.tall { max-width: 46rem; overflow-x: auto; } .tall svg { min-width: 28rem; }
svg { display: block; width: 100%; height: auto; color: var(--dim); }
.wide { overflow-x: auto; break-inside: avoid; }
.wide + .wide { margin-top: 1rem; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .28rem .8rem .28rem 0; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top; }
td:not(:first-child) { white-space: nowrap; }
@media screen and (max-width: 40rem) { table { font-size: .85rem; } th, td { padding-right: .5rem; }
  td:not(:first-child) { white-space: normal; } }
td.whole.whole { white-space: nowrap; }
th { color: var(--dim); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; } .facts thead { display: none; }
.facts td:first-child { min-width: 9rem; color: var(--dim); overflow-wrap: normal; }
footer { margin-top: 3rem; color: var(--dim); font-size: .9rem; }
@media print { :root { --ink: #000; --dim: #444; --page: #fff; --card: #f4f4f4; --rule: #bbb; --good: #12703a;
  --bad: #b3261e; --warn: #7a5200; }
  @page { margin: 14mm; }
  body { font-size: 9.5pt; max-width: none; padding: 0; } p, .cautions li { max-width: none; }
  h1 { font-size: 15pt; } h2 { font-size: 12pt; margin-top: 1.4rem; break-after: avoid; } .big { font-size: 24pt; }
  .answer, tr { break-inside: avoid; } .figures { grid-template-columns: 1fr 1fr; gap: 1rem; margin-top: 1rem; }
  .wide { overflow: visible; break-inside: auto; } table { font-size: 8.5pt; }
  th, td { padding: .15rem .6rem .15rem 0; } footer { font-size: 8.5pt; } }
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole page of parts that are HTML already; `title` is plain text and becomes the first heading too."""
    shown = escape(title)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Pixels inside a picture are data within the page; nothing is fetched.
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">",
            f"<title>{shown}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            f"<h1>{shown}</h1>",
            *body,
            "</body>",
            "</html>",
            "",
        ]
    )


def section(title: str) -> str:
    """A heading."""
    return f"<h2>{escape(title)}</h2>"


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def bullets(lines: Sequence[str], kind: str) -> str:
    """A list of plain lines; `kind` is its class."""
    return f'<ul class="{kind}">' + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of plain cells that scrolls sideways where the page is narrow.

    `kind` is its class: `facts` for a name and a long value, which is broken into lines instead.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in columns)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    named = f' class="{kind}"' if kind else ""
    return f'<div class="wide"><table{named}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    # A browser breaks lines behind a hyphen, and 5.4e-09 is one word.
    whole = ' class="whole"' if "-" in text and len(text) < 20 and " " not in text else ""
    return f"<td{whole}>{escape(text)}</td>"


def picture(svg: str, caption: str, kind: str = "") -> str:
    """An `<svg>` element with its caption, which readers of the screen are told as well.

    A picture of kind `tall` stands alone: not wider than text is read at, and scrolled where the page is narrow.
    """
    shown = escape(caption)
    named = svg.replace("<svg", f'<svg role="img" aria-label="{shown}"', 1)
    opening = f'<figure class="{kind}">' if kind else "<figure>"
    return f"{opening}<figcaption>{shown}</figcaption>{named}</figure>"
