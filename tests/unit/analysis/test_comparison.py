"""Two finished runs side by side, and the list of runs."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from log_lines import run_folder, spec

from dcpbench import cli, report
from dcpbench.analysis.comparison import compare
from dcpbench.analysis.pipeline import analyze_run
from dcpbench.errors import ExitCode, LogError, RecordsError, UsageError
from dcpbench.runfolder.history import runs


def a_run(folder: Path, factor: float = 1.0, pairs: int = 4, seed: int = 1, lr: float = 1e-4) -> Path:
    """A run whose dcp takes `factor` times 0.8 s an iteration; launches differ by half a percent."""
    rng = np.random.default_rng(seed)
    steady = 1.0 + 0.01 * (np.arange(12) % 5)
    times = {}
    for pair in range(1, pairs + 1):
        times[f"{pair:02d}-baseline"] = (steady * np.exp(rng.normal(0, 0.005))).tolist()
        times[f"{pair:02d}-dcp"] = (0.8 * factor * steady * np.exp(rng.normal(0, 0.005))).tolist()
    made = spec(pairs, 12, 2)
    training = made.training.model_copy(update={"lr": lr})
    return run_folder(folder, times, made.model_copy(update={"training": training}))


def dcpbench(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize(
    ("factor", "verdict", "code"),
    [(1.0, "equivalent", 0), (1.1, "slower", 1), (0.9, "faster", 0)],
)
def test_what_became_of_dcp(tmp_path: Path, factor: float, verdict: str, code: int) -> None:
    found = compare(a_run(tmp_path / "a", pairs=10), a_run(tmp_path / "b", factor, pairs=10, seed=2))
    rows = {row.quantity: row for row in found.rows}
    assert set(rows) == {"baseline tokens/s", "dcp tokens/s", "speed-up of dcp"}
    assert rows["baseline tokens/s"].verdict == "equivalent"
    assert rows["dcp tokens/s"].verdict == verdict
    assert rows["dcp tokens/s"].ratio == pytest.approx(1 / factor, rel=0.01)
    assert rows["speed-up of dcp"].ratio == pytest.approx(1 / factor, rel=0.01)
    assert found.exit_code == code


def test_swapped_runs_give_the_reciprocal(tmp_path: Path) -> None:
    a, b = a_run(tmp_path / "a"), a_run(tmp_path / "b", 1.2, seed=2)
    for there, back in zip(compare(a, b).rows, compare(b, a).rows, strict=True):
        assert back.ratio == pytest.approx(1 / there.ratio)
        assert there.interval is not None
        assert back.interval is not None
        assert back.interval.low == pytest.approx(1 / there.interval.high)


def test_a_controlled_field_that_differs_is_refused_by_name(tmp_path: Path) -> None:
    a, b = a_run(tmp_path / "a"), a_run(tmp_path / "b", lr=1e-3)
    with pytest.raises(UsageError, match=r"differ in training\.lr.*--allow training\.lr"):
        compare(a, b)
    for allowed in ("training.lr", "training"):
        assert compare(a, b, allow=[allowed]).exit_code == ExitCode.PASSED


def test_different_batches_are_refused(tmp_path: Path) -> None:
    a, b = a_run(tmp_path / "a"), a_run(tmp_path / "b")
    for path in (b / "launches").rglob("records.jsonl"):
        path.write_text(path.read_text().replace('"batch_digest":"00', '"batch_digest":"ff'))
    with pytest.raises(UsageError, match="different batches"):
        compare(a, b)
    assert compare(a, b, allow=["data"]).exit_code == ExitCode.PASSED


def test_a_run_without_a_result(tmp_path: Path) -> None:
    broken = run_folder(
        tmp_path / "b", {"01-baseline": [1.0] * 6, "01-dcp": [1.0] * 6}, changes={"01-dcp": {2: {"loss": None}}}
    )
    sound = run_folder(tmp_path / "a", {"01-baseline": [1.0] * 6, "01-dcp": [1.0] * 6})
    with pytest.raises(RecordsError, match="has no result to compare"):
        compare(sound, broken)
    alone = compare(sound, sound, required=True)
    assert alone.exit_code == ExitCode.INCONCLUSIVE
    assert alone.rows[0].interval is None
    assert alone.notes == ("With a single pair of launches nothing is decided.",)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = a_run(tmp_path / "a"), a_run(tmp_path / "b", 1.3, seed=2)
    code, out, _ = dcpbench(capsys, "compare", a, b)
    assert code == 1
    assert out.startswith("FAILED: dcp of b is 0.7")
    code, out, _ = dcpbench(capsys, "compare", a, b, "--json")
    assert code == 1
    document = json.loads(out)
    assert (document["outcome"], document["exit_code"]) == ("failed", 1)
    assert document["rows"][1]["verdict"] == "slower"


def test_a_regression_gate_for_continuous_integration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, slower = a_run(tmp_path / "old"), a_run(tmp_path / "slower", 1.3, seed=2)
    same = a_run(tmp_path / "same", 1.0, seed=3)
    plain = dcpbench(capsys, "compare", old, slower)
    assert dcpbench(capsys, "compare", slower, "--baseline-run", old) == plain
    assert plain[0] == 1
    assert dcpbench(capsys, "compare", same, "--baseline-run", old)[0] == 0
    code, out, _ = dcpbench(capsys, "compare", slower, "--baseline-run", old, "--format", "junit")
    suite = ElementTree.fromstring(out).find("testsuite")
    assert code == 1
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    assert suite.find("testcase/failure") is not None
    code, out, _ = dcpbench(capsys, "compare", same, "--baseline-run", old, "--format", "junit")
    assert 'failures="0"' in out
    code, out, _ = dcpbench(capsys, "compare", slower, "--baseline-run", old, "--format", "github")
    assert (code, out.startswith("::error title=dcpbench compare::FAILED")) == (1, True)
    code, out, _ = dcpbench(capsys, "compare", slower, "--baseline-run", old, "--format", "summary")
    assert "| dcp tokens/s |" in out
    assert "**FAILED: dcp of slower is 0.7" in out
    for arguments in (("compare", old), ("compare", old, slower, "--baseline-run", same)):
        code, _, err = dcpbench(capsys, *arguments)
        assert code == ExitCode.USAGE
        assert "--baseline-run" in err


@pytest.mark.parametrize(
    ("format", "start"), [("markdown", "# example"), ("html", "<!doctype"), ("csv", "case,metric"), ("json", "{")]
)
def test_every_file_of_a_report_can_be_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str, start: str
) -> None:
    code, out, _ = dcpbench(capsys, "report", a_run(tmp_path / "a"), "--format", format)
    assert (code, out.startswith(start)) == (0, True)


def test_the_list_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = a_run(tmp_path / "later")
    report.write(analyze_run(done), done / "analysis")
    a_run(tmp_path / "raw")
    (tmp_path / "other").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "spec.yaml").write_text("a: [")
    found = {Path(run.path).name: run for run in runs(tmp_path)}
    assert set(found) == {"later", "raw", "torn"}
    assert found["later"].speedup == pytest.approx(1.25, rel=0.01)
    assert (found["later"].speed, found["later"].verdict, found["later"].pairs) == ("faster", "passed", 4)
    assert found["raw"].verdict is None
    assert found["torn"].spec == "unreadable spec or ledger"
    code, out, _ = dcpbench(capsys, "list", tmp_path)
    assert code == 0
    for words in ("example", "faster", "not analysed"):
        assert words in out
    code, out, _ = dcpbench(capsys, "list", tmp_path, "--json")
    assert len(json.loads(out)["runs"]) == 3
    with pytest.raises(LogError, match="is no folder"):
        runs(tmp_path / "none")
    assert dcpbench(capsys, "list", tmp_path / "other")[:2] == (0, f"{tmp_path / 'other'} holds no run folder\n")


def test_another_interval_is_asked_for_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ten = a_run(tmp_path / "ten", pairs=10)
    code, plain, _ = dcpbench(capsys, "analyze", ten, "--analyze-only", "--json")
    assert code == 0
    code, other, _ = dcpbench(capsys, "analyze", ten, "--analyze-only", "--interval", "hierarchical", "--json")
    assert code == 0
    found = [json.loads(text)["speedup"] for text in (plain, other)]
    assert [one["interval_by"] for one in found] == ["t", "hierarchical"]
    assert found[0]["interval"] != found[1]["interval"]
    assert found[0]["total"] == found[1]["total"]
    code, _, err = dcpbench(capsys, "analyze", a_run(tmp_path / "four"), "--analyze-only", "--interval", "hierarchical")
    assert (code, "needs 10 pairs of launches, there are 4" in err) == (2, True)
    code, _, err = dcpbench(capsys, "run", "quick_4xcpu", "--dry-run", "--interval", "hierarchical")
    assert (code, "launches.pairs of at least 10; it is 2" in err) == (2, True)
