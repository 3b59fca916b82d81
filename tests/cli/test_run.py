"""`dcpbench run` and what follows it, with the real worker on two gloo ranks; one run serves many tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dcpbench import cli, report
from dcpbench.runfolder import ledger

SPEC = {
    "name": "tiny",
    "model": {"layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "attention_heads": 2, "vocab_size": 64},
    "topology": {"device": "cpu", "gpus_per_node": 2, "cp": 2},
    "training": {"iterations": 4, "warmup_iterations": 1, "global_batch_size": 4, "dtype": "float32"},
    "data": {"kind": "list", "lengths": [40, 9, 100, 17], "tokens": "zipf"},
    "cases": {"max_seqlen_per_dp_cp_rank": 64},
    "launches": {"pairs": 1, "timeout": 120, "grace": 5},
    "tolerances": {"loss_atol": 0, "loss_rtol": 1e-5},
}


def a_spec(folder: Path, **changes: dict[str, object]) -> Path:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({name: {**part, **changes.get(name, {})} if isinstance(part, dict) else part
                                    for name, part in SPEC.items()}))  # fmt: skip
    return path


def command(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with nothing of this one's settings."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "VIRTUAL_ENV", "LANG") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "dcpbench", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**kept, **environ},
        check=False,
    )


def dcpbench(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANALYZE_ONLY", "LOSS_ATOL", "LOSS_RTOL", "CHECK_LOSS_PARITY", "WARMUP_ITERS", "TRAIN_ITERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished run and what its command said; a secret was in its environment."""
    folder = tmp_path_factory.mktemp("finished")
    done = command("run", a_spec(folder), "--out", folder / "run", HF_TOKEN="hf_" + "Pk8" * 12)
    assert done.returncode == 0, done.stderr
    return folder / "run", done


