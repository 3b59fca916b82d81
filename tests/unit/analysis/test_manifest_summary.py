"""What reports repeat of the manifest: the same at the end of a run and whenever they are written again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from log_lines import run_folder, spec

from dcpbench import manifest, report
from dcpbench.analysis import manifest_summary
from dcpbench.analysis.pipeline import analyze_run
from dcpbench.checks.gpus import Gpu, GpuSurvey
from dcpbench.config import ResolvedSpec

GPUS = GpuSurvey(
    gpus=tuple(Gpu(name=str(n), model="NVIDIA H200", memory_bytes=150 * 2**30, processes=0) for n in range(2)),
    driver="580.1",
    interconnect="NVLink, 18 links",
)


def a_manifest(folder: Path) -> manifest.Manifest:
    made = run_folder(folder, {"01-baseline": [1.0] * 6, "01-dcp": [0.5] * 6})
    resolved = ResolvedSpec(spec(), {"training.seed": "file bench.yaml", "launches.pairs": "--pairs"})
    return manifest.build(made, resolved, {}, environ={"NCCL_DEBUG": "WARN"}, gpus=GPUS)


def test_it_says_what_the_run_stood_on(tmp_path: Path) -> None:
    found = dict(manifest_summary.summary(a_manifest(tmp_path)))
    assert found["GPUs"] == "2 x NVIDIA H200 (150 GiB); driver 580.1; NVLink, 18 links"
    assert found["ranks"] == "4 on one node: TP 1, CP of the baseline 4, PP 1, DP 1"
    assert found["launches"] == "2 completed; in this order: 01-baseline 01-dcp"
    assert found["values set beside the spec file"] == "launches.pairs (--pairs)"
    assert found["seeds"] == "bootstrap 0, data 0, weights 1234"
    assert len(found["spec (SHA-256)"]) == 64
    assert found["relevant environment"] == "NCCL_DEBUG=WARN"
    assert "Megatron-LM" not in found


def test_the_stored_manifest_gives_the_same_rows_and_lists_the_report(tmp_path: Path) -> None:
    built = a_manifest(tmp_path)
    rows = manifest_summary.summary(built)
    report.write(replace(analyze_run(tmp_path), provenance=rows), tmp_path / "analysis")
    manifest.store(tmp_path, built)
    assert manifest.check(tmp_path) == []
    assert manifest_summary.of_run(tmp_path) == rows
    for name in ("report.html", "report.md"):
        text = (tmp_path / "analysis" / name).read_text(encoding="utf-8")
        assert "From the manifest" in text
        assert all(what in text for what, _ in rows)


def test_without_a_manifest_there_is_nothing_to_repeat(tmp_path: Path) -> None:
    assert manifest_summary.of_run(tmp_path) == ()
    (tmp_path / "manifest.json").write_text("{")
    assert manifest_summary.of_run(tmp_path) == ()
