"""`dcpbench plan`: options, files, sentences, without a GPU and without loading what is slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dcpbench import cli
from dcpbench.dcp import cost_profiles
from dcpbench.dcp.cost_profiles import Fit
from dcpbench.spec import Spec

SPEC: dict[str, Any] = {
    "name": "small",
    "topology": {"gpus_per_node": 4, "cp": 2},
    "training": {"global_batch_size": 16, "iterations": 6},
    "data": {"kind": "lognormal", "mean": 300, "max_length": 1500},
    "cases": {"max_seqlen_per_dp_cp_rank": 1024},
}


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DCPBENCH_DEBUG", "OUTPUT_DIR", "TRAIN_ITERS", "CUDA_VISIBLE_DEVICES", "DATASET_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))  # profiles of this machine are not the test's


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return path


def dcpbench(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, out, err = dcpbench(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_table_and_one_line_about_what_it_rests_on(capsys: pytest.CaptureFixture[str], spec: Path) -> None:
    code, out, err = dcpbench(capsys, spec)
    assert (code, err) == (0, "")
    for word in ("dp_balanced", "default_dynamic_cp", "laminar", "over the lower bound", "idle share", "planning (ms)"):
        assert word in out
    assert "assumed profile" in out
    assert "dcpbench calibrate" in " ".join(out.split())


def test_files_are_written_where_out_says_and_nowhere_else(capsys: pytest.CaptureFixture[str], spec: Path) -> None:
    out = spec.parent / "made" / "plan"
    code, _, err = dcpbench(capsys, spec, "--out", out)
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["packing.png", "plan.csv", "plan.html", "plan.json"]
    assert err.count("dcpbench: wrote") == 4
    assert json.loads((out / "plan.json").read_text())["name"] == "small"
    assert sorted(path.name for path in spec.parent.iterdir()) == ["made", "spec.yaml"]


def test_ranks_nodes_bandwidth_samples_and_batches(capsys: pytest.CaptureFixture[str], spec: Path) -> None:
    found = document(
        capsys, spec, "--ranks", 64, "--nodes", 16, "--bandwidth", "200,25", "--samples", 128, "--batches", 3
    )
    assert (found["ranks"], found["nodes"], found["samples"], found["batches"]) == (64, 16, 128, 3)
    assert found["costs"]["node_size"] == 4
    assert found["costs"]["within"]["bandwidth"] == 200e9
    assert found["costs"]["between"]["bandwidth"] == 25e9
    assert document(capsys, spec, "--ranks", 64)["nodes"] == 8
    assert document(capsys, spec)["costs"]["node_size"] == 4


def test_the_same_question_has_the_same_answer_and_a_seed_another(
    capsys: pytest.CaptureFixture[str], spec: Path
) -> None:
    def times(*options: object) -> list[float]:
        return [row["mean_ms"] for row in document(capsys, spec, *options)["rows"]]

    assert times() == times()
    assert times("--seed", 3) == times("--seed", 3)
    assert times("--seed", 3) != times()
    assert times("--seed", 3) != times("--seed", 4)


def test_lengths_come_from_a_csv_file(capsys: pytest.CaptureFixture[str], spec: Path) -> None:
    file = spec.parent / "lengths.csv"
    file.write_text("length\n" + "\n".join(["600"] * 5 + ["1100"]))
    found = document(capsys, spec, "--lengths-csv", file, "--samples", 6, "--batches", 1)
    assert any("6 samples of 600 to 1,100 tokens (lengths.csv" in note for note in found["notes"])
    assert str(spec.parent) not in json.dumps(found)


def test_lengths_come_from_text_as_tokens(capsys: pytest.CaptureFixture[str], spec: Path) -> None:
    file = spec.parent / "text.jsonl"
    file.write_text("".join(json.dumps({"text": "a" * size}) + "\n" for size in (40, 90, 200, 60)))
    data = ["--set", "data.kind=text", "--set", f"data.path={file}", "--samples", 4, "--batches", 2]
    found = document(capsys, spec, *data)
    assert any("2 batches of 4 samples of 41 to 201 tokens (text.jsonl" in note for note in found["notes"])


def test_lengths_come_from_the_prepared_data_of_a_run_folder(capsys: pytest.CaptureFixture[str], spec: Path) -> None:
    from dcpbench.config import load
    from dcpbench.data.prepare import prepare

    file = spec.parent / "text.jsonl"
    file.write_text("".join(json.dumps({"text": "a" * size}) + "\n" for size in (40, 90, 200, 60)))
    spec.write_text(yaml.safe_dump({**SPEC, "data": {"kind": "text", "path": str(file)}}))
    prepare(load(spec, environ={}).spec, spec.parent / "data")
    found = document(capsys, spec, "--samples", 4, "--batches", 1)
    assert any("4 samples of 41 to 201 tokens" in note for note in found["notes"])
    code, _, err = dcpbench(capsys, spec, "--set", "data.max_length=150", "--set", "data.too_long=cut")
    assert code == 2
    assert "prepared for another request" in err


def test_a_sweep_recommends_within_the_limit(capsys: pytest.CaptureFixture[str], spec: Path) -> None:
    options = ["--sweep", "capacity=768:3072,min_cp=1,2", "--sweep", "cp=2,4"]
    found = document(capsys, spec, *options)
    assert found["sweep"]["max_tokens"] == 1024
    times = [row["mean_ms"] for row in found["rows"][: found["sweep"]["within"]]]
    assert times == sorted(times)
    assert all(row["peak_tokens"] <= 1024 for row in found["rows"][: found["sweep"]["within"]])
    assert all(row["peak_tokens"] > 1024 for row in found["rows"][found["sweep"]["within"] :])
    assert {one["scheduler"] for one in found["sweep"]["schedulers"]} == {row["scheduler"] for row in found["rows"]}
    wider = document(capsys, spec, *options, "--max-tokens", 4096)
    assert wider["sweep"]["within"] == len(wider["rows"])
    code, out, _ = dcpbench(capsys, spec, *options, "--out", spec.parent / "plan")
    assert code == 0
    assert "best within the limit" in out
    assert (spec.parent / "plan" / "packing.png").stat().st_size > 5000


def test_only_the_schedulers_that_were_asked_for(capsys: pytest.CaptureFixture[str], spec: Path) -> None:
    found = document(capsys, spec, "--schedulers", "laminar,default_dynamic_cp,laminar")
    assert [row["scheduler"] for row in found["rows"]] == ["laminar", "default_dynamic_cp"]
    assert found["fixed_cp"]["scheduler"] == "dp_balanced"


def test_the_profile_decides_the_times_and_a_poor_one_is_refused(
    capsys: pytest.CaptureFixture[str], spec: Path
) -> None:
    usual = cost_profiles.assumed(Spec())
    values = usual.coefficients.model_copy(update={"base": 1.0})
    file = spec.parent / "mine.json"
    good = Fit(points=9, held_out=3, mape=0.02, p95=0.05, fitted_mape=0.01)
    key = cost_profiles.key_of(Spec(), "NVIDIA H200")
    measured = usual.model_copy(update={"kind": "measured", "coefficients": values, "fit": good, "key": key})
    file.write_text(cost_profiles.dump(measured))
    found = document(capsys, spec, "--profile", file)
    assert all(row["mean_ms"] > 1000 for row in found["rows"])
    assert found["notes"][0].startswith("The times rest on the measured profile")
    assert "2.0%" in found["notes"][0]
    poor = measured.model_copy(update={"fit": good.model_copy(update={"refused": "the errors are too large"})})
    file.write_text(cost_profiles.dump(poor))
    code, out, err = dcpbench(capsys, spec, "--profile", file)
    assert (code, out) == (2, "")
    assert "the errors are too large" in err


def test_what_lies_outside_of_what_was_measured_is_said(capsys: pytest.CaptureFixture[str], spec: Path) -> None:
    file = spec.parent / "mine.json"
    usual = cost_profiles.assumed(Spec())
    key = cost_profiles.key_of(Spec(), "NVIDIA H200")

    def note(most: int, sizes: tuple[int, ...]) -> str:
        good = Fit(points=9, held_out=3, mape=0.02, p95=0.05, fitted_mape=0.01, most_tokens=most, sizes=sizes)
        measured = usual.model_copy(update={"kind": "measured", "fit": good, "key": key})
        file.write_text(cost_profiles.dump(measured))
        found: str = document(capsys, spec, "--profile", file)["notes"][0]
        return found

    assert "extrapolated" not in note(1024, (1, 2, 4))
    assert "tokens a rank are outside of what was measured, at most 128: their times are extrapolated" in note(128, ())
    assert "CP sizes up to 2 are used, and were measured up to 1: the rest is extrapolated" in note(1024, (1,))


def test_a_plan_is_of_the_batches_that_a_run_measures(capsys: pytest.CaptureFixture[str], spec: Path) -> None:
    options = ["--schedulers", "dp_balanced", "--set", "training.iterations=6", "--set", "training.warmup_iterations=4"]
    found = document(capsys, spec, *options)
    assert found["batches"] == 2
    assert any("those of the run after 4 for warm-up" in note for note in found["notes"])
    both = document(capsys, spec, *options, "--batches", 6)
    assert any("the first of the run" in note for note in both["notes"])
    first_four = document(capsys, spec, *options[:2], "--set", "training.iterations=4", "--set",
                          "training.warmup_iterations=0")  # fmt: skip
    total = 4 * first_four["rows"][0]["mean_ms"] + 2 * found["rows"][0]["mean_ms"]
    assert total == pytest.approx(6 * both["rows"][0]["mean_ms"])


def test_a_profile_measured_elsewhere_is_found_for_a_machine_without_gpus(
    capsys: pytest.CaptureFixture[str], spec: Path
) -> None:
    from dcpbench.config import load

    resolved = load(spec, environ={}).spec
    key = cost_profiles.key_of(resolved, "NVIDIA H200")
    made = cost_profiles.assumed(resolved).model_copy(update={"kind": "measured", "name": "elsewhere", "key": key})
    folder = cost_profiles.user_folder()
    folder.mkdir(parents=True)
    (folder / "elsewhere.json").write_text(cost_profiles.dump(made))
    assert "measured profile elsewhere (NVIDIA H200)" in document(capsys, spec)["notes"][0]
    other = document(capsys, spec, "--set", "model.layers=5")
    assert "assumed profile" in other["notes"][0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "5"], "5 ranks cannot be divided into CP groups of 2"),
        (["--nodes", "3"], "--nodes 3 does not divide 4 ranks"),
        (["--ranks", "0"], "--ranks"),
        (["--bandwidth", "fast"], "--bandwidth fast"),
        (["--bandwidth", "0"], "--bandwidth 0"),
        (["--bandwidth", "1,2,3"], "--bandwidth 1,2,3"),
        (["--schedulers", "lamina"], "did you mean 'laminar'"),
        (["--schedulers", ","], "--schedulers names none"),
        (["--sweep", "size=1"], "capacity, cp, min_cp"),
        (["--max-tokens", "5"], "--sweep"),
        (["--time-limit", "nan"], "--time-limit"),
        (["--time-limit", "0"], "--time-limit"),
        (["--samples", "1", "--schedulers", "dp_balanced"], "no scheduler can plan this: dp_balanced"),
        (["--set", "cases.max_seqlen_per_dp_cp_rank=16"], "no scheduler can plan this"),
        (["--lengths-csv", "/nowhere.csv"], "/nowhere.csv does not exist"),
        (["--profile", "/nowhere.json"], "/nowhere.json cannot be read"),
        (["--profile", "nameless"], "no cost profile 'nameless'"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], spec: Path, options: list[str], words: str
) -> None:
    code, out, err = dcpbench(capsys, spec, *options)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("dcpbench: error:") == 1


def test_planning_without_a_picture_loads_nothing_heavy_of_its_own(spec: Path) -> None:
    # scipy is left out: numba loads it with compiled functions.
    code = (
        "import sys, dcpbench.cli as cli\n"
        f"try: cli.main(['plan', {str(spec)!r}, '--json'])\n"
        "except SystemExit as stop: print('code', stop.code, file=sys.stderr)\n"
        "heavy = {'torch', 'transformer_engine', 'pandas', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "code 0\nheavy: []\n"


@pytest.mark.parametrize("name", ["mock_2xh200", "mock_4xh200", "mock_8xh200"])
def test_shipped_specs_are_planned_by_every_scheduler(capsys: pytest.CaptureFixture[str], name: str) -> None:
    found = document(capsys, name)
    assert [row["scheduler"] for row in found["rows"]] == ["dp_balanced", "default_dynamic_cp", "laminar"]
    assert found["refused"] == []
    assert all(row["over_bound"] >= 1 for row in found["rows"])
