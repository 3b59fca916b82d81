"""What `dcpbench plan` found: on a terminal, as a page with the packing picture, as PNG, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from dcpbench.planner.planning import Comparison, Evaluated, Figures
from dcpbench.planner.sweep import Answer, Choice
from dcpbench.redact import redact, redact_value
from dcpbench.report import page
from dcpbench.report.packing import Bar, Packing, packing_figure
from dcpbench.report.wording import NONE, number

if TYPE_CHECKING:
    from rich.console import RenderableType

CAPTION = "What every rank does in the first batch, coloured by CP size"
_MOST_SIZES = 6
_MOST_ROWS = 20
SWEEP_COLUMNS = (
    "scheduler", "capacity", "CP", "iteration\n(ms)", "times\nas fast", "over\nbound", "idle", "micro-\nbatches",
    "peak\ntokens", "",
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What the figures rest on, beside the ground; sentences are without line breaks."""

    name: str
    """Of the spec."""
    nodes: int
    samples: int
    """Of a global batch."""
    basis: str
    """Which cost profile, and whether it was measured."""
    data: str
    """Which batches."""
    answer: Answer | None
    """Of a sweep; None where every scheduler was planned as configured."""


def headline(comparison: Comparison, facts: Facts) -> str:
    """The answer in one sentence."""
    if facts.answer is not None:
        best = facts.answer.best
        if best is None:
            return f"No setting stays within {facts.answer.limit:,} tokens per rank."
        lead = f"Fastest of what fits {facts.answer.limit:,} tokens per rank: {best.setting.label},"
    else:
        best = min(comparison.rows, key=lambda row: row.mean_ms)
        lead = f"Fastest: {best.setting.label},"
    usual = comparison.configured
    if usual is None:
        than = ""
    elif best.setting == usual.setting:
        than = ", which is fixed CP as configured"
    else:
        than = f", {best.speedup:.3f} times as fast as fixed CP as configured"
    return f"{lead} {_milliseconds(best)} ms predicted an iteration{than}; {best.over_bound:.3f} times the bound."


def sentences(comparison: Comparison, facts: Facts) -> list[str]:
    """What the figures mean and rest on, and what is missing; the basis first."""
    ground = comparison.ground
    cost = ground.cost
    found = [facts.basis]
    speed = f"{cost.within.bandwidth / 1e9:.4g} GB/s within a node"
    if facts.nodes > 1:
        speed += f", {cost.between.bandwidth / 1e9:.4g} GB/s between nodes"
    rest = (
        f"{1e3 * ground.iteration_seconds:,.1f} ms for gradient reduction and optimizer, as measured, are in every time"
        if ground.iteration_seconds
        else "gradient reduction and optimizer, the same for all, are not in the times"
    )
    ranks = "1 rank" if ground.ranks == 1 else f"{ground.ranks:,} ranks"
    nodes = "1 node" if facts.nodes == 1 else f"{facts.nodes:,} nodes"
    found.append(f"{ranks} on {nodes}, {speed}; {facts.data}; padding {ground.padding}; {rest}.")
    if comparison.configured is None:
        found.append("There is no speed-up over fixed CP, because fixed CP as configured cannot serve these batches.")
    answer = facts.answer
    if answer is not None and answer.beyond is not None:
        row = answer.beyond
        found.append(
            f"With room for {row.peak_tokens:,} tokens per rank, {row.setting.label} would take {_milliseconds(row)} "
            "ms; --max-tokens says how many fit."
        )
    found += _refusals(comparison, swept=answer is not None)
    return found


def _refusals(comparison: Comparison, *, swept: bool) -> Iterator[str]:
    """Each refusal, or in a sweep the first of each scheduler with their number."""
    by_scheduler: dict[str, list[str]] = {}
    for one in comparison.refusals:
        by_scheduler.setdefault(one.setting.scheduler, []).append(f"{one.setting.label}: {one.reason}")
    for reasons in by_scheduler.values():
        more = f" (and {len(reasons) - 1:,} more settings of it without figures)" if len(reasons) > 1 else ""
        yield f"No figures for {reasons[0]}{more if swept else ''}."


