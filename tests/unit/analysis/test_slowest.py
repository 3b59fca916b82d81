"""The slowest iteration of each case as the packing picture shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from log_lines import run_folder, spec

from dcpbench import report
from dcpbench.analysis.pipeline import analyze_run
from dcpbench.analysis.slowest import Microbatch

TIMES = {
    "01-baseline": [9.0, 1.0, 1.1, 1.0],
    "01-dcp": [9.0, 0.5, 0.5, 0.5],
    "02-baseline": [9.0, 1.0, 1.0, 1.4],
    "02-dcp": [9.0, 0.5, 0.6, 0.5],
}


def test_it_is_the_slowest_after_warm_up_over_all_launches(tmp_path: Path) -> None:
    found = analyze_run(run_folder(tmp_path, TIMES, spec(2, 4, 1))).slowest
    assert [(one.case, one.launch, one.iteration, one.seconds) for one in found] == [
        ("baseline", "02-baseline", 4, 1.4),
        ("dcp", "02-dcp", 3, 0.6),
    ]


def test_microbatches_run_in_the_plan_s_order_and_end_with_the_iteration(tmp_path: Path) -> None:
    """Three microbatches of a domain of 4: one on all ranks, then two single ranks at the same time."""
    (_, dcp) = analyze_run(run_folder(tmp_path, TIMES, spec(2, 4, 1))).slowest
    # FLOPs a rank: (1e9 tokens + 1e3 squares) / ranks, from the header and the records of log_lines.
    first, second, third = (1e9 * 400 + 1e3 * 90e3) / 4, 1e9 * 300 + 1e3 * 60e3, 1e9 * 350 + 1e3 * 50e3
    scale = 0.6 / (first + third)
    assert dcp.ranks == 4
    assert [(part.first_rank, part.ranks) for part in dcp.microbatches] == [(0, 4), (0, 1), (1, 1)]
    assert [part.start for part in dcp.microbatches] == pytest.approx([0.0, first * scale, first * scale])
    assert [part.end for part in dcp.microbatches] == pytest.approx([first * scale, (first + second) * scale, 0.6])
    assert isinstance(dcp.microbatches[0], Microbatch)


def test_records_without_plans_have_no_picture(tmp_path: Path) -> None:
    changes = {"02-dcp": {3: {"jobs": ()}}}
    folder = run_folder(tmp_path, TIMES, spec(2, 4, 1), changes=changes)
    found = analyze_run(folder)
    assert found.slowest == ()
    report.write(found, folder / "analysis")
    assert not (folder / "analysis" / "packing.png").exists()
    assert json.loads((folder / "analysis" / "statistics.json").read_text())["slowest_iterations"] == []


def test_reports_show_it(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, TIMES, spec(2, 4, 1))
    report.write(analyze_run(folder), folder / "analysis")
    page = (folder / "analysis" / "report.html").read_text(encoding="utf-8")
    for words in ("Packing of each case", "iteration 4 of 02-baseline, 1,400.0 ms", "CP 4", "CP 1"):
        assert words in page
    assert "](packing.png)" in (folder / "analysis" / "report.md").read_text(encoding="utf-8")
    assert (folder / "analysis" / "packing.png").stat().st_size > 1000
    statistics = json.loads((folder / "analysis" / "statistics.json").read_text())
    assert [one["iteration"] for one in statistics["slowest_iterations"]] == [4, 3]
