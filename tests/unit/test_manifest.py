"""The manifest: complete, strict, free of secrets, checked against the folder, never half-written."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dcpbench import config, environment, manifest, plan, records
from dcpbench.checks.gpus import GpuSurvey
from dcpbench.config import ResolvedSpec
from dcpbench.data.prepare import prepare
from dcpbench.environment import GitState
from dcpbench.errors import LogError
from dcpbench.provenance import secretscan
from dcpbench.records import RunHeader
from dcpbench.runfolder import artifacts, ledger
from dcpbench.runfolder import layout as runfolder

NO_GPUS = GpuSurvey()
RESULTS: dict[str, Any] = {"schema_version": 1, "verdict": "passed", "speedup": {"total": 1.25}, "faults": []}
TOKEN = "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7"


@pytest.fixture(autouse=True)
def _nothing_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secretscan, "_learned", set())


def run_folder(
    path: Path, environ: Mapping[str, str] | None = None, overrides: tuple[str, ...] = ()
) -> tuple[Path, ResolvedSpec]:
    """A run folder as `run` leaves it, with records that were never run."""
    small = (
        "training.iterations=2",
        "training.warmup_iterations=0",
        "training.global_batch_size=4",
        "launches.pairs=2",
    )
    resolved = config.load(None, environ=environ or {}, overrides=[*small, *overrides])
    run = runfolder.RunFolder(path)
    launches = plan.build(resolved.spec, path)
    runfolder.describe(run, resolved.spec, launches)
    if resolved.spec.data.kind != "text":
        prepare(resolved.spec, run.data)
    for launch in launches:
        launch.folder.mkdir(parents=True)
        ledger.append(run.ledger, "start", launch.id)
        header = RunHeader(
            case=launch.case, launch=launch.id, world_size=4, domain_size=4, cp=4, global_batch_size=4, iterations=2,
            device="cpu", attention="collective/sdpa", cp_sizes=(1, 4), versions={"torch": "2.13", "nccl": "2.29"},
        )  # fmt: skip
        launch.records.write_text(records.to_json(header) + "\n")
        launch.log.write_text("dcpbench iteration 1/2 | loss 1.5 |\n")
        ledger.append(run.ledger, "end", launch.id, status="completed", exit_code=0)
    run.analysis.mkdir()
    (run.analysis / "statistics.json").write_text(json.dumps(RESULTS))
    (run.analysis / "aligned.parquet").write_bytes(b"PAR1\0\xff" + bytes(range(256)))
    return path, resolved


def written(path: Path, environ: Mapping[str, str] | None = None, overrides: tuple[str, ...] = ()) -> Path:
    folder, resolved = run_folder(path, environ, overrides)
    manifest.write(folder, resolved, RESULTS, environ=environ or {}, gpus=NO_GPUS)
    return folder


def test_everything_that_the_product_promises(tmp_path: Path) -> None:
    environ = {"NCCL_DEBUG": "INFO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1", "HF_TOKEN": TOKEN, "PATH": "/bin"}
    folder = written(tmp_path / "run", environ, ("training.seed=7",))
    content = json.loads((folder / "manifest.json").read_text())
    assert list(content) == sorted(content)
    assert content["schema_version"] == 1
    assert content["dcpbench"]["version"]
    assert content["spec"]["training"]["seed"] == 7
    assert content["sources"]["training.seed"] == "--set"
    assert content["sources"]["training.lr"] == "default"
    assert [launch["id"] for launch in content["launches"]] == ["01-baseline", "01-dcp", "02-dcp", "02-baseline"]
    assert content["launches"][1] | {"started": "", "ended": ""} == {
        "id": "01-dcp", "case": "dcp", "pair": 1, "started": "", "ended": "", "status": "completed", "exit_code": 0,
        "reason": None,
        "worker": {"device": "cpu", "dtype": None, "attention": "collective/sdpa", "scheduler": None, "padding": None,
                   "capacity": None, "costs": None, "cp_sizes": [1, 4], "parameters": None, "group_memory_bytes": None},
    }  # fmt: skip
    assert content["topology"]["domain_size"] == 4
    assert content["machine"]["os"]["system"]
    assert content["versions"]["workers"] == {"torch": "2.13", "nccl": "2.29"}
    assert "torch" in content["versions"]["packages"]
    assert content["data"]["samples"] == 8
    assert len(content["data"]["content_sha256"]) == 64
    assert content["data"]["length_histogram"]
    assert content["tokenizer"] is None
    assert content["checkpoint"] is None
    controls = content["controls"]
    assert controls["seeds"] == {"weights": 7, "data": 0, "bootstrap": 0}
    assert controls["order_run"] == [launch["id"] for launch in content["launches"]]
    assert controls["environment"] == {"NCCL_DEBUG": "INFO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
    assert controls["tolerances"]["check_loss_parity"] is True
    assert content["results"] == RESULTS
    names = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()} - {"manifest.json"}
    assert set(content["artifacts"]) == names
    log = (folder / "launches/01-dcp/stdout.log").read_bytes()
    assert content["artifacts"]["launches/01-dcp/stdout.log"] == {
        "sha256": hashlib.sha256(log).hexdigest(), "bytes": len(log)
    }  # fmt: skip
    assert manifest.check(folder) == []
    assert manifest.read(folder).results == RESULTS


def test_launches_in_the_order_really_run(tmp_path: Path) -> None:
    folder, resolved = run_folder(tmp_path / "run")
    run = runfolder.RunFolder(folder)
    ledger.append(run.ledger, "start", "02-dcp")
    ledger.append(run.ledger, "end", "02-dcp", status="failed", exit_code=7, reason=f"--hf-token {TOKEN}")
    ledger.append(run.ledger, "start", "01-dcp")
    made = manifest.build(folder, resolved, RESULTS, environ={}, gpus=NO_GPUS)
    assert [(launch.id, launch.status, launch.exit_code) for launch in made.launches] == [
        ("01-baseline", "completed", 0), ("01-dcp", "completed", 0), ("02-dcp", "completed", 0),
        ("02-baseline", "completed", 0), ("02-dcp", "failed", 7), ("01-dcp", "unfinished", None),
    ]  # fmt: skip
    assert made.launches[4].reason == "--hf-token [redacted]"
    # records belong to the last start of an id
    assert [launch.worker is not None for launch in made.launches] == [True, False, False, True, True, True]


def test_versions_that_differ_between_launches_show(tmp_path: Path) -> None:
    folder, resolved = run_folder(tmp_path / "run")
    path = folder / "launches/02-dcp/records.jsonl"
    path.write_text(path.read_text().replace("2.29", "2.30"))
    made = manifest.build(folder, resolved, RESULTS, environ={}, gpus=NO_GPUS)
    assert made.versions.workers == {"torch": "2.13", "nccl": "2.29 | 2.30"}


def test_checkpoint_identity(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / ".metadata").write_bytes(b"m")
    (checkpoint / "__0_0.distcp").write_bytes(b"weights")
    folder, resolved = run_folder(tmp_path / "run", {}, (f"training.load_path={checkpoint}",))
    first = manifest.build(folder, resolved, RESULTS, environ={}, gpus=NO_GPUS).checkpoint
    assert first is not None
    assert (first["name"], first["files"], first["bytes"]) == ("checkpoint", 2, 8)
    (checkpoint / "__0_0.distcp").write_bytes(b"WEIGHTS")
    second = manifest.build(folder, resolved, RESULTS, environ={}, gpus=NO_GPUS).checkpoint
    assert second is not None
    assert second["sha256"] != first["sha256"]


def test_a58_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    folder, resolved = run_folder(tmp_path / "run")
    manifest.write(folder, resolved, {"a": [math.nan, {"b": math.inf}]}, environ={}, gpus=NO_GPUS)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    content = json.loads((folder / "manifest.json").read_text(), parse_constant=refuse)
    assert content["results"] == {"a": [None, {"b": None}]}


# Secrets


def test_planted_secrets_are_nowhere_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment, the spec, the data's URL and the git remote (A-59, A-60)."""
    password, opaque = "pw" + "5up3rs3cr3t", "opaque-value-4711"
    home = tmp_path / "homes" / "zacharias"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "zacharias")
    monkeypatch.setenv("LOGNAME", "zacharias")
    monkeypatch.setenv("HOSTNAME", "gpu-17.cluster.example")
    monkeypatch.setenv("SERVICE_TOKEN", opaque)
    monkeypatch.setenv("NCCL_NOTE", TOKEN)
    monkeypatch.setenv("NCCL_TOPO_FILE", str(home / "topo.xml"))
    monkeypatch.setenv("DATASET_PATH", f"https://zacharias:{password}@host/d.jsonl")
    remote = environment.redact(f"https://bot:{password}@host/a/b.git")
    state = GitState(commit="0" * 40, dirty=False, diff_sha256=None, remote=remote)
    monkeypatch.setattr(environment, "git_state", lambda _: state)

    folder, resolved = run_folder(tmp_path / "run", os.environ, (f"training.load_path={home}/ckpt/{TOKEN}",))
    results = {"note": f"see {home}/x on gpu-17", "cause": f"bad {opaque}", "argv": ["--api-key", "unknown1"]}
    manifest.write(folder, resolved, results, environ=os.environ, gpus=NO_GPUS)

    everything = "\n".join(file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file())
    for secret in (TOKEN, password, opaque, "unknown1"):
        assert secret not in everything
    text = (folder / "manifest.json").read_text()
    for identity in ("zacharias", "gpu-17", "cluster.example", str(home)):
        assert identity not in text
    content = json.loads(text)
    assert content["dcpbench"]["git"]["remote"] == "https://host/a/b.git"
    assert content["results"]["note"] == "see ~/x on [host]"
    assert content["spec"]["data"]["path"] == "https:/host/d.jsonl"
    assert content["controls"]["environment"]["NCCL_TOPO_FILE"] == "~/topo.xml"
    assert "NCCL_NOTE" not in content["controls"]["environment"]
    assert manifest.check(folder) == []


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("launches/01-dcp/stdout.log", f"a\nb {TOKEN}\nc {TOKEN}\n", "launches/01-dcp/stdout.log line 2: "
         "Hugging Face token"),
        ("analysis/report.md", "see https://u:pw@h/x", "analysis/report.md line 1: credential in a URL"),
        ("analysis/aligned.parquet", f"PAR1\0{TOKEN}", "analysis/aligned.parquet: Hugging Face token"),
    ],
)  # fmt: skip
def test_check_finds_planted_secrets(tmp_path: Path, name: str, content: str, problem: str) -> None:
    folder, resolved = run_folder(tmp_path / "run")
    (folder / name).write_text(content)
    manifest.write(folder, resolved, RESULTS, environ={}, gpus=NO_GPUS)
    assert manifest.check(folder) == [problem]


