"""`dcpbench calibrate` on real gloo ranks: a profile of sane coefficients, used by a run, refitted from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dcpbench import config
from dcpbench.calibration import command, shown
from dcpbench.dcp import cost_profiles
from dcpbench.launching import progress
from dcpbench.launching.interrupts import Interrupts
from dcpbench.spec import Spec

SPEC = """
name: tiny
model: {layers: 1, hidden_size: 32, ffn_hidden_size: 64, attention_heads: 2, vocab_size: 97}
topology: {device: cpu, gpus_per_node: 2, cp: 2}
training: {iterations: 10, warmup_iterations: 2, global_batch_size: 4}
data: {kind: lognormal, mean: 150, sigma: 1, min_length: 16, max_length: 400, tokens: zipf}
cases: {max_seqlen_per_dp_cp_rank: 256, dcp: {scheduler: laminar}}
launches: {pairs: 1, timeout: 200}
"""


def dcpbench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, "-m", "dcpbench", *arguments]
    return subprocess.run(command_line, capture_output=True, text=True, timeout=250, check=False)


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("spec") / "tiny.yaml"
    file.write_text(SPEC)
    return file


@pytest.fixture(scope="module")
def made(spec_file: Path, tmp_path_factory: pytest.TempPathFactory) -> command.Calibrated:
    spec = command.measured_spec(config.load(spec_file, environ={}).spec)
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch, Interrupts() as interrupts, progress.on() as display:
        patch.setattr(command, "SECONDS", 1.0)
        return command.calibrate(spec, out, environ={"PATH": "/usr/bin:/bin"}, listener=display, interrupts=interrupts)


def test_a_calibration_measures_fits_and_writes_what_it_found(made: command.Calibrated) -> None:
    assert made.file is not None
    profile = cost_profiles.load(made.file)
    assert profile == made.profile
    assert profile.kind == "measured"
    assert profile.coefficients.token > 0
    assert profile.key is not None
    assert (profile.key.gpu, profile.key.ranks, profile.key.dtype) == ("cpu", 2, "float32")
    assert profile.key.backend == "collective/sdpa"
    assert "torch" in profile.key.versions
    assert profile.fit is not None
    assert profile.fit.points > 8 < 2 * profile.fit.held_out
    assert profile.iteration is not None
    assert profile.iteration.iterations == command.ITERATIONS - command.WARMUP
    assert {sample.size for sample in made.samples} == {1, 2}
    assert all(sample.seconds > 0 for sample in made.samples)
    assert made.picture == str(made.file.with_suffix(".png"))
    assert made.file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    log = made.file.with_name(f"{made.file.stem}-launch") / "launches" / "calibration" / "stdout.log"
    assert f"dcpbench calibration {len(made.samples)}/{len(made.samples)} | " in log.read_text()


def test_the_verdict_is_printed_whatever_it_is(made: command.Calibrated) -> None:
    lines = shown.verdict_lines(made)
    # On a machine with other work the fit may be poor, which is then said and not an error.
    assert ("NOT USABLE: its fit is poor: " in lines[-1]) == (made.profile.refused is not None)
    rows = shown.sample_rows(made.profile, made.samples)
    assert sum(int(row[2]) for row in rows) == len(made.samples)
    assert shown.document(made)["usable"] is (made.profile.refused is None)


@pytest.fixture(scope="module")
def run(spec_file: Path, made: command.Calibrated) -> Path:
    """A run of the spec that plans and predicts with the profile, as if its fit had been good."""
    assert made.profile.fit is not None
    good = made.profile.model_copy(update={"fit": made.profile.fit.model_copy(update={"refused": None})})
    profile, folder = spec_file.with_name("good.json"), spec_file.with_name("run")
    profile.write_text(cost_profiles.dump(good.model_copy(update={"name": "good"})))
    done = dcpbench("run", str(spec_file), "--set", f"schedule.costs={profile}", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    assert "predicted over measured time" in done.stdout
    return folder


def test_a_run_plans_and_predicts_with_the_profile(run: Path) -> None:
    stored = cost_profiles.load(run / "costs.json")
    cases = json.loads((run / "analysis" / "statistics.json").read_text())["cases"]
    for case in cases.values():
        assert case["predicted"]["basis"] == "measured profile good"
        assert case["predicted"]["iterations"] == 8
        assert case["predicted"]["ratio"] > 0
        assert case["predicted"]["mape"] >= 0
    assert cases["dcp"]["planned_with"] == "measured profile good"
    assert cases["baseline"]["planned_with"] is None
    for launch in ("01-baseline", "01-dcp"):
        given = json.loads((run / "launches" / launch / "launch.json").read_text())["costs"]
        assert cost_profiles.CostProfile.model_validate(given) == stored
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["launches"][1]["worker"]["costs"] == "measured profile good"
    assert "costs.json" in manifest["artifacts"]
    assert "measured profile good" in (run / "analysis" / "report.md").read_text()


def test_a_refit_to_the_run_is_no_worse_than_the_profile_was(run: Path, tmp_path: Path) -> None:
    done = dcpbench("calibrate", "--from-run", str(run), "--out", str(tmp_path / "again.json"), "--json")
    assert done.returncode in (0, 1), done.stderr
    document = json.loads(done.stdout)
    assert document["usable"] is (done.returncode == 0)
    profile = cost_profiles.load(tmp_path / "again.json")
    assert profile.name == "again"
    assert profile.coefficients.token > 0
    assert profile.fit is not None
    assert profile.fit.points + profile.fit.held_out == 16
    assert document["error_after"] == profile.fit.mape
    assert document["error_after"] <= document["error_before"] + 0.1


def test_a_launch_that_fails_says_why_and_where_its_log_is(spec_file: Path, tmp_path: Path) -> None:
    done = dcpbench(
        "calibrate", str(spec_file), "--out", str(tmp_path), "--set", f"training.load_path={tmp_path / 'nowhere'}"
    )
    assert done.returncode in (2, 4, 6)
    assert done.stderr.splitlines()[-1].startswith("dcpbench: error: ")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name a spec to calibrate, or a finished run with --from-run"),
        (["SPEC", "--from-run", "x"], "--from-run takes everything from the run"),
        (["--from-run", "x"], "x is no folder"),
        (["SPEC", "--out", "x/-bad.json"], "a profile's name begins with a letter or digit"),
        (["SPEC", "--set", "runner=megatron_lm"], "only the built-in worker is calibrated"),
        (["SPEC", "--set", "schedule.costs="], "schedule.costs"),
    ],
)
def test_wrong_options_get_one_sentence(spec_file: Path, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    given = [str(spec_file) if argument == "SPEC" else argument for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "dcpbench", "calibrate", *given],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ranks_change_the_topology_and_nothing_that_is_timed() -> None:
    compared = Spec.model_validate({"mode": "lockstep", "decision": {"min_speedup": 1.1}})
    spec = command.measured_spec(compared, ranks=2)
    assert (spec.mode, spec.launches.pairs, spec.decision.min_speedup) == ("launches", 1, None)
    assert (spec.topology.world_size, spec.topology.cp) == (2, 2)
    assert spec.cases.dcp.scheduler == command.MEASURED
    assert (spec.model, spec.data) == (Spec().model, Spec().data)
