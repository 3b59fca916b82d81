"""The provenance document: what was run, on what, in which order, and what came out. Written whole or not at all.

`manifest.json` is strict JSON with sorted keys. Everything in it passed `redact_value`: no credential, no
home directory, no user or host name. `refresh_results` changes the results and the hashes of
`analysis/`, nothing else; hashes of launches are taken once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from dcpbench import environment
from dcpbench.checks.gpus import GpuSurvey
from dcpbench.config import ResolvedSpec
from dcpbench.errors import LogError
from dcpbench.megatron import probe
from dcpbench.megatron.environment import settings as megatron_settings
from dcpbench.provenance.schema import SCHEMA_VERSION, Artifact, Manifest
from dcpbench.redact import allowed_environment, redact_value
from dcpbench.runfolder import artifacts
from dcpbench.runfolder.launched import launches, loaded_versions
from dcpbench.runfolder.layout import RunFolder, write_text
from dcpbench.spec import Spec
from dcpbench.stats.bootstrap import SEED


def build(
    folder: Path,
    resolved: ResolvedSpec,
    results: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    gpus: GpuSurvey | None = None,
) -> Manifest:
    """The manifest of a run folder as it lies there: ledger, records, data and every file are read.

    Args:
        folder: the run folder, with its analysis written.
        resolved: the spec and the source of each value.
        results: JSON values, such as `statistics.json`; what is not finite becomes null.
        environ: the environment of the run; only allowed names are kept.
        gpus: saves asking the driver again.
    """
    run = RunFolder(folder)
    spec = resolved.spec
    probed = environment.probe(environ, gpus)
    launched = launches(run)
    data = _data_identity(run.data)
    content = {
        "schema_version": SCHEMA_VERSION,
        "created": _now(),
        "dcpbench": probed["dcpbench"],
        "megatron": _checkout(spec),
        "spec": spec.model_dump(mode="json"),
        "sources": resolved.sources,
        "launches": [launch.model_dump() for launch in launched],
        "topology": {
            **spec.topology.model_dump(include={"nodes", "gpus_per_node", "tp", "cp", "pp"}),
            **{name: getattr(spec.topology, name) for name in ("world_size", "dp", "domain_size")},
        },
        "machine": probed["machine"],
        "versions": {
            "packages": probed["packages"],
            "workers": loaded_versions(run, {launch.id: None for launch in launched}),
        },
        "data": data,
        "tokenizer": (data or {}).get("tokenizer"),
        "checkpoint": None if spec.training.load_path is None else _checkpoint(spec.training.load_path),
        "controls": _controls(spec, [launch.id for launch in launched], environ),
        "artifacts": artifacts.hashes(folder),
        "results": results,
    }
    return Manifest.model_validate(redact_value(_finite(content)))


def store(folder: Path, manifest: Manifest) -> Manifest:
    """Write a manifest that was built before its run's reports: their hashes are taken now."""
    kept = {name: item for name, item in manifest.artifacts.items() if not name.startswith("analysis/")}
    whole = manifest.model_copy(update={"artifacts": kept | _analysis_artifacts(folder)})
    _store(folder, whole)
    return whole


def write(
    folder: Path,
    resolved: ResolvedSpec,
    results: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    gpus: GpuSurvey | None = None,
) -> Manifest:
    """`build`, and store it as `manifest.json`."""
    manifest = build(folder, resolved, results, environ=environ, gpus=gpus)
    _store(folder, manifest)
    return manifest


def _analysis_artifacts(folder: Path) -> dict[str, Artifact]:
    fresh = artifacts.hashes(folder, under="analysis")
    return {name: Artifact.model_validate(item) for name, item in fresh.items()}


def read(folder: Path) -> Manifest:
    """The stored manifest.

    Raises:
        LogError: there is none, or it is not a manifest of this schema.
    """
    path = RunFolder(folder).manifest
    try:
        return Manifest.model_validate(_parse(path.read_bytes()))
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise LogError(f"{path} is not a manifest of this version: {_schema_problems(error)[0]}") from None
    except ValueError as error:
        raise LogError(f"{path} is damaged: {error}") from None