@pytest.fixture
def run_copy(finished: tuple[Path, object], tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def test_run_passes_with_results_on_stdout_and_progress_on_stderr(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = finished
    assert "speed-up" in done.stdout
    assert "iteration 4/4" not in done.stdout
    for case in ("baseline", "dcp"):
        assert f"pair 1/1 {case}: iteration 4/4" in done.stderr
        assert f"pair 1/1 {case}: completed" in done.stderr
    assert "error" not in done.stderr


def test_run_folder_holds_what_the_product_promises(finished: tuple[Path, object]) -> None:
    folder, _ = finished
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    expected = {"spec.yaml", "plan.json", "ledger.jsonl", "manifest.json"}
    expected |= {f"analysis/{name}" for name in report.FILES}
    for launch in ("01-baseline", "01-dcp"):
        expected |= {f"launches/{launch}/{name}" for name in ("launch.json", "stdout.log", "records.jsonl")}
    assert expected <= names
    assert [(entry.event, entry.launch, entry.status) for entry in ledger.read(folder / "ledger.jsonl")] == [
        ("start", "01-baseline", None),
        ("end", "01-baseline", "completed"),
        ("start", "01-dcp", None),
        ("end", "01-dcp", "completed"),
    ]


def test_a60_secret_of_the_environment_is_nowhere_in_the_run_folder(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = finished
    planted = "hf_" + "Pk8" * 12
    assert planted not in done.stdout + done.stderr
    for path in folder.rglob("*"):
        assert not path.is_file() or planted.encode() not in path.read_bytes(), path


def test_a37_a38_data_are_ready_and_groups_warm_before_the_first_iteration(finished: tuple[Path, object]) -> None:
    """The data's folder is older than the first launch, and every CP size was used before iteration 1."""
    folder, _ = finished
    first = ledger.read(folder / "ledger.jsonl")[0]
    assert first.event == "start"
    assert (folder / "data" / "data.json").stat().st_mtime <= (folder / "ledger.jsonl").stat().st_mtime
    header = json.loads((folder / "launches" / "01-dcp" / "records.jsonl").read_text().splitlines()[0])
    assert header["kind"] == "header"
    assert set(header["cp_sizes"]) == {1, 2}


def test_resume_of_a_complete_run_launches_nothing(run_copy: Path) -> None:
    before = (run_copy / "ledger.jsonl").read_bytes()
    done = command("run", run_copy / "spec.yaml", "--out", run_copy, "--resume")
    assert done.returncode == 0, done.stderr
    assert "01-baseline is complete already" in done.stderr
    assert (run_copy / "ledger.jsonl").read_bytes() == before


def test_a49_second_run_into_the_same_folder_is_refused(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = dcpbench(capsys, "run", run_copy / "spec.yaml", "--out", run_copy)
    assert code == 2
    assert "--resume" in err


def test_analyze_only_rebuilds_the_analysis_and_leaves_the_manifest(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = (run_copy / "manifest.json").read_bytes()
    statistics = (run_copy / "analysis" / "statistics.json").read_bytes()
    shutil.rmtree(run_copy / "analysis")
    code, out, err = dcpbench(capsys, "analyze", run_copy, "--analyze-only")
    assert (code, err) == (0, "")
    assert "speed-up" in out
    assert (run_copy / "analysis" / "statistics.json").read_bytes() == statistics
    assert (run_copy / "manifest.json").read_bytes() == manifest


def test_analyze_only_through_the_environment(
    run_copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = (run_copy / "manifest.json").read_bytes()
    monkeypatch.setenv("ANALYZE_ONLY", "1")
    assert dcpbench(capsys, "analyze", run_copy)[0] == 0
    before = (run_copy / "ledger.jsonl").read_bytes()
    assert dcpbench(capsys, "run", run_copy / "spec.yaml", "--out", run_copy)[0] == 0
    assert (run_copy / "ledger.jsonl").read_bytes() == before
    assert (run_copy / "manifest.json").read_bytes() == manifest


def test_analyze_refreshes_the_manifest_results(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((run_copy / "manifest.json").read_text())
    assert dcpbench(capsys, "analyze", run_copy)[0] == 0
    after = json.loads((run_copy / "manifest.json").read_text())
    assert after["refreshed"] is not None
    assert after["launches"] == before["launches"]
    assert after["results"] == before["results"]


def test_json_prints_the_statistics(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = dcpbench(capsys, "analyze", run_copy, "--json")
    assert code == 0
    assert json.loads(out) == json.loads((run_copy / "analysis" / "statistics.json").read_text())


def test_report_renders_the_files_again(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = (run_copy / "analysis" / "report.md").read_bytes()
    (run_copy / "analysis" / "report.md").unlink()
    code, out, err = dcpbench(capsys, "report", run_copy)
    assert code == 0
    assert "speed-up" in out
    assert "report.md" in err
    assert (run_copy / "analysis" / "report.md").read_bytes() == report


def test_manifest_and_its_check(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = dcpbench(capsys, "manifest", run_copy)
    assert code == 0
    assert [launch["id"] for launch in json.loads(out)["launches"]] == ["01-baseline", "01-dcp"]
    assert dcpbench(capsys, "manifest", run_copy, "--check")[0] == 0
    with (run_copy / "launches" / "01-dcp" / "stdout.log").open("a") as log:
        log.write("changed\n")
    code, out, _ = dcpbench(capsys, "manifest", run_copy, "--check")
    assert code == 1
    assert "launches/01-dcp/stdout.log" in out


def edit_records(folder: Path, launch: str, iteration: int, **values: object) -> None:
    path = folder / "launches" / launch / "records.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [{**line, **values} if line.get("iteration") == iteration else line for line in lines]
    kept = [line for line in changed if line.get("remove") is None]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))


def test_exit_1_when_loss_parity_fails(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_records(run_copy, "01-dcp", 3, loss=99.0)
    code, out, _ = dcpbench(capsys, "analyze", run_copy, "--analyze-only")
    assert code == 1
    assert "parity" in out
    assert dcpbench(capsys, "analyze", run_copy, "--analyze-only", "--no-check-loss-parity")[0] == 0
    assert dcpbench(capsys, "analyze", run_copy, "--analyze-only", "--loss-atol", "1000")[0] == 0


def test_exit_5_lists_every_fault_whatever_the_tolerance(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_records(run_copy, "01-baseline", 2, remove=True)
    edit_records(run_copy, "01-dcp", 4, loss=None, problems=["loss is nan"])
    code, out, _ = dcpbench(capsys, "analyze", run_copy, "--analyze-only", "--loss-atol", "1000", "--json")
    assert code == 5
    faults = {(fault["launch"], fault["iteration"], fault["kind"]) for fault in json.loads(out)["faults"]}
    assert {("01-baseline", 2, "missing"), ("01-dcp", 4, "non_finite")} <= faults


def test_console_logs_from_anywhere(
    finished: tuple[Path, object], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = []
    for case in ("baseline", "dcp"):
        logs.append(tmp_path / f"{case}.txt")
        shutil.copy(finished[0] / "launches" / f"01-{case}" / "stdout.log", logs[-1])
    arguments = ("analyze", "--baseline-log", logs[0], "--dcp-log", logs[1])
    code, out, _ = dcpbench(capsys, *arguments, "--out", tmp_path / "out", "--json")
    assert code == 0
    assert json.loads(out)["warmup_iterations"] == 1
    assert (tmp_path / "out" / "statistics.json").is_file()
    monkeypatch.setenv("WARMUP_ITERS", "2")
    assert json.loads(dcpbench(capsys, *arguments, "--json")[1])["warmup_iterations"] == 2
    assert json.loads(dcpbench(capsys, *arguments, "--json", "--warmup", "3")[1])["warmup_iterations"] == 3
    monkeypatch.setenv("TRAIN_ITERS", "5")
    code, out, _ = dcpbench(capsys, *arguments, "--json")
    assert code == 5
    assert {fault["iteration"] for fault in json.loads(out)["faults"] if fault["kind"] == "missing"} == {5}


def test_a42_failed_launch_exits_4_and_keep_going_reports_both_states(tmp_path: Path) -> None:
    """Each worker is given a checkpoint folder that only looks like one."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / ".metadata").write_bytes(b"not a checkpoint")
    spec = a_spec(tmp_path, training={"load_path": str(checkpoint)})
    done = command("run", spec, "--out", tmp_path / "run", "--keep-going")
    assert done.returncode == 4, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("dcpbench: error: 01-baseline failed after iteration 0 of 4: rank ")
    assert "stdout.log:" in last
    assert "01-dcp failed" in last
    assert "Traceback" not in done.stderr
    assert "speed-up" not in done.stdout
    statistics = json.loads((tmp_path / "run" / "analysis" / "statistics.json").read_text())
    assert [fault["kind"] for fault in statistics["faults"]] == ["launch_failed", "launch_failed"]


def test_timeout_exits_124_and_the_second_case_is_not_launched(tmp_path: Path) -> None:
    done = command("run", a_spec(tmp_path), "--out", tmp_path / "run", "--timeout", "1")
    assert done.returncode == 124, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "01-baseline ran longer than the limit of 1 s" in last
    assert "not launched: 01-dcp" in last
    assert [folder.name for folder in (tmp_path / "run" / "launches").iterdir()] == ["01-baseline"]
    assert "speed-up" not in done.stdout


def test_closed_pipe_is_no_error(run_copy: Path) -> None:
    words = f"{sys.executable} -m dcpbench manifest {run_copy} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout == "{\n0\n"
    assert done.stderr == ""
