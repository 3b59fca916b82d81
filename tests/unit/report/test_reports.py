import csv
import io
from pathlib import Path
from typing import Any

import pytest
from log_lines import megatron_log, run_folder, spec
from rich.console import Console

from dcpbench.analysis.pipeline import Analysis, analyze_logs, analyze_run
from dcpbench.faults import Fault
from dcpbench.report import FILES, console, wording

TIMES = {"01-baseline": [9.0, 1.0, 2.0, 1.0, 1.0, 1.0], "01-dcp": [8.0, 0.5, 1.0, 0.5, 0.5, 0.5]}


@pytest.fixture
def passed(tmp_path: Path) -> Analysis:
    return analyze_run(run_folder(tmp_path / "passed", TIMES))


@pytest.fixture
def broken(tmp_path: Path) -> Analysis:
    changes: dict[str, dict[int, dict[str, Any]]] = {
        "01-dcp": {3: {"loss": None}, 4: {"loss": None}, 5: {"skipped": True}}
    }
    return analyze_run(run_folder(tmp_path / "broken", TIMES, changes=changes))


def shown(analysis: Analysis, width: int = 120) -> str:
    target = Console(file=io.StringIO(), width=width, no_color=True)
    target.print(console.render(analysis))
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def text(analysis: Analysis, name: str) -> str:
    return (FILES[name](analysis) or b"").decode()


def test_the_answer_comes_first(passed: Analysis, broken: Analysis) -> None:
    for report in (shown(passed), text(passed, "report.md").split("\n", 2)[2]):
        first = " ".join(report.split())
        assert first.lstrip("*").startswith("PASSED: dcp trained 2.000 times as fast as baseline")
    for report in (shown(broken), text(broken, "report.md").split("\n", 2)[2]):
        first = " ".join(report.split())
        assert first.lstrip("*").startswith("FAILED: the records cannot be compared: 2 non_finite, 1 skipped.")


def test_console_shows_both_cases_and_no_speedup_when_broken(passed: Analysis, broken: Analysis) -> None:
    good = shown(passed)
    for words in ("1,200.0", "600.0", "CP 1: 10, CP 4: 5", "4.76%", "default_dynamic_cp", "Caution: One pair"):
        assert words in good
    bad = shown(broken)
    assert "speed-up" not in bad
    assert "Fault: 01-dcp (dcp), iterations 3-4: non finite: loss missing" in bad
    assert "Fault: 01-dcp (dcp), iteration 5: skipped: the optimizer step was skipped" in bad


def test_a_slower_dcp_is_called_slower(tmp_path: Path) -> None:
    analysis = analyze_run(run_folder(tmp_path, {"01-baseline": [1.0] * 6, "01-dcp": [2.0] * 6}))
    assert "0.500 times as fast as baseline (so it was slower)" in wording.headline(analysis)


def test_markdown_says_what_ran_and_where_numbers_come_from(passed: Analysis) -> None:
    report = text(passed, "report.md")
    for words in (
        "# example: fixed against dynamic context parallelism",
        "| attention backend | reference | reference |",
        "| padding policy | minimal | minimal |",
        "| padding share of tokens | 4.76% | 4.76% |",
        "| microbatches by CP size | CP 1: 10, CP 4: 5 | CP 1: 10, CP 4: 5 |",
        "Measured are iterations 2 to 6 of each launch; iteration 1 was left out as warm-up.",
        "| 01-dcp | 2 | 6 | 600.0 | 3.00 |",
        "indicative only",
        "batch digest",
    ):
        assert words in report, words


def test_markdown_cannot_be_broken_by_what_it_quotes(broken: Analysis) -> None:
    from dataclasses import replace

    nasty = Fault("dcp", "01-dcp", 1, "malformed", "a | b\nc <script>")
    report = text(replace(broken, faults=(nasty,)), "report.md")
    assert "- 01-dcp (dcp), iteration 1: malformed: a \\| b c &lt;script>" in report.split("\n")


def test_rich_markup_in_a_message_is_text(broken: Analysis) -> None:
    from dataclasses import replace

    nasty = Fault("dcp", "01-dcp", 1, "malformed", "[bold]x[/bold] [/]")
    assert "[bold]x[/bold] [/]" in shown(replace(broken, faults=(nasty,)))


def test_summary_csv_is_long_and_exact(passed: Analysis, broken: Analysis) -> None:
    rows = list(csv.DictReader(io.StringIO(text(passed, "summary.csv"))))
    assert set(rows[0]) == {"case", "metric", "value", "unit"}
    values = {(row["case"], row["metric"]): row["value"] for row in rows}
    assert len(values) == len(rows)
    assert passed.speedup is not None
    assert float(values["", "speedup_total"]) == passed.speedup.total
    assert values["baseline", "mean_ms"] == "1200.0"
    assert values["", "parity_passed"] == "true"
    assert values["", "verdict"] == "passed"
    empty = {row["metric"]: row["value"] for row in csv.DictReader(io.StringIO(text(broken, "summary.csv")))}
    assert empty["speedup_total"] == ""
    assert empty["faults"] == "3"


def test_many_faults_are_cut_on_the_console(broken: Analysis) -> None:
    from dataclasses import replace

    many = tuple(Fault("dcp", "01-dcp", 2 * i, "missing", "gone") for i in range(1, 500))
    lines = wording.fault_lines(replace(broken, faults=many), 10)
    assert len(lines) == 11
    assert lines[-1] == "and 489 more; statistics.json lists them"


def test_logged_tflops_stand_in_only_where_our_own_are_not(tmp_path: Path, passed: Analysis) -> None:
    logs = [megatron_log(tmp_path / f"{n}.log", [1000.0] * 6) for n in range(2)]
    assert "TFLOP/s per GPU as logged |" in text(analyze_logs(logs[:1], logs[1:], warmup=2), "report.md")
    assert "as logged" not in text(passed, "report.md")


def test_no_warm_up_is_said_too(tmp_path: Path) -> None:
    analysis = analyze_run(run_folder(tmp_path, TIMES, spec(1, 6, 0)))
    assert wording.warmup_sentence(analysis).startswith("All 6 iterations of each launch were measured")


def test_narrow_terminals_lose_no_number(passed: Analysis) -> None:
    assert "600.0" in shown(passed, width=60)