def refresh_results(folder: Path, results: Mapping[str, Any]) -> bool:
    """Replace the results and the hashes of `analysis/`; false where the run has no manifest.

    Hashes of everything else stay as they were taken, so that a change to a launch still shows.

    Raises:
        LogError: the stored manifest is damaged; it is left as it is.
    """
    if not RunFolder(folder).manifest.is_file():
        return False
    old = read(folder)
    kept = {name: item.model_dump() for name, item in old.artifacts.items() if not name.startswith("analysis/")}
    fresh = {name: item for name, item in artifacts.hashes(folder).items() if name.startswith("analysis/")}
    content = old.model_dump(mode="json") | {
        "refreshed": _now(),
        "artifacts": kept | fresh,
        "results": redact_value(_finite(results)),
    }
    _store(folder, Manifest.model_validate(content))
    return True


def check(folder: Path) -> list[str]:
    """Everything that is wrong with a run folder's manifest, files and secrecy; one sentence each, none if all is well.

    Raises:
        LogError: there is no manifest to check.
    """
    path = RunFolder(folder).manifest
    problems: list[str] = []
    listed: Mapping[str, Any] = {}
    try:
        content = _parse(path.read_bytes())
        listed = content.get("artifacts", {}) if isinstance(content, dict) else {}
        Manifest.model_validate(content)
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        problems.extend(f"manifest.json: {problem}" for problem in _schema_problems(error))
    except ValueError as error:
        problems.append(f"manifest.json: {error}")
    problems.extend(artifacts.changed(folder, listed if isinstance(listed, dict) else {}))
    problems.extend(artifacts.secrets(folder))
    return problems


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _store(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, sort_keys=True, allow_nan=False)
    write_text(RunFolder(folder).manifest, text + "\n")


def _parse(text: bytes) -> Any:
    def refuse(name: str) -> NoReturn:
        raise ValueError(f"it holds {name}, which is no JSON")

    try:
        return json.loads(text.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} is not JSON") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _schema_problems(error: ValidationError) -> list[str]:
    return [
        f"{'.'.join(map(str, item['loc'])) or 'the document'}: {item['type'].replace('_', ' ')}"
        for item in error.errors(include_url=False, include_input=False, include_context=False)
    ]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _checkout(spec: Spec) -> dict[str, Any] | None:
    """The state of the Megatron-LM checkout; None for another runner, and where git does not know it."""
    if spec.runner != "megatron_lm" or spec.megatron.checkout is None:
        return None
    git = environment.git_state(spec.megatron.checkout / probe.GIT_FOLDER)
    return None if git is None else asdict(git)


def _data_identity(folder: Path) -> dict[str, Any] | None:
    try:
        content = _parse((folder / "data.json").read_bytes())
    except (OSError, ValueError):
        return None
    identity = content.get("identity") if isinstance(content, dict) else None
    return identity if isinstance(identity, dict) else None


def _checkpoint(path: Path) -> dict[str, Any] | None:
    """Name, size and a hash over names and contents of a checkpoint's files."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else []
    if not files:
        return None
    sha = hashlib.sha256()
    for file in files:
        sha.update(f"{file.relative_to(path).as_posix()}\0{artifacts.sha256(file)}\n".encode())
    return {
        "name": path.name,
        "sha256": sha.hexdigest(),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _controls(spec: Spec, launched: list[str], environ: Mapping[str, str]) -> dict[str, Any]:
    training, cases = spec.training, spec.cases
    set_by_runner = megatron_settings(spec) if spec.runner == "megatron_lm" else {}
    return {
        "iterations": training.iterations,
        "warmup_iterations": training.warmup_iterations,
        "global_batch_size": training.global_batch_size,
        "mode": spec.mode,
        "pairs": spec.lockstep.launches if spec.mode == "lockstep" else spec.launches.pairs,
        "order": spec.launches.order,
        "order_run": launched,
        "seeds": {"weights": training.seed, "data": getattr(spec.data, "seed", None), "bootstrap": SEED},
        "tolerances": spec.tolerances.model_dump(),
        "determinism": {
            "deterministic": training.deterministic,
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
            "CUBLAS_WORKSPACE_CONFIG": environ.get("CUBLAS_WORKSPACE_CONFIG"),
            **set_by_runner,
        },
        "schedulers": {"baseline": cases.baseline.scheduler, "dcp": cases.dcp.scheduler},
        "max_seqlen_per_dp_cp_rank": cases.max_seqlen_per_dp_cp_rank,
        "min_dynamic_context_parallel_size": cases.min_dynamic_context_parallel_size,
        "padding": cases.padding,
        "attention": cases.attention,
        "environment": allowed_environment({**environ, **set_by_runner}),
    }
