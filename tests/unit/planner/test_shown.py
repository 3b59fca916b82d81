"""What `dcpbench plan` shows: the same figures on every surface, and every sentence that they need."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from dcpbench.dcp.costs import H200_1B
from dcpbench.planner import planning, shown, sweep
from dcpbench.planner.planning import Comparison, Ground, Setting
from dcpbench.planner.shown import Facts

USUAL = Setting("dp_balanced", 2048, 4, 1)
NAMES = ["dp_balanced", "default_dynamic_cp", "laminar"]
BATCHES = ((4000, 900, 300, 200, 1500, 130, 700, 2600), (500, 600, 700, 800, 900, 1000, 1100, 6000))
FACTS = Facts("small <b>", 1, 8, "The times rest on the assumed profile x.", "2 batches of 8 samples", None)


@pytest.fixture(scope="module")
def compared() -> Comparison:
    settings = sweep.settings(NAMES, USUAL, {})
    return planning.compare(settings, USUAL, Ground(8, H200_1B, BATCHES, "minimal"), limit=60)


@pytest.fixture(scope="module")
def swept() -> tuple[Comparison, Facts]:
    usual = Setting("dp_balanced", 1500, 4, 1)
    many = tuple(4 * batch for batch in BATCHES)  # so many that larger microbatches pay
    settings = sweep.settings(NAMES, usual, {"capacity": (1000, 1500, 4096), "cp": (4, 8)})
    found = planning.compare(settings, usual, Ground(8, H200_1B, many, "minimal"), limit=60)
    return found, replace(FACTS, answer=sweep.answer(found, NAMES, usual, 1500))


def text_of(comparison: Comparison, facts: Facts) -> str:
    screen = Console(file=io.StringIO(), width=120)
    screen.print(shown.render(comparison, facts))
    return screen.file.getvalue()  # type: ignore[attr-defined]


def test_the_headline_names_the_fastest_and_its_lead(compared: Comparison) -> None:
    best = min(compared.rows, key=lambda row: row.mean_ms)
    said = shown.headline(compared, FACTS)
    assert best.setting.scheduler == "laminar"
    assert f"{best.speedup:.3f} times as fast as fixed CP as configured" in said
    assert f"{best.mean_ms:,.1f} ±" in said
    assert said.count(".\n") == 0


def test_the_headline_does_not_compare_fixed_cp_with_itself(compared: Comparison) -> None:
    said = shown.headline(replace(compared, rows=compared.rows[:1]), FACTS)
    assert "which is fixed CP as configured" in said
    assert "times as fast" not in said


def test_terminal_page_and_table_have_the_same_cells(compared: Comparison) -> None:
    terminal, page = text_of(compared, FACTS), shown.html(compared, FACTS)
    for row in shown.rows(compared):
        assert row[0].split()[0] in terminal  # a narrow column wraps the rest
        for cell in row[1:]:
            assert f"<td>{cell}</td>" in page
    assert "The times rest on the assumed profile x." in terminal
    assert "The times rest on the assumed profile x." in page


def test_a_single_batch_has_no_spread(compared: Comparison) -> None:
    one = planning.compare([USUAL], USUAL, Ground(8, H200_1B, BATCHES[:1], "minimal"), limit=60)
    assert "±" not in text_of(one, FACTS)
    names = [row[0] for row in shown.rows(one)]
    assert "least and most of a batch" not in names
    assert "least and most of a batch" in [row[0] for row in shown.rows(compared)]


def test_the_page_is_self_contained_and_escapes_names(compared: Comparison) -> None:
    page = shown.html(compared, FACTS)
    assert "small &lt;b&gt;" in page
    assert "small <b>" not in page
    assert page.count("<svg") == 1
    assert not re.search(r'(href|src)="(?!#|data:)', page)
    assert not re.search(r"<(script|link|img)\b", page)
    assert "prefers-color-scheme: dark" in page


def test_json_has_every_figure_unrounded_and_is_strict(compared: Comparison) -> None:
    document: dict[str, Any] = json.loads(json.dumps(shown.document(compared, FACTS), allow_nan=False))
    assert [row["scheduler"] for row in document["rows"]] == NAMES
    assert [row["mean_ms"] for row in document["rows"]] == [row.mean_ms for row in compared.rows]
    assert document["rows"][2]["jobs_by_size"] == {str(k): v for k, v in compared.rows[2].jobs_by_size.items()}
    assert document["bound_ms"] == compared.bound_ms
    assert document["costs"]["assumed"] is True
    assert document["sweep"] is None


def test_files_are_page_picture_table_and_json(compared: Comparison) -> None:
    files = dict(shown.files(compared, FACTS))
    assert list(files) == ["plan.json", "plan.csv", "packing.png", "plan.html"]
    assert isinstance(files["packing.png"], bytes)
    table = list(csv.DictReader(io.StringIO(str(files["plan.csv"]))))
    assert [float(row["mean_ms"]) for row in table] == [row.mean_ms for row in compared.rows]


def test_a_sweep_shows_each_scheduler_as_configured_and_at_its_best(swept: tuple[Comparison, Facts]) -> None:
    found, facts = swept
    answer = facts.answer
    assert answer is not None
    terminal = text_of(found, facts)
    assert [row[0] for row in shown.choice_rows(answer)] == NAMES
    for choice in answer.choices:
        assert choice.configured is not None
        assert choice.best is not None
        assert choice.best.mean_ms <= choice.configured.mean_ms
        assert f"{choice.best.mean_ms:,.1f} ms" in terminal
    marks = {row[-1] for row in shown.sweep_rows(answer)}
    assert {"", "as configured", "over the limit"} <= marks
    assert terminal.count("as configured") >= 3
    assert all(len(line) <= 120 for line in terminal.splitlines())


def test_a_faster_setting_above_the_limit_is_named_in_a_sentence(swept: tuple[Comparison, Facts]) -> None:
    found, facts = swept
    assert facts.answer is not None
    assert facts.answer.beyond is not None
    assert any("--max-tokens" in sentence for sentence in shown.sentences(found, facts))
    none = replace(facts, answer=replace(facts.answer, beyond=None))
    assert not any("--max-tokens" in sentence for sentence in shown.sentences(found, none))


def test_nothing_within_the_limit_is_said(swept: tuple[Comparison, Facts]) -> None:
    found, facts = swept
    none = replace(facts, answer=sweep.answer(found, NAMES, USUAL, 1))
    assert shown.headline(found, none) == "No setting stays within 1 tokens per rank."
    assert "none" in text_of(found, none)


def test_refusals_are_sentences_and_in_a_sweep_one_for_each_scheduler() -> None:
    ground = Ground(8, H200_1B, BATCHES, "minimal")
    small = Setting("dp_balanced", 128, 4, 1)
    found = planning.compare([small, Setting("laminar", 2048, 4, 1)], small, ground, limit=60)
    said = shown.sentences(found, FACTS)
    assert any(one.startswith("No figures for dp_balanced, CP 4, 128 tokens: sample 0 has 4000") for one in said)
    assert any("no speed-up over fixed CP" in one for one in said)
    asked = sweep.settings(["dp_balanced", "laminar"], USUAL, {"capacity": (64, 128, 2048)})
    swept = planning.compare(asked, USUAL, ground, limit=60)
    facts = replace(FACTS, answer=sweep.answer(swept, NAMES, USUAL, 2048))
    refusals = [one for one in shown.sentences(swept, facts) if one.startswith("No figures")]
    assert len(refusals) == 2
    assert "(and 1 more settings of it without figures)" in refusals[0]


def test_the_picture_shows_the_first_batch_of_each_scheduler(compared: Comparison) -> None:
    panels = shown.panels(compared)
    assert [panel.title.split(",")[0] for panel in panels] == NAMES
    for panel, one in zip(panels, compared.pictured, strict=True):
        assert panel.end == one.predictions[0].makespan
        assert panel.bound == compared.limits[0]