def columns(comparison: Comparison) -> tuple[str, ...]:
    """Heads of `rows`."""
    return ("", *(row.setting.scheduler for row in comparison.rows))


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """One quantity a row, one scheduler a column."""
    shown: list[tuple[str, Any]] = [
        ("capacity and CP size", lambda row: f"{row.setting.capacity:,}, {_size(row)}"),
        ("predicted iteration (ms)", _milliseconds),
        ("over the lower bound", lambda row: f"{row.over_bound:.3f}"),
        ("times as fast as fixed CP", lambda row: number(row.speedup, ".3f")),
        ("least and most of a batch", _range),
        ("idle share of rank time", lambda row: f"{row.idle_share:.1%}"),
        ("padding share of tokens", lambda row: f"{row.padding_share:.2%}"),
        ("microbatches of the fullest rank", lambda row: f"{row.microbatches:,.1f}"),
        ("busy rank time by CP size", _sizes),
        ("peak tokens per rank", lambda row: f"{row.peak_tokens:,}"),
        ("planning (ms)", lambda row: f"{row.planning_ms:,.1f}"),
    ]
    if len(comparison.limits) == 1:
        shown = [(name, text) for name, text in shown if text is not _range]
    return [(name, *(text(row) for row in comparison.rows)) for name, text in shown]


def sweep_rows(answer: Answer, most: int | None = None) -> list[tuple[str, ...]]:
    """Settings, fastest first; those above the limit come last."""
    usual = {choice.configured.setting for choice in answer.choices if choice.configured is not None}
    found: list[tuple[str, ...]] = []
    for place, row in enumerate(answer.rows[:most]):
        marks = ["as configured"] * (row.setting in usual) + ["over the limit"] * (place >= answer.within)
        found.append(
            (
                row.setting.scheduler,
                f"{row.setting.capacity:,}",
                _size(row),
                f"{row.mean_ms:,.1f}",
                number(row.speedup, ".3f"),
                f"{row.over_bound:.3f}",
                f"{row.idle_share:.1%}",
                f"{row.microbatches:,.1f}",
                f"{row.peak_tokens:,}",
                ", ".join(marks),
            )
        )
    return found


def choice_rows(answer: Answer) -> list[tuple[str, ...]]:
    """Each scheduler as configured and at its best within the limit."""
    return [(choice.scheduler, _setting(choice.configured), _setting(choice.best), _gain(choice)) for choice in
            answer.choices]  # fmt: skip


CHOICE_COLUMNS = ("scheduler", "as configured", "best within the limit", "times as fast")


def _setting(row: Figures | None) -> str:
    return "none" if row is None else f"{row.mean_ms:,.1f} ms ({_size(row)}, {row.setting.capacity:,} tokens)"


def _gain(choice: Choice) -> str:
    return number(choice.configured.mean_ms / choice.best.mean_ms if choice.configured and choice.best else None, ".3f")


def _milliseconds(row: Figures) -> str:
    return f"{row.mean_ms:,.1f}" + ("" if row.sd_ms is None else f" ± {row.sd_ms:,.1f}")


def _range(row: Figures) -> str:
    return NONE if row.speedup_range is None else "{:.3f} to {:.3f}".format(*row.speedup_range)


def _size(row: Figures) -> str:
    return f"CP {row.setting.cp:,}" if row.setting.fixed else f"min {row.setting.min_size:,}"


def _sizes(row: Figures) -> str:
    """Shares of the sizes that matter most, ascending."""
    most = sorted(row.time_by_size, key=lambda size: -row.time_by_size[size])[:_MOST_SIZES]
    text = ", ".join(f"CP {size:,}: {row.time_by_size[size]:.0%}" for size in sorted(most))
    left = len(row.time_by_size) - len(most)
    return f"{text}, {left} others" if left else text


def panels(comparison: Comparison) -> list[Packing]:
    """The packing picture: the first batch of each scheduler."""
    return [_panel(one, comparison.limits[0]) for one in comparison.pictured]


def _panel(one: Evaluated, limit: float) -> Packing:
    plan, times = one.first
    bars = [
        Bar(job.first_rank, job.size, start, finish, job.size)
        for job, start, finish in zip(plan.jobs, times.starts, times.finishes, strict=True)
    ]
    return Packing(f"{one.setting.label}: {one.predictions[0].idle_share:.0%} idle", bars, limit)


