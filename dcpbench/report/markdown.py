"""`report.md`: the result to read, the answer first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dcpbench.report import figures, refits, same_case, wording

if TYPE_CHECKING:
    from dcpbench.analysis.pipeline import Analysis

_MOST_FAULTS = 200


def write(analysis: Analysis) -> str:
    """The whole report."""
    return "\n\n".join(_sections(analysis)) + "\n"


def _sections(analysis: Analysis) -> Iterator[str]:
    yield f"# {_escape(analysis.name)}: fixed against dynamic context parallelism"
    yield f"**{_escape(wording.headline(analysis))}**"
    if analysis.cautions:
        yield "## Cautions"
        yield _list(analysis.cautions)
    if analysis.faults:
        yield "## Faults"
        yield "Nothing is compared while the records of a case are incomplete or do not match."
        yield _list(wording.fault_lines(analysis, _MOST_FAULTS))
    if analysis.aligned is not None:
        yield "\n\n".join(f"![{caption}]({name}.png)" for name, caption in figures.available(analysis))
    if analysis.speedup is not None:
        yield "## The cases"
        yield _table(("", *analysis.cases), wording.case_rows(analysis))
        yield wording.warmup_sentence(analysis)
        yield "## Speed-up of dcp over baseline"
        yield _table(("measure", "times as fast"), wording.speedup_rows(analysis))
        yield (
            "The headline is total throughput: real tokens over seconds of each launch, as a ratio within each pair, "
            "as the geometric mean over pairs. Median and trimmed mean describe a typical iteration; on samples of "
            "very different lengths they leave out the long ones, so they are no substitute for it."
        )
        yield _table((wording.pair_noun(analysis), "times as fast"), wording.pair_rows(analysis))
        if analysis.lockstep is not None:
            yield "## Lockstep"
            yield wording.LOCKSTEP_TEXT
            yield _table(("", ""), wording.lockstep_rows(analysis))
        if rows := same_case.rows(analysis):
            yield f"## {same_case.TITLE}"
            yield _escape(" ".join(same_case.sentences(analysis)))
            yield _table(("", ""), rows)
        if analysis.lengths:
            yield "## Speed-up by length"
            yield _table(wording.LENGTH_COLUMNS, wording.length_rows(analysis))
        yield "## Loss parity"
        yield _table(wording.GATE_COLUMNS, wording.gate_rows(analysis))
        if sentences := wording.gate_sentences(analysis):
            yield _list(sentences)
        yield _table(("quantity", "value"), wording.parity_rows(analysis))
    yield from _launches(analysis)
    if analysis.provenance:
        yield "## From the manifest"
        yield _table(("", ""), analysis.provenance)
    yield "## Where the numbers come from"
    yield _list(_provenance(analysis))


def _launches(analysis: Analysis) -> Iterator[str]:
    yield "## Launches"
    yield _table(wording.LAUNCH_COLUMNS, wording.launch_rows(analysis))
    if rows := wording.steady_rows(analysis):
        yield "## Steadiness"
        yield f"Times of the measured window over {analysis.workload}, so that batches of all lengths compare."
        yield _table(wording.STEADY_COLUMNS, rows)
    if rows := refits.rows(analysis):
        yield f"## {refits.TITLE}"
        yield _table(refits.COLUMNS, rows)
        yield refits.sentence(analysis)
    if analysis.profiles:
        yield "## Where the time goes"
        yield _table(wording.profile_columns(analysis), wording.profile_rows(analysis))


def _provenance(analysis: Analysis) -> Iterator[str]:
    if analysis.aligned is not None:
        yield f"Launches are aligned on {', '.join(analysis.aligned_on)}; `aligned.parquet` holds every iteration."
        yield "Times are those of the slowest rank. Tokens are real tokens: padding is left out of every rate."
        yield (
            "TFLOP/s per GPU counts the model's FLOPs on real lengths, "
            "`flops_per_token x sum(L) + flops_per_squared_length x sum(L^2)`, recomputation left out."
        )
    for name, case in analysis.cases.items():
        if case.header is not None and case.header.versions:
            versions = ", ".join(f"{package} {version}" for package, version in sorted(case.header.versions.items()))
            yield f"{name}: {versions}; {case.header.device or 'device not recorded'}, {case.header.world_size} ranks."
    yield "`statistics.json` holds all figures unrounded, `summary.csv` the main ones as a table."


def _list(lines: Sequence[str] | Iterator[str]) -> str:
    return "\n".join(f"- {_escape(line)}" for line in lines)


def _table(columns: Sequence[str], rows: Sequence[wording.Row]) -> str:
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join("| " + " | ".join(_escape(cell) for cell in line) + " |" for line in lines)


def _escape(text: str) -> str:
    """Text that cannot break out of its line or table cell, nor become markup of its own."""
    return text.replace("\n", " ").replace("|", r"\|").replace("<", "&lt;")
