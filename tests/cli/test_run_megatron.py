"""`dcpbench run` with `runner: megatron_lm` over a stand-in checkout: the whole path, and every fault of a log.

The stand-in (tests/data/megatron_checkout) checks its arguments and environment like the real script. Without a GPU
here, two are pretended; the stand-in needs none. One test starts it under torchrun with two ranks, the others directly.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dcpbench import campaign, cli, commands, plan, preflight
from dcpbench.checks.gpus import Gpu, GpuSurvey
from dcpbench.runfolder import ledger

CHECKOUT = Path(__file__).parents[1] / "data" / "megatron_checkout"
GPUS = GpuSurvey(gpus=tuple(Gpu(name=str(n), model="H", processes=0) for n in range(2)))
SPEC: dict[str, Any] = {
    "name": "standin",
    "runner": "megatron_lm",
    "model": {"layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "attention_heads": 2, "vocab_size": 512},
    "topology": {"device": "cuda", "gpus_per_node": 2, "cp": 2},
    "training": {"iterations": 6, "warmup_iterations": 2, "global_batch_size": 4},
    "data": {"kind": "list", "lengths": [40, 9, 100, 17]},
    "cases": {"max_seqlen_per_dp_cp_rank": 64, "padding": "megatron"},
    "launches": {"pairs": 2, "timeout": 60, "grace": 1},
    "tolerances": {"loss_atol": 1e-3, "loss_rtol": 0},
}


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def statistics(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "analysis" / "statistics.json").read_text())
        return found


Run = Callable[..., Done]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with the stand-in."""
    folder = tmp_path / "checkout"
    shutil.copytree(CHECKOUT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".gitignore").write_text("__pycache__/\n")
    git = [
        "git",
        "-C",
        str(folder),
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "-c",
        "init.defaultBranch=m",
    ]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a checkout"]):
        subprocess.run([*git, *words], check=True)
    return folder