def test_check_finds_a_secret_behind_the_first_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "_BLOCK", 64)
    folder, resolved = run_folder(tmp_path / "run")
    (folder / "launches/01-dcp/stdout.log").write_text("ordinary line\n" * 100 + f"x {TOKEN}\n")
    manifest.write(folder, resolved, RESULTS, environ={}, gpus=NO_GPUS)
    assert manifest.check(folder) == ["launches/01-dcp/stdout.log line 101: Hugging Face token"]


def test_check_finds_names_in_the_manifest(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content["results"]["note"] = "/home/carol/run"
    path.write_text(json.dumps(content))
    (problem,) = manifest.check(folder)
    assert problem.endswith("home directory")


# Check


def test_check_hashes_again(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    (folder / "launches/01-dcp/stdout.log").write_text("changed\n")
    (folder / "analysis/statistics.json").write_text("{}")
    (folder / "launches/02-dcp/records.jsonl").unlink()
    (folder / "launches/03-dcp").mkdir()
    (folder / "launches/03-dcp/records.jsonl").write_text("")
    assert manifest.check(folder) == [
        "analysis/statistics.json: the file is not the one that the manifest lists; `dcpbench analyze` computes it "
        "again and refreshes the manifest",
        "launches/01-dcp/stdout.log: the file is not the one that the manifest lists",
        "launches/02-dcp/records.jsonl: the file is gone",
        "launches/03-dcp/records.jsonl: the file is not in the manifest",
    ]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda c: c.pop("versions"), "manifest.json: versions: missing"),
        (lambda c: c.update(extra=1), "manifest.json: extra: extra forbidden"),
        (lambda c: c.update(schema_version=2), "manifest.json: schema_version: literal error"),
        (lambda c: c["launches"][0].update(pair="x"), "manifest.json: launches.0.pair: int parsing"),
        (lambda c: c["dcpbench"].update(git={"commit": "main", "dirty": False, "diff_sha256": None, "remote": None}),
         "manifest.json: dcpbench.git.commit: string pattern mismatch"),
    ],
)  # fmt: skip
def test_check_validates_the_schema(tmp_path: Path, damage: Any, problem: str) -> None:
    folder = written(tmp_path / "run")
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    assert manifest.check(folder) == [problem]
    with pytest.raises(LogError, match="is not a manifest of this version"):
        manifest.read(folder)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "line 1 is not JSON"),
        (b'{"a": NaN}', "it holds NaN, which is no JSON"),
        (b"\xff", "it is not UTF-8 text"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b"[]", "the document: model type"),
    ],
)
def test_damaged_manifest(tmp_path: Path, text: bytes, problem: str) -> None:
    folder = written(tmp_path / "run")
    (folder / "manifest.json").write_bytes(text)
    assert manifest.check(folder)[0] == f"manifest.json: {problem}"
    with pytest.raises(LogError):
        manifest.refresh_results(folder, {})
    assert (folder / "manifest.json").read_bytes() == text


