"""`dcpbench run` with `mode=lockstep` and what follows it, with the real worker on two gloo ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

SPEC = {
    "name": "together",
    "model": {"layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "attention_heads": 2, "vocab_size": 64},
    "topology": {"device": "cpu", "gpus_per_node": 2, "cp": 2},
    "training": {"iterations": 4, "warmup_iterations": 1, "global_batch_size": 4, "dtype": "float32"},
    "data": {"kind": "list", "lengths": [40, 9, 100, 17], "tokens": "zipf"},
    "cases": {"max_seqlen_per_dp_cp_rank": 64},
    "launches": {"pairs": 6, "timeout": 120, "grace": 5},
}


def dcpbench(*arguments: object) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "VIRTUAL_ENV", "LANG") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "dcpbench", *map(str, arguments)], capture_output=True, text=True, env=kept, check=False
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("lockstep")
    (folder / "together.yaml").write_text(yaml.safe_dump(SPEC))
    done = dcpbench("run", folder / "together.yaml", "--set", "mode=lockstep", "--out", folder / "run")
    assert done.returncode == 0, done.stderr
    return folder / "run", done


def test_one_launch_gives_a_result_of_both_cases(run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = run
    assert sorted(path.name for path in (folder / "launches").iterdir()) == ["01-lockstep", "aa-lockstep"]
    assert "in lockstep" in done.stdout
    assert "A/A control" in done.stdout
    assert "aa-lockstep: started, 2 ranks" in done.stderr
    assert "pair 1/1 lockstep: iteration 4/4, dcp, " in done.stderr
    content = json.loads((folder / "manifest.json").read_text())
    assert content["controls"]["mode"] == "lockstep"
    assert content["controls"]["pairs"] == 1
    assert content["controls"]["order_run"] == ["01-lockstep", "aa-lockstep"]
    assert content["results"]["lockstep_control"]["loss_difference_max"] == 0.0
    assert "launches/aa-lockstep/records.jsonl" in content["artifacts"]
    planned = json.loads((folder / "plan.json").read_text())["launches"]
    assert [launch["id"] for launch in planned] == ["01-lockstep", "aa-lockstep"]
    assert content["results"]["mode"] == "lockstep"
    assert content["results"]["parity"]["passed"] is True
    # Three measured iterations decide nothing, whatever they say.
    assert content["results"]["speedup"]["verdict"] in ("inconclusive", "indicative")
    assert dcpbench("manifest", folder, "--check").returncode == 0


def test_analysis_alone_changes_no_byte(run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = run
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = dcpbench("analyze", folder, "--analyze-only")
    assert done.returncode == 0, done.stderr
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_resume_finds_it_complete_and_list_names_the_mode(
    run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = run
    done = dcpbench("run", folder / "spec.yaml", "--out", folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert "01-lockstep is complete already" in done.stderr
    assert "aa-lockstep is complete already" in done.stderr
    listed = json.loads(dcpbench("list", folder.parent, "--json").stdout)["runs"]
    assert [(found["mode"], found["pairs"]) for found in listed if found["when"]] == [("lockstep", 1)]
    assert listed[0]["aa"] > 0


def test_dry_run_shows_the_launches_that_were_asked_for(run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    spec = run[0].parent / "together.yaml"
    done = dcpbench("run", spec, "--set", "mode=lockstep", "--pairs", "2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "2. 02-lockstep (pair 2, lockstep)" in done.stdout
    assert "every iteration under both cases" in done.stdout
    assert "3. aa-lockstep (lockstep)\n   every iteration with the baseline on both sides (A/A)" in done.stdout
    quick = dcpbench("run", spec, "--set", "mode=lockstep", "--quick", "--dry-run")
    assert "2. 02-lockstep" in quick.stdout
    assert "aa-lockstep" not in quick.stdout


def test_a_control_that_fails_is_a_caution_and_the_run_passes(
    run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    shutil.rmtree(folder / "launches" / "aa-lockstep")
    done = dcpbench("run", folder / "spec.yaml", "--out", folder, "--resume", "--timeout", "0.01")
    assert done.returncode == 0, done.stderr
    assert "caution: aa-lockstep" in done.stderr
    assert "Caution: The A/A control cannot be used" in " ".join(done.stdout.split())
    content = json.loads((folder / "manifest.json").read_text())
    assert [(launch["id"], launch["status"]) for launch in content["launches"]][-1] == ("aa-lockstep", "timeout")
    assert content["results"]["lockstep_control"] is None
    assert content["results"]["verdict"] == "passed"


@pytest.mark.parametrize("change", ["runner=megatron_lm", "training.profile_iterations=[2]"])
def test_what_lockstep_cannot_do_is_a_spec_error(
    run: tuple[Path, subprocess.CompletedProcess[str]], change: str
) -> None:
    done = dcpbench("run", run[0].parent / "together.yaml", "--set", "mode=lockstep", "--set", change, "--dry-run")
    assert done.returncode == 2
    assert "lockstep" in done.stderr
    assert "Traceback" not in done.stderr