def render(comparison: Comparison, facts: Facts) -> RenderableType:
    """For a terminal."""
    from rich.console import Group  # noqa: PLC0415 - JSON and files do without rich
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    def table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
        made = Table(header_style="bold")
        for index, head in enumerate(heads):
            narrow = heads is SWEEP_COLUMNS
            made.add_column(Text(head), justify="left" if index == 0 else "right", no_wrap=narrow)
        for row in cells:
            made.add_row(*(Text(redact(cell)) for cell in row))
        return made

    parts: list[RenderableType] = [Text(redact(headline(comparison, facts)), style="bold")]
    answer = facts.answer
    if answer is None:
        parts.append(table(columns(comparison), rows(comparison)))
    else:
        parts.append(table(CHOICE_COLUMNS, choice_rows(answer)))
        parts.append(table(SWEEP_COLUMNS, sweep_rows(answer, _MOST_ROWS)))
        if len(answer.rows) > _MOST_ROWS:
            parts.append(Text(f"{_MOST_ROWS} of {len(answer.rows):,} settings; --out or --json gives all."))
    first, *others = sentences(comparison, facts)
    parts.append(Text(redact(first), style="yellow"))
    parts += [Text(redact(sentence)) for sentence in others]
    return Group(*parts)


def document(comparison: Comparison, facts: Facts) -> dict[str, Any]:
    """What `--json` prints; figures are unrounded."""
    ground, answer = comparison.ground, facts.answer
    cost = ground.cost
    return {
        "schema_version": 1,
        "name": facts.name,
        "headline": headline(comparison, facts),
        "notes": sentences(comparison, facts),
        "ranks": ground.ranks,
        "nodes": facts.nodes,
        "samples": facts.samples,
        "batches": len(ground.batches),
        "padding": ground.padding,
        "costs": asdict(cost),
        "iteration_ms": 1e3 * ground.iteration_seconds,
        "bound_ms": comparison.bound_ms,
        "fixed_cp": comparison.configured and _entry(comparison.configured),
        "rows": [_entry(row) for row in (comparison.rows if answer is None else answer.rows)],
        "refused": [{**asdict(one.setting), "reason": one.reason} for one in comparison.refusals],
        "sweep": answer
        and {
            "max_tokens": answer.limit,
            "within": answer.within,
            "schedulers": [
                {
                    "scheduler": choice.scheduler,
                    "as_configured": choice.configured and _entry(choice.configured),
                    "best": choice.best and _entry(choice.best),
                }
                for choice in answer.choices
            ],
        },
    }


def _entry(row: Figures) -> dict[str, Any]:
    """One row, flat, with text for the keys of what is by size."""
    found = asdict(row)
    sizes = {name: {str(k): v for k, v in found.pop(name).items()} for name in ("jobs_by_size", "time_by_size")}
    return {**found.pop("setting"), **found, **sizes}


def files(comparison: Comparison, facts: Facts) -> Iterator[tuple[str, str | bytes]]:
    """(name, content) of every file for `--out`."""
    content = redact_value(document(comparison, facts), identity=False)
    yield "plan.json", json.dumps(content, indent=2, allow_nan=False) + "\n"
    yield "plan.csv", _csv(comparison, facts)
    yield "packing.png", packing_figure(panels(comparison), comparison.ground.ranks, kind="png")
    yield "plan.html", html(comparison, facts)


def _csv(comparison: Comparison, facts: Facts) -> str:
    file = io.StringIO()
    entries = [_entry(row) for row in (comparison.rows if facts.answer is None else facts.answer.rows)]
    names = [name for name in entries[0] if not name.endswith("by_size")]
    writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(entries)
    return file.getvalue()


def html(comparison: Comparison, facts: Facts) -> str:
    """The page; the picture is part of it."""
    return page.page(f"{facts.name}: how each scheduler would pack it", _body(comparison, facts))


def _body(comparison: Comparison, facts: Facts) -> Iterator[str]:
    first, *others = sentences(comparison, facts)
    yield f'<section class="answer inconclusive"><p><strong>{escape(redact(headline(comparison, facts)))}</strong></p>'
    yield f"<p>{escape(redact(first))}</p></section>"
    answer = facts.answer
    if answer is None:
        yield page.section("The schedulers") + page.table(columns(comparison), rows(comparison))
    else:
        yield page.section("As configured, and at its best") + page.table(CHOICE_COLUMNS, choice_rows(answer))
    yield page.section("Packing")
    drawn = packing_figure(panels(comparison), comparison.ground.ranks).decode()
    yield page.picture(drawn, CAPTION, "tall")
    if answer is not None:
        yield page.section("All settings, fastest first")
        heads = [head.replace("-\n", "").replace("\n", " ") for head in SWEEP_COLUMNS]
        yield page.table(heads, sweep_rows(answer))
    yield page.section("What it stands on") + "".join(page.paragraph(redact(sentence)) for sentence in others)
    yield (
        "<footer>Nothing here was run: times are those of the cost model, in which a microbatch starts when all its "
        "ranks are there. No schedule ends before the lower bound.</footer>"
    )