@pytest.fixture
def run(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the spec with overrides; the stand-in is started without torchrun unless `ranks` says otherwise."""
    for name in [name for name in os.environ if name.startswith(("NVTE_", "NCCL_", "CUDA_")) or "LOSS" in name]:
        monkeypatch.delenv(name)
    for module in (campaign, commands):
        monkeypatch.setattr(module, "survey", lambda _: GPUS)
    monkeypatch.setattr(preflight, "_version", lambda _: "2.20.2")

    def start(*arguments: str, ranks: bool = False) -> Done:
        if not ranks:
            monkeypatch.setattr(plan, "_ranks", lambda _: [sys.executable])
        spec = tmp_path / "spec.yaml"
        spec.write_text(yaml.safe_dump({**SPEC, "megatron": {"checkout": str(checkout)}}))
        folder = tmp_path / "run"
        with pytest.raises(SystemExit) as stopped:
            cli.main(["run", str(spec), "--out", str(folder), *arguments])
        captured = capsys.readouterr()
        return Done(int(stopped.value.code or 0), captured.out, captured.err, folder)

    return start


def faulty(fault: str) -> tuple[str, ...]:
    return ("--set", f"megatron.extra_flags=[--standin-fault, {fault}]", "--set", "launches.pairs=1")


def test_a_comparison_under_torchrun(run: Run, checkout: Path) -> None:
    done = run("--pairs", "1", ranks=True)
    assert done.code == 0, done.err
    statistics = done.statistics
    assert statistics["cases"]["baseline"]["mean_ms"] == 100.0
    assert statistics["cases"]["dcp"]["mean_ms"] == 80.0
    assert statistics["speedup"]["total"] == pytest.approx(1.25)
    assert "pair 1/1 dcp: iteration 6/6" in done.err
    log = (done.folder / "launches" / "01-dcp" / "stdout.log").read_text()
    assert log.count("consumed samples:") == 6, "the last rank alone prints records"


def test_everything_of_a_run(run: Run, checkout: Path) -> None:
    done = run()
    assert done.code == 0, done.err
    order = [(entry.event, entry.launch) for entry in ledger.read(done.folder / "ledger.jsonl")]
    assert [launch for event, launch in order if event == "start"] == ["01-baseline", "01-dcp", "02-dcp", "02-baseline"]
    statistics = done.statistics
    assert statistics["faults"] == []
    assert statistics["parity"]["max_abs_diff"] == pytest.approx(1e-4, rel=0.05)
    # what is trained on of each sample, in 0.1 s
    assert statistics["cases"]["baseline"]["tokens_per_second"] == pytest.approx((39 + 8 + 99 + 16) / 0.1)
    assert statistics["cases"]["baseline"]["logged_tflops_per_gpu"] == pytest.approx(119.5)
    assert statistics["cases"]["baseline"]["tflops_per_gpu"] is not None
    assert "Token counts are those of the prepared data" in (done.folder / "analysis" / "report.md").read_text()
    manifest = json.loads((done.folder / "manifest.json").read_text())
    head = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert manifest["megatron"]["commit"] == head.stdout.strip()
    assert manifest["megatron"]["dirty"] is False
    assert manifest["controls"]["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert (done.folder / "data" / "lengths.csv").read_text().split() == ["length", *["40", "9", "100", "17"] * 3]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["analyze", str(done.folder), "--analyze-only"])
    assert not stopped.value.code
    with pytest.raises(SystemExit) as stopped:
        cli.main(["manifest", str(done.folder), "--check"])
    assert not stopped.value.code


def test_a_changed_checkout_is_recorded(run: Run, checkout: Path) -> None:
    (checkout / "gpt_builders.py").write_text('"""Changed."""\n')
    done = run("--pairs", "1")
    manifest = json.loads((done.folder / "manifest.json").read_text())
    assert manifest["megatron"]["dirty"] is True


def test_a_finished_launch_is_not_made_again(run: Run) -> None:
    first = run(*faulty("dcp:oom"))
    assert first.code == 4
    (first.folder / "spec.yaml").write_text((first.folder / "spec.yaml").read_text().replace("dcp:oom", "dcp:noise"))
    done = run(*faulty("dcp:noise"), "--resume")
    assert done.code == 0, done.err
    assert "01-baseline is complete already" in done.err


def test_noise_around_records_changes_nothing(run: Run) -> None:
    """A-44, A-51, A-52: prefix, carriage returns, colours, bytes that are no text, a record glued to other text."""
    done = run(*faulty("dcp:noise"))
    assert done.code == 0, done.err
    assert done.statistics["cases"]["dcp"]["mean_ms"] == 80.0


@pytest.mark.parametrize(
    ("fault", "code", "sentence"),
    [
        ("nan", 5, "iteration 3: non finite: loss missing"),
        ("skipped", 5, "the optimizer step was skipped"),
        ("torn", 5, "interrupted before its end"),
        ("early", 5, "it exited with code 0 after 2 of 6 iterations"),
        ("gap", 5, "it exited with code 0 after 5 of 6 iterations"),
        ("twice", 5, "recorded 2 times"),
        ("samples", 5, "consumed samples"),
        ("drift", 1, "loss parity"),
        ("oom", 4, "CUDA out of memory. Tried to allocate 2.00 GiB (launches/01-dcp/stdout.log:"),
        ("assert", 4, "AssertionError: a sample does not fit"),
    ],
)
def test_a_fault_of_the_dcp_case_ends_the_run(run: Run, fault: str, code: int, sentence: str) -> None:
    done = run(*faulty(f"dcp:{fault}"))
    report = (done.folder / "analysis" / "report.md").read_text()
    assert done.code == code, done.err
    assert sentence in done.err + done.out + report
    assert "Traceback" not in done.err


def test_a_launch_that_hangs_is_ended(run: Run) -> None:
    done = run(*faulty("hang"), "--timeout", "2")
    assert done.code == 124
    assert "01-baseline ran longer than the limit of 2 s (launches.timeout), after iteration 2 of 6" in done.err


def test_an_argument_that_the_script_refuses_is_named(run: Run) -> None:
    done = run("--set", "megatron.extra_flags=[--no-such-flag]")
    assert done.code == 4
    assert "pretrain_gpt.py: error: unrecognized arguments: --no-such-flag" in done.err


def test_a_checkout_without_the_dynamic_scheduler_is_refused(run: Run, checkout: Path) -> None:
    (checkout / "megatron/core/datasets/data_schedule.py").write_text("")
    done = run()
    assert done.code == 6
    assert 'lacks the scheduler of the dcp case: no "default_dynamic_cp" in megatron/core/datasets' in done.err
    assert not done.folder.exists()


def test_a_variable_that_megatron_would_stop_at_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    done = run()
    assert done.code == 6
    assert "CUDA_DEVICE_MAX_CONNECTIONS must be 1" in done.err


def test_a_dry_run_shows_the_arguments_and_writes_nothing(run: Run, checkout: Path) -> None:
    done = run("--dry-run")
    assert done.code == 0
    assert f"{checkout}/pretrain_gpt.py --num-layers 1" in done.out
    assert done.out.count("--sequence-packing-scheduler default_dynamic_cp --dynamic-context-parallel") == 2
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in done.out
    assert not done.folder.exists()


def test_a_dry_run_names_the_extra_flag_that_the_spec_decides(run: Run) -> None:
    done = run("--dry-run", "--set", "megatron.extra_flags=[--seq-len, '64']")
    assert done.code == 2
    assert "--seq-len (a beginning of --seq-length) is decided by data; set that instead" in done.err
