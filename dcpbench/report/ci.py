"""The result for continuous integration: JUnit XML, annotations of GitHub Actions, a summary for a pull request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

from dcpbench.report import same_case, wording

if TYPE_CHECKING:
    from dcpbench.analysis.pipeline import Analysis

_NOT_IN_XML = {code: None for code in range(32) if chr(code) not in "\t\n\r"}


def junit(analysis: Analysis) -> str:
    """One test case for the records, for each parity gate that counts, and for what was asked of the speed-up."""
    return suite(f"dcpbench {analysis.name}", list(_checks(analysis)), wording.headline(analysis))


def suite(title: str, checks: Sequence[tuple[str, str | None]], said: str) -> str:
    """JUnit XML of checks, each with its problem or None; `said` becomes the suite's output."""
    failed = sum(problem is not None for _, problem in checks)
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuites><testsuite name={quoteattr(title)} tests="{len(checks)}" '
        f'failures="{failed}" errors="0" skipped="0">',
    ]
    for name, problem in checks:
        head = f'<testcase classname="dcpbench" name={quoteattr(name)}'
        if problem is None:
            lines.append(f"{head}/>")
        else:
            text = problem.translate(_NOT_IN_XML)
            lines.append(f"{head}><failure message={quoteattr(text)}>{escape(text)}</failure></testcase>")
    lines.append(f"<system-out>{escape(said.translate(_NOT_IN_XML))}</system-out>")
    return "\n".join([*lines, "</testsuite></testsuites>", ""])


def command(level: str, title: str, text: str) -> str:
    """A workflow command of GitHub Actions: `error`, `warning` or `notice`."""
    return f"::{level} title={_property(title)}::{_data(text)}"


def github(analysis: Analysis) -> str:
    """Workflow commands: an error for each thing that failed, a warning for each caution, the headline as a notice."""
    lines = [f"::error title=dcpbench: {_property(name)}::{_data(problem)}"
             for name, problem in _checks(analysis) if problem is not None]  # fmt: skip
    lines += [command("warning", "dcpbench", caution) for caution in analysis.cautions]
    lines.append(command("notice", f"dcpbench {analysis.name}", wording.headline(analysis)))
    return "\n".join([*lines, ""])


def summary(analysis: Analysis) -> str:
    """A few lines of Markdown: the answer, the numbers of both cases, and how many cautions there are."""
    lines = [f"### dcpbench: {cell(analysis.name)}", "", f"**{cell(wording.headline(analysis))}**", ""]
    wanted = ("mean iteration (ms)", "tokens/s (padding left out)", "microbatches by CP size", "peak memory of a rank")
    rows = [row for row in wording.case_rows(analysis) if row[0] in wanted]
    if rows:
        lines += [f"| | {' | '.join(analysis.cases)} |", "|---|---:|---:|"]
        lines += [f"| {' | '.join(map(cell, row))} |" for row in rows]
        lines.append("")
    lines += [f"- {cell(sentence)}" for sentence in same_case.sentences(analysis)[:1]]
    lines += [f"- {cell(fault)}" for fault in wording.fault_lines(analysis, 10)]
    if analysis.cautions:
        lines += ["<details><summary>Cautions</summary>", "", *(f"- {cell(c)}" for c in analysis.cautions), "",
                  "</details>"]  # fmt: skip
    return "\n".join([*lines, ""])


FORMATS: dict[str, Callable[[Analysis], str]] = {"junit": junit, "github": github, "summary": summary}
"""Value of `dcpbench report --format` -> its writer."""


def _checks(analysis: Analysis) -> Iterator[tuple[str, str | None]]:
    """(what was checked, what is wrong with it or None)."""
    faults = wording.fault_lines(analysis, 20)
    yield "records complete and on the same samples", "; ".join(faults) or None
    if analysis.parity is not None and analysis.tolerances.check_loss_parity:
        for gate in analysis.parity.gates:
            if gate.enforced:
                problem = f"{gate.statistic:.3g}, allowed {gate.limit:.3g}; usually {gate.meaning}"
                yield f"loss parity {gate.name}: {gate.title}", None if gate.passed else problem
    asked = analysis.decision
    if asked.min_speedup is not None or asked.required:
        own = "; ".join(reason for reason in analysis.verdict.reasons if not reason.startswith("loss parity"))
        yield "speed-up as asked for", "there is no speed-up" if analysis.parity is None else own or None


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def cell(text: str) -> str:
    """Text that cannot break out of a cell of a Markdown table."""
    return text.replace("\n", " ").replace("|", r"\|").replace("<", "&lt;")
