"""What a report says of launches that refitted the cost profile while they ran, and what they are predicted with."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from log_lines import run_folder, spec
from rich.console import Console

from dcpbench.analysis.pipeline import Analysis, analyze_run
from dcpbench.analysis.refits import LaunchRefits
from dcpbench.data.prepare import prepare
from dcpbench.dcp import cost_profiles, refit_log
from dcpbench.dcp.cost_profiles import CostProfile, Iteration, coefficients_of
from dcpbench.dcp.costs import H200_1B, CostModel
from dcpbench.dcp.iterations import PlannedIteration, iteration_times
from dcpbench.dcp.refit_log import RefitLog, Refitted
from dcpbench.report import FILES, console, refits
from dcpbench.runfolder.layout import RunFolder

JOBS = (0, 4, 400, 90_000, 0, 1, 300, 60_000, 1, 1, 350, 50_000)
COUNT, WARMUP = 24, 1
NEW = replace(H200_1B, token=2 * H200_1B.token)
PROFILE = CostProfile(
    name="x", kind="measured", coefficients=coefficients_of(H200_1B), iteration=Iteration(seconds=0.01)
)


def takes(cost: CostModel, constant: float) -> float:
    return float(iteration_times([PlannedIteration.recorded(JOBS, 4)], cost)[0]) + constant


def a_run(folder: Path, *, adopted: bool) -> Path:
    """The dcp launch was refitted after iteration 8, and its times are exactly those of what was in force."""
    made = spec(iterations=COUNT, warmup=WARMUP)
    old, new = takes(H200_1B, 0.01), takes(NEW, 0.02)
    times = [old] * 15 + [new] * (COUNT - 15)
    path = run_folder(folder, {"01-baseline": [old] * COUNT, "01-dcp": times}, made)
    prepare(made, RunFolder(path).data)
    RunFolder(path).costs.write_text(cost_profiles.dump(PROFILE))
    one = Refitted(
        after=8,
        applies_from=16,
        adopted=adopted,
        why_not=None if adopted else "it is poor",
        iterations=7,
        error_before=0.3,
        error_after=0.02,
        coefficients=coefficients_of(NEW),
        iteration_seconds=0.02,
    )
    log = RefitLog(interval=8, half_life=16, basis=PROFILE.basis, refits=(one,))
    refit_log.write(path / "launches" / "01-dcp", log)
    return path


def shown(analysis: Analysis) -> str:
    target = io.StringIO()
    Console(file=target, width=200, no_color=True).print(console.render(analysis))
    return target.getvalue()


def test_iterations_are_predicted_with_what_was_in_force(tmp_path: Path) -> None:
    found = analyze_run(a_run(tmp_path / "run", adopted=True))
    predicted = found.cases["dcp"].predicted
    assert predicted is not None
    assert predicted.basis == "measured profile x, refitted while running"
    assert predicted.iterations == COUNT - WARMUP
    assert predicted.mape == pytest.approx(0, abs=1e-9)
    assert predicted.ratio == pytest.approx(1)
    baseline = found.cases["baseline"].predicted
    assert baseline is not None
    assert baseline.basis == "measured profile x"
    assert any("01-dcp ran (schedule.refit)" in caution for caution in found.cautions)


def test_a_refit_that_was_not_adopted_changes_no_prediction(tmp_path: Path) -> None:
    found = analyze_run(a_run(tmp_path / "run", adopted=False))
    predicted = found.cases["dcp"].predicted
    assert predicted is not None
    assert predicted.basis == "measured profile x"
    assert not any("schedule.refit" in caution for caution in found.cautions)
    assert "not adopted: it is poor" in shown(found)


def test_every_report_shows_the_refits(tmp_path: Path) -> None:
    found = analyze_run(a_run(tmp_path / "run", adopted=True))
    row = ("01-dcp", "8", "16", "7", "30.0%", "2.0%", "adopted")
    assert refits.rows(found) == [row]
    assert f"| {' | '.join(row)} |" in (FILES["report.md"](found) or b"").decode()
    page = (FILES["report.html"](found) or b"").decode()
    assert "Refits of the cost profile" in page
    assert "<td>adopted</td>" in page
    assert "refit after iteration" in shown(found)
    document = json.loads(FILES["statistics.json"](found) or b"")
    (one,) = document["refits"]
    assert (one["launch"], one["interval"], one["refits"][0]["coefficients"]["token"]) == ("01-dcp", 8, NEW.token)
    assert document["reasons"]["refits.0.refits.0.why_not"] == "the refit was adopted"
    without = replace(found, refits=())
    assert "Refits of the cost profile" not in (FILES["report.html"](without) or b"").decode()


def test_many_refits_do_not_fill_the_report(tmp_path: Path) -> None:
    found = analyze_run(a_run(tmp_path / "run", adopted=True))
    (launch,) = found.refits
    many = replace(found, refits=(LaunchRefits("01-dcp", "dcp", launch.log.model_copy(
        update={"refits": launch.log.refits * 40})),))  # fmt: skip
    assert len(refits.rows(many)) == 24
    assert "24 of 40" in refits.sentence(many)
    assert len(refits.plain(many)[0]["refits"]) == 40