def test_no_manifest(tmp_path: Path) -> None:
    folder, _ = run_folder(tmp_path / "run")
    for function in (manifest.check, manifest.read):
        with pytest.raises(LogError, match="cannot be read"):
            function(folder)
    assert manifest.refresh_results(folder, {}) is False
    assert not (folder / "manifest.json").exists()


# Refresh


def test_refresh_changes_results_and_analysis_only(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    before = manifest.read(folder)
    (folder / "analysis/statistics.json").write_text('{"new": 1}')
    (folder / "analysis/report.md").write_text("# report\n")
    (folder / "analysis/aligned.parquet").unlink()
    assert manifest.refresh_results(folder, {"verdict": "failed", "bad": math.nan, "hf_token": TOKEN})
    after = manifest.read(folder)
    assert after.results == {"verdict": "failed", "bad": None, "hf_token": "[redacted]"}
    assert after.refreshed is not None
    assert manifest.check(folder) == []
    assert "analysis/aligned.parquet" not in after.artifacts
    assert before.model_dump(exclude={"results", "artifacts", "refreshed"}) == after.model_dump(
        exclude={"results", "artifacts", "refreshed"}
    )


def test_refresh_does_not_bless_a_changed_launch(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    (folder / "launches/01-dcp/records.jsonl").write_text("")
    assert manifest.refresh_results(folder, RESULTS)
    assert manifest.check(folder) == ["launches/01-dcp/records.jsonl: the file is not the one that the manifest lists"]


def test_a_failed_write_leaves_the_earlier_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "run")
    before = (folder / "manifest.json").read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        manifest.refresh_results(folder, {"verdict": "other"})
    assert (folder / "manifest.json").read_bytes() == before
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("x")
    folder, resolved = run_folder(tmp_path / "run")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    made = manifest.write(folder, resolved, RESULTS, environ={}, gpus=NO_GPUS)
    assert "link.txt" not in made.artifacts
    assert manifest.check(folder) == []
