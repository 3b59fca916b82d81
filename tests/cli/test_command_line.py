"""Options, help, errors: everything the command line answers without launching anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dcpbench import cli, commands

LIST = {"kind": "list", "lengths": [32, 64]}
RANKS = {"device": "cpu", "gpus_per_node": 2, "cp": 2}


def dcpbench(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command run in this process."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def a_spec(folder: Path, **changes: object) -> Path:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({"name": "small", "topology": RANKS, "data": LIST, **changes}))
    return path


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DCPBENCH_DEBUG", "OUTPUT_DIR", "ANALYZE_ONLY", "TRAIN_ITERS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def test_help_lists_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = dcpbench(capsys, "--help")
    assert (code, err) == (0, "")
    for number in (0, 1, 2, 3, 4, 5, 6, 124, 130):
        assert any(line.split()[:1] == [str(number)] for line in out.splitlines())
    for command in ("run", "analyze", "manifest", "check", "report"):
        assert any(line.split()[:1] == [command] for line in out.splitlines())


@pytest.mark.parametrize("command", ["run", "analyze", "manifest", "check", "report"])
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = dcpbench(capsys, command, "--help")
    assert code == 0
    assert "--debug" in out


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, dcpbench.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'scipy', 'numpy', 'pydantic', 'rich', 'yaml'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "heavy: []\n"


def test_dry_run_loads_neither_torch_nor_pandas_nor_scipy(tmp_path: Path) -> None:
    code = (
        "import sys, dcpbench.cli as cli\n"
        f"try: cli.main(['run', {str(a_spec(tmp_path))!r}, '--dry-run'])\n"
        "except SystemExit as stop: print('code', stop.code, file=sys.stderr)\n"
        "heavy = {'torch', 'transformer_engine', 'pandas', 'scipy'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "code 0\nheavy: []\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert dcpbench(capsys, "--version") == (0, "dcpbench 0.1.0\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dcpbench"],
        env={"_DCPBENCH_COMPLETE": f"source_{shell}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "dcpbench" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run",), "Missing argument 'SPEC'"),
        (("run", "x.yaml", "--pears", "2"), "--pairs"),
        (("run", "x.yaml", "--pairs", "two"), "--pairs"),
        (("run", "x.yaml", "--order", "random"), "--order"),
        (("analyse",), "analyse"),
        (("analyze",), "--baseline-log"),
        (("analyze", "--baseline-log", "/nowhere"), "1 baseline and 0 dcp"),
        (("analyze", "/nowhere", "--dcp-log", "a"), "not both"),
        (("analyze", "/nowhere"), "/nowhere"),
        (("report", "/nowhere"), "/nowhere"),
        (("manifest", "/nowhere"), "/nowhere"),
        (("run", "/nowhere/spec.yaml"), "/nowhere/spec.yaml"),
        (("check", "--set", "a.b=1"), "name the spec"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = dcpbench(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("dcpbench: error: ")
    assert len(err.splitlines()) == 1
    assert said in err


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = dcpbench(capsys)
    assert code == 2
    assert "Exit codes" in out + err


@pytest.mark.parametrize("form", [("--hf-token", "TOKEN"), ("--hf-token=TOKEN",)])
def test_a60_secret_on_the_command_line_is_not_repeated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, form: tuple[str, ...]
) -> None:
    planted = "hf_" + "Wx9" * 12
    arguments = [word.replace("TOKEN", planted) for word in form]
    code, out, err = dcpbench(capsys, "run", a_spec(tmp_path), *arguments)
    assert code == 2
    assert planted not in out + err
    assert "--hf-token" in err


def test_a60_secret_in_an_override_is_not_repeated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    planted = "very-private-value"
    code, out, err = dcpbench(capsys, "run", a_spec(tmp_path), "--set", f"data.hf_token={planted}", "--debug")
    assert code == 2
    assert planted not in out + err.replace("Traceback", "")


def test_unknown_key_names_the_nearest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = dcpbench(capsys, "run", a_spec(tmp_path), "--set", "training.iteration=5")
    assert code == 2
    assert "training.iterations" in err


def test_traceback_only_with_debug(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in dcpbench(capsys, "report", "/nowhere")[2]
    assert "Traceback" in dcpbench(capsys, "report", "/nowhere", "--debug")[2]
    monkeypatch.setenv("DCPBENCH_DEBUG", "1")
    assert "Traceback" in dcpbench(capsys, "report", "/nowhere")[2]


def test_internal_error_is_no_gate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> int:
        raise KeyError("bug")

    monkeypatch.setattr(commands, "show_report", broken)
    code, _, err = dcpbench(capsys, "report", "x")
    assert code == 70
    assert err == "dcpbench: error: internal error: KeyError: 'bug'; --debug shows where\n"


def test_disk_errors_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> int:
        raise OSError(28, "No space left on device", "/data/run")

    monkeypatch.setattr(commands, "show_report", full)
    code, _, err = dcpbench(capsys, "report", "x")
    assert (code, err) == (2, "dcpbench: error: /data/run: No space left on device\n")


def test_dry_run_prints_every_launch_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", "planted-secret-value")
    spec = a_spec(tmp_path)
    code, out, err = dcpbench(capsys, "run", spec, "--dry-run", "--pairs", "2", "--order", "dcp_first")
    assert (code, err) == (0, "")
    heads = [line for line in out.splitlines() if line[0].isdigit()]
    assert heads[:-1] == [
        "1. 01-dcp (pair 1, dcp)",
        "2. 01-baseline (pair 1, baseline)",
        "3. 02-dcp (pair 2, dcp)",
        "4. 02-baseline (pair 2, baseline)",
    ]
    assert "torch.distributed.run" in out
    assert "OMP_NUM_THREADS" in out
    assert "MY_TOKEN" not in out
    assert "unknown" in out
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]


def test_dry_run_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = dcpbench(capsys, "run", a_spec(tmp_path), "--dry-run", "--json", "--timeout", "77", "--pairs", "1")
    launches = json.loads(out)["launches"]
    assert code == 0
    assert [launch["id"] for launch in launches] == ["01-baseline", "01-dcp"]
    assert all(launch["limit_seconds"] == 77 and launch["estimated_seconds"] is None for launch in launches)
    assert launches[0]["argv"][-1].endswith("/launches/01-baseline/launch.json")


@pytest.mark.parametrize(("options", "launches"), [((), 12), (("--quick",), 4), (("--rigorous",), 20)])
def test_how_many_pairs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...], launches: int
) -> None:
    code, out, _ = dcpbench(capsys, "run", a_spec(tmp_path), "--dry-run", *options)
    assert code == 0
    assert f"{launches} launches; none was made" in out
    code, _, err = dcpbench(capsys, "run", a_spec(tmp_path), "--dry-run", "--pairs", "4", "--quick")
    assert code == 2
    assert "--pairs and --quick contradict each other" in err


def test_shipped_spec_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = dcpbench(capsys, "run", "quick_4xcpu", "--dry-run")
    assert code == 0
    assert "--nproc-per-node=4" in out


@pytest.mark.parametrize("command", [("run",), ("check",)])
def test_preflight_refusal_exits_6_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    out_folder = tmp_path / "run"
    extra = ("--out", out_folder) if command == ("run",) else ()
    spec = a_spec(tmp_path, topology={**RANKS, "gpus_per_node": 4, "tp": 2})
    code, _, err = dcpbench(capsys, *command, spec, *extra)
    assert code == 6
    assert "topology.tp" in err
    assert not out_folder.exists()


def test_a01_sample_that_no_group_can_hold_is_refused_before_any_launch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ranks = {"device": "cpu", "gpus_per_node": 8, "cp": 8}
    spec = a_spec(tmp_path, topology=ranks, data={"kind": "list", "lengths": [100, 40000]})
    arguments = ("--set", "cases.max_seqlen_per_dp_cp_rank=4096", "--set", "training.global_batch_size=2")
    code, _, err = dcpbench(capsys, "run", spec, *arguments, "--out", tmp_path / "run")
    assert code == 6
    for part in ("sample 1", "40000", "32768"):
        assert part in err
    assert not (tmp_path / "run" / "launches").exists()


def test_check_without_a_spec_shows_versions(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = dcpbench(capsys, "check")
    assert code == 0
    assert "torch" in out
    assert "CPU cores" in out


def test_check_of_a_spec(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = dcpbench(capsys, "check", a_spec(tmp_path))
    assert code == 0
    assert "iterations planned" in out
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]


def test_check_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = dcpbench(capsys, "check", a_spec(tmp_path), "--json")
    assert code == 0
    assert {finding["level"] for finding in json.loads(out)["preflight"]["findings"]} <= {"ok", "warn"}


def test_analyze_only_needs_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANALYZE_ONLY", "1")
    code, _, err = dcpbench(capsys, "run", a_spec(tmp_path))
    assert code == 2
    assert "--out" in err
    code, _, err = dcpbench(capsys, "run", a_spec(tmp_path), "--out", tmp_path / "none")
    assert code == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("off", ["0", "false", ""])
def test_a_switch_that_is_off_or_no_switch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: str
) -> None:
    monkeypatch.setenv("ANALYZE_ONLY", off)
    code, _, err = dcpbench(capsys, "run", a_spec(tmp_path), "--dry-run")
    assert (code, err) == (0, "")
    monkeypatch.setenv("ANALYZE_ONLY", "maybe")
    code, _, err = dcpbench(capsys, "analyze", tmp_path)
    assert code == 2
    assert "ANALYZE_ONLY" in err
    assert "maybe" not in err
