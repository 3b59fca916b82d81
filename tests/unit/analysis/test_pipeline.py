import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from log_lines import megatron, megatron_log, run_folder, spec, write
from rich.console import Console

from dcpbench import redact, report
from dcpbench.analysis.pipeline import Analysis, analyze_logs, analyze_run
from dcpbench.errors import ExitCode, LogError, UsageError
from dcpbench.faults import Fault
from dcpbench.report import FILES, console
from dcpbench.report.statistics_json import nulls
from dcpbench.spec import Tolerances
from dcpbench.verdict import judge

ONE_PAIR = {"01-baseline": [9.0, 1.0, 2.0, 1.0, 1.0, 1.0], "01-dcp": [8.0, 0.5, 1.0, 0.5, 0.5, 0.5]}
CONTRACT = {
    "cases": {"iterations", "mean_ms", "median_ms", "trimmed_mean_ms", "samples_per_second", "tokens_per_second",
              "tflops_per_gpu"},
    "speedup": {"total", "mean", "median", "trimmed_mean"},
    "parity": {"passed", "max_abs_diff", "mean_abs_diff", "first_iteration_diff"},
    "faults": {"case", "launch", "iteration", "kind", "message"},
}  # fmt: skip


def strict(text: bytes | str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def statistics(analysis: Analysis) -> Any:
    content = FILES["statistics.json"](analysis)
    assert content is not None
    return strict(content)


def test_a_run_from_its_stored_files(tmp_path: Path) -> None:
    analysis = analyze_run(run_folder(tmp_path, ONE_PAIR))
    assert analysis.verdict.exit_code == ExitCode.PASSED
    assert (analysis.iterations, analysis.warmup, analysis.pairs) == (6, 1, 1)
    assert analysis.speedup is not None
    assert analysis.speedup.total == pytest.approx(2.0)
    base, dcp = (analysis.cases[case].statistics for case in ("baseline", "dcp"))
    assert base is not None
    assert dcp is not None
    assert (base.iterations, base.mean_ms, base.median_ms) == (5, 1200.0, 1000.0)
    assert base.tokens_per_second == pytest.approx(5000 / 6)
    assert dcp.samples_per_second == pytest.approx(40 / 3)
    # (1e9 * 5000 + 1e3 * 5 * 200000) / (3 s * 4 ranks * 1e12)
    assert dcp.tflops_per_gpu == pytest.approx((5e12 + 1e9) / 12e12)
    assert analysis.parity is not None
    assert analysis.parity.max_abs_diff == 0.0
    assert "batch digest" in analysis.aligned_on
    assert [launch.position for launch in analysis.launches] == [1, 2]
    profile = analysis.cases["dcp"].profile
    assert profile is not None
    assert profile.cp_sizes == {1: 10, 4: 5}
    assert profile.padding_share == pytest.approx(50 / 1050)


def test_console_logs_alone_give_the_same_result(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, ONE_PAIR)
    exact = statistics(analyze_run(folder))
    logs = [folder / "launches" / name / "stdout.log" for name in ONE_PAIR]
    rough = statistics(analyze_logs(logs[:1], logs[1:]))
    for case in ("baseline", "dcp"):
        for key in CONTRACT["cases"]:
            assert rough["cases"][case][key] == pytest.approx(exact["cases"][case][key], rel=1e-6)
    assert rough["verdict"] == "passed"
    assert rough["warmup_iterations"] == 1


def test_a_launch_without_records_file_is_read_from_its_console_log(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, ONE_PAIR)
    (folder / "launches" / "01-dcp" / "records.jsonl").unlink()
    analysis = analyze_run(folder)
    assert analysis.verdict.exit_code == ExitCode.PASSED
    assert [launch.format for launch in analysis.launches] == ["jsonl", "native"]
    assert any("01-dcp was read from its console log" in caution for caution in analysis.cautions)


def test_a_moved_run_folder_is_read_where_it_is(tmp_path: Path) -> None:
    run_folder(tmp_path / "old", ONE_PAIR)
    shutil.move(tmp_path / "old", tmp_path / "new")
    assert analyze_run(tmp_path / "new").verdict.exit_code == ExitCode.PASSED


def test_statistics_json_keeps_its_contract(tmp_path: Path) -> None:
    passed = statistics(analyze_run(run_folder(tmp_path / "a", ONE_PAIR)))
    broken = statistics(analyze_run(run_folder(tmp_path / "b", ONE_PAIR, changes={"01-dcp": {4: {"loss": None}}})))
    for result in (passed, broken):
        assert result["schema_version"] == 1
        for case in ("baseline", "dcp"):
            assert set(result["cases"][case]) >= CONTRACT["cases"]
        assert set(result["speedup"]) >= CONTRACT["speedup"]
        assert set(result["parity"]) >= CONTRACT["parity"]
        assert all(set(fault) == CONTRACT["faults"] for fault in result["faults"])
        absent = {path for path in nulls(result) if not path.startswith("faults.")}
        assert absent == set(result["reasons"])
        assert all(result["reasons"].values())
    assert passed["faults"] == []
    assert passed["parity"]["passed"] is True
    assert (broken["verdict"], broken["exit_code"]) == ("failed", 5)
    assert broken["speedup"]["total"] is None
    assert "see faults" in broken["reasons"]["speedup.total"]
    assert broken["faults"] == [
        {"case": "dcp", "launch": "01-dcp", "iteration": 4, "kind": "non_finite", "message": "loss missing"}
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a58_nan_written_as_json(tmp_path: Path, value: float) -> None:
    folder = run_folder(tmp_path, ONE_PAIR, changes={"01-dcp": {3: {"loss": value, "grad_norm": value}}})
    analysis = analyze_run(folder)
    report.write(analysis, folder / "analysis")
    for file in folder.rglob("*.json*"):
        for line in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            strict(line)
    assert analysis.verdict.exit_code == ExitCode.RECORDS
    assert f"loss is {value}; grad_norm is {value}" in [fault.message for fault in analysis.faults]


def test_a58_one_measured_step(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, {"01-baseline": [9.0, 2.0], "01-dcp": [8.0, 1.0]}, spec(1, 2, 1))
    result = statistics(analyze_run(folder))
    assert result["cases"]["dcp"]["trimmed_mean_ms"] == 1000.0
    assert result["parity"]["step_correlation"] is None
    assert result["reasons"]["parity.step_correlation"]
    assert result["speedup"]["total"] == pytest.approx(2.0)


def test_a53_order_effect_over_both_orders_and_a_caution_for_one(tmp_path: Path) -> None:
    slow, fast = [1.05] * 6, [1.0] * 6
    balanced = {"01-baseline": fast, "01-dcp": slow, "02-baseline": slow, "02-dcp": fast}
    analysis = analyze_run(run_folder(tmp_path / "two", balanced))
    assert analysis.speedup is not None
    assert analysis.speedup.total == pytest.approx(1.0)
    assert analysis.order_effect == pytest.approx(1.05)
    assert [(launch.id, launch.position) for launch in analysis.launches] == [
        ("01-baseline", 1), ("01-dcp", 2), ("02-baseline", 4), ("02-dcp", 3),
    ]  # fmt: skip
    assert not any("coming second" in caution for caution in analysis.cautions)
    one = analyze_run(run_folder(tmp_path / "one", {"01-baseline": fast, "01-dcp": slow}))
    assert one.order_effect is None
    assert any("an effect of coming second cannot be told from a speed-up" in caution for caution in one.cautions)
    assert any("indicative only" in caution for caution in one.cautions)


def test_the_ledger_tells_the_order_that_really_happened(tmp_path: Path) -> None:
    """A resumed run may have made its first launch again after the second."""
    from dcpbench.runfolder import ledger

    folder = run_folder(tmp_path, ONE_PAIR)
    ledger.append(folder / "ledger.jsonl", "start", "01-baseline")
    ledger.append(folder / "ledger.jsonl", "end", "01-baseline", status="completed", exit_code=0)
    assert [launch.position for launch in analyze_run(folder).launches] == [2, 1]


def test_a54_first_iterations_counted(tmp_path: Path) -> None:
    times = [50.0, 1.4, *[1.0] * 6]
    settled = analyze_run(run_folder(tmp_path / "a", {"01-baseline": times, "01-dcp": times}, spec(1, 8, 2)))
    assert settled.cases["dcp"].statistics is not None
    assert settled.cases["dcp"].statistics.mean_ms == 1000.0
    assert not any("settling" in caution for caution in settled.cautions)
    report = (FILES["report.md"](settled) or b"").decode()
    assert "iterations 1 to 2 were left out as warm-up" in report
    early = analyze_run(run_folder(tmp_path / "b", {"01-baseline": times, "01-dcp": times}, spec(1, 8, 1)))
    assert early.cases["dcp"].statistics is not None
    assert early.cases["dcp"].statistics.mean_ms == pytest.approx(1057.14, abs=0.01)
    assert any("01-dcp was still settling" in caution and "warm-up of 2" in caution for caution in early.cautions)


def test_a48_warm_up_of_one_on_a_megatron_log(tmp_path: Path) -> None:
    logs = [megatron_log(tmp_path / f"{n}.log", [8000.0, 1200.0, 1200.0, 1200.0, 1200.0, 1200.0]) for n in range(2)]
    analysis = analyze_logs(logs[:1], logs[1:], warmup=1)
    for case in analysis.cases.values():
        assert case.statistics is not None
        assert case.statistics.mean_ms == 1200.0
        assert case.consumed_samples == 192


def test_a57_nothing_left_to_measure(tmp_path: Path) -> None:
    logs = [megatron_log(tmp_path / f"{n}.log", [1000.0] * 6) for n in range(2)]
    for warmup in (6, 7, None):
        with pytest.raises(UsageError, match="leaves nothing to measure of 6 iterations"):
            analyze_logs(logs[:1], logs[1:], warmup=warmup)


def test_a42_a_failed_launch_gives_no_speedup(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path,
        {"01-baseline": ONE_PAIR["01-baseline"][:3], "01-dcp": ONE_PAIR["01-dcp"]},
        spec(1),
        statuses={"01-baseline": ("failed", 7, "failed after iteration 3 of 6: rank 2 raised ValueError")},
    )
    analysis = analyze_run(folder)
    assert analysis.verdict.exit_code == ExitCode.LAUNCH_FAILED
    assert analysis.speedup is None
    (fault,) = analysis.faults
    assert (fault.launch, fault.kind) == ("01-baseline", "launch_failed")
    assert fault.message == "failed after iteration 3 of 6: rank 2 raised ValueError (exit code 7)"
    assert "times as fast" not in (FILES["report.md"](analysis) or b"").decode()


def test_a43_a_launch_that_exits_0_too_early_is_incomplete(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path,
        {"01-baseline": ONE_PAIR["01-baseline"], "01-dcp": ONE_PAIR["01-dcp"][:4]},
        spec(1),
        statuses={"01-dcp": ("failed", 0, "is incomplete")},
    )
    analysis = analyze_run(folder)
    assert analysis.verdict.exit_code == ExitCode.RECORDS
    assert [fault.iteration for fault in analysis.faults if fault.kind == "missing"] == [None, 5, 6]


def test_a_launch_that_never_started(tmp_path: Path) -> None:
    analysis = analyze_run(run_folder(tmp_path, {"01-baseline": [1.0] * 6}, spec(1)))
    assert analysis.verdict.exit_code == ExitCode.LAUNCH_FAILED
    assert analysis.verdict.reasons == ("01-dcp was not launched",)


def test_a_launch_whose_end_nobody_saw(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, ONE_PAIR)
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    (folder / "ledger.jsonl").write_text("\n".join(lines[:-1]) + '\n{"time": "torn')
    assert analyze_run(folder).verdict.reasons == ("01-dcp was started, and nothing recorded its end",)


def test_parity_gate(tmp_path: Path) -> None:
    changes: dict[str, dict[int, dict[str, Any]]] = {"01-dcp": {5: {"loss": 1.5}}}
    folder = run_folder(tmp_path, ONE_PAIR, changes=changes)
    strictly = analyze_run(folder)
    assert strictly.verdict.exit_code == ExitCode.GATE_FAILED
    assert strictly.parity is not None
    assert strictly.parity.worst.iteration == 5
    loosely = analyze_run(folder, tolerances=Tolerances(check_loss_parity=False))
    assert loosely.verdict.exit_code == ExitCode.PASSED
    assert loosely.parity is not None
    assert not loosely.parity.passed
    assert any("told not to" in caution for caution in loosely.cautions)
    assert analyze_run(folder, tolerances=Tolerances(loss_atol=1.0)).verdict.exit_code == ExitCode.PASSED


def test_settings_that_differ_are_a_caution(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, ONE_PAIR)
    records = folder / "launches" / "01-dcp" / "records.jsonl"
    records.write_text(records.read_text().replace('"attention":"reference"', '"attention":"ring"'))
    assert any(
        "differ in attention (reference in 01-baseline, ring in 01-dcp)" in caution
        for caution in analyze_run(folder).cautions
    )


def test_logs_given_for_the_wrong_case_are_a_caution(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, ONE_PAIR)
    logs = [folder / "launches" / name / "stdout.log" for name in ONE_PAIR]
    analysis = analyze_logs(logs[1:], logs[:1])
    assert any("taken as baseline, says that it is a launch of dcp" in caution for caution in analysis.cautions)


def test_different_numbers_of_logs(tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", [megatron(1)])
    for baseline, dcp in (([log], []), ([], []), ([log], [log, log])):
        with pytest.raises(UsageError, match="for each pair"):
            analyze_logs(baseline, dcp)


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(LogError):
        analyze_run(tmp_path)
    with pytest.raises(LogError):
        analyze_run(tmp_path / "missing")


def test_rebuilt_with_the_same_bytes(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, ONE_PAIR)
    paths = report.write(analyze_run(folder), folder / "analysis")
    assert {path.name for path in paths} == set(FILES)
    first = {path: path.read_bytes() for path in paths}
    shutil.rmtree(folder / "analysis")
    report.write(analyze_run(folder), folder / "analysis")
    assert {path: path.read_bytes() for path in (folder / "analysis").iterdir()} == first


def test_a_failing_analysis_leaves_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "good", ONE_PAIR)
    report.write(analyze_run(folder), folder / "analysis")
    broken = run_folder(tmp_path / "bad", ONE_PAIR, changes={"01-dcp": {2: {"loss": None}}})
    report.write(analyze_run(broken), folder / "analysis")
    left = {path.name for path in (folder / "analysis").iterdir()}
    assert left == {"statistics.json", "report.md", "report.html", "summary.csv"}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    analysis = analyze_run(run_folder(tmp_path / "run", ONE_PAIR))
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match="cannot be written"):
        report.write(analysis, tmp_path / "file")


def test_aligned_parquet_holds_every_iteration(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, ONE_PAIR, changes={name: {3: {"grad_norm": None}} for name in ONE_PAIR})
    report.write(analyze_run(folder), folder / "analysis")
    table = pq.read_table(folder / "analysis" / "aligned.parquet")
    assert table.num_rows == 12
    assert table["launch"].to_pylist() == ["01-baseline"] * 6 + ["01-dcp"] * 6
    assert table["iteration"].to_pylist() == [1, 2, 3, 4, 5, 6] * 2
    assert table["warmup"].to_pylist() == [True, False, False, False, False, False] * 2
    assert table["seconds"].to_pylist() == ONE_PAIR["01-baseline"] + ONE_PAIR["01-dcp"]
    assert table["batch_digest"].to_pylist()[5] == f"{6:016x}"
    assert table["cp_sizes"].to_pylist()[0] == "1x2,4x1"
    assert table["grad_norm"].to_pylist()[2] is None


def test_no_secret_gets_into_any_report(tmp_path: Path) -> None:
    secret = "hf_" + "a1B2" * 9
    words = f"failed: https://bot:{secret}@host/x HF_TOKEN={secret} in {Path.home()}/private"
    analysis = analyze_run(run_folder(tmp_path, ONE_PAIR))
    fault = Fault("dcp", "01-dcp", None, "launch_failed", words)
    leaky = replace(
        analysis,
        name=f"run-{secret}",
        cautions=(words,),
        faults=(fault,),
        verdict=judge((fault,), None, True),
        launches=tuple(replace(launch, source=f"{secret}.log", failure=words) for launch in analysis.launches),
    )
    target = Console(file=io.StringIO(), width=500)
    target.print(console.render(leaky))
    assert isinstance(target.file, io.StringIO)
    readable = [name for name in FILES if not name.endswith((".parquet", ".png"))]
    texts = [target.file.getvalue(), *((FILES[name](leaky) or b"").decode() for name in readable)]
    assert len(texts) == 5
    for text in texts:
        assert secret not in text
        assert not redact.scan(text)


def test_redaction_leaves_the_words_of_a_result_alone(tmp_path: Path) -> None:
    """Names such as tokens_per_second look like secrets to a careless rule."""
    from dcpbench.report import statistics_json

    analysis = analyze_run(run_folder(tmp_path, ONE_PAIR))
    assert statistics(analysis) == statistics_json.document(analysis)
    assert b"[redacted]" not in (FILES["report.md"](analysis) or b"") + (FILES["summary.csv"](analysis) or b"")
