"""`dcpbench run --profile`: traces, their summaries, and the table in the report."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

SPEC = {
    "name": "profiled",
    "model": {"layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "attention_heads": 2, "vocab_size": 64},
    "topology": {"device": "cpu", "gpus_per_node": 2, "cp": 2},
    "training": {"iterations": 3, "warmup_iterations": 1, "global_batch_size": 4},
    "data": {"kind": "list", "lengths": [40, 9, 100, 17], "tokens": "zipf"},
    "cases": {"max_seqlen_per_dp_cp_rank": 64},
    "launches": {"pairs": 1},
}


def dcpbench(*arguments: object) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "VIRTUAL_ENV", "LANG") if name in os.environ}
    command = [sys.executable, "-m", "dcpbench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=kept, check=False)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("profiled")
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    ran = dcpbench("run", folder / "spec.yaml", "--out", folder / "run", "--profile", 1, "--profile", 3)
    return folder / "run", ran


def test_every_rank_leaves_a_trace_of_every_chosen_iteration(profiled: tuple[Path, object]) -> None:
    for case in ("baseline", "dcp"):
        folder = profiled[0] / "launches" / f"01-{case}" / "profile"
        names = {
            f"rank{rank}-iteration{i}{end}" for rank in (0, 1) for i in (1, 3) for end in (".json.gz", ".summary.json")
        }
        assert {file.name for file in folder.iterdir()} == names
        with gzip.open(folder / "rank1-iteration3.json.gz") as file:
            assert any(event.get("name") == "aten::mm" for event in json.load(file)["traceEvents"])


def test_the_report_says_where_the_time_went_and_warns(
    profiled: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, ran = profiled
    assert ran.returncode in {0, 3}, ran.stderr  # one pair decides nothing, and need not
    for text in (ran.stdout, (folder / "analysis" / "report.md").read_text()):
        assert "matrix products" in text
        assert "idle: the device waits for the host" in text
        assert "A profiler ran in measured iterations (3)" in text
    statistics = json.loads((folder / "analysis" / "statistics.json").read_text())
    (baseline, dcp) = statistics["profiles"]
    assert (baseline["launch"], dcp["launch"]) == ("01-baseline", "01-dcp")
    assert [(x["iteration"], x["rank"]) for x in dcp["iterations"]] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for found in dcp["iterations"]:
        assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
        assert found["parts"]["gemm"] > 0


def test_a_torn_summary_is_named(profiled: tuple[Path, object], tmp_path: Path) -> None:
    file = profiled[0] / "launches" / "01-dcp" / "profile" / "rank0-iteration1.summary.json"
    whole = file.read_text()
    try:
        file.write_text(whole[:40])
        ran = dcpbench("analyze", profiled[0], "--analyze-only")
    finally:
        file.write_text(whole)
    assert ran.returncode == 2
    assert f"{file.name} is no profile summary" in ran.stderr


def test_an_iteration_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    ran = dcpbench("run", tmp_path / "spec.yaml", "--out", tmp_path / "run", "--profile", 4)
    assert ran.returncode == 2
    assert "profile_iterations names iteration 4 of 3" in ran.stderr
