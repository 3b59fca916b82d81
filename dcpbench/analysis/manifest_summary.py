"""What a report repeats of the manifest: enough to tell two runs apart, in one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dcpbench import manifest as manifests
from dcpbench.errors import LogError
from dcpbench.provenance.schema import Git, Manifest
from dcpbench.runfolder.layout import RunFolder

Rows = tuple[tuple[str, str], ...]


def of_run(folder: Path) -> Rows:
    """The summary of a run folder's stored manifest; empty where it has none that can be read."""
    if not RunFolder(folder).manifest.is_file():
        return ()
    try:
        return summary(manifests.read(folder))
    except LogError:
        return ()  # `dcpbench manifest --check` says what is wrong with it


def summary(manifest: Manifest) -> Rows:
    """(what, value), the values as text."""
    return tuple((what, value) for what, value in _rows(manifest) if value)


def _rows(manifest: Manifest) -> Iterator[tuple[str, str]]:
    machine, controls, top = manifest.machine, manifest.controls, manifest.topology
    yield "started", next((launch.started for launch in manifest.launches), "")
    yield "dcpbench", f"{manifest.dcpbench.version}{_commit(manifest.dcpbench.git)}"
    yield "Megatron-LM", _commit(manifest.megatron).removeprefix(", ")
    yield "spec (SHA-256)", manifest.artifacts["spec.yaml"].sha256 if "spec.yaml" in manifest.artifacts else ""
    yield "values set beside the spec file", _overridden(manifest.sources)
    yield "launches", _launches(manifest)
    nodes = "one node" if top.nodes == 1 else f"{top.nodes} nodes"
    yield "ranks", f"{top.world_size} on {nodes}: TP {top.tp}, CP of the baseline {top.cp}, PP {top.pp}, DP {top.dp}"
    yield "GPUs", _gpus(machine)
    yield "CPU", _cpu(machine)
    # By name: keys are in another order once the manifest has been stored.
    system = machine.get("os") or {}
    yield "operating system", " ".join(str(system[name]) for name in ("system", "release", "architecture")
                                       if system.get(name))  # fmt: skip
    yield (
        "versions that the launches loaded",
        ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.workers.items())),
    )
    yield "data (SHA-256)", str((manifest.data or {}).get("content_sha256") or "")
    yield "samples", _samples(manifest.data)
    yield "tokenizer", _named(manifest.tokenizer)
    yield "checkpoint", _named(manifest.checkpoint)
    seeds = controls.get("seeds") or {}
    yield "seeds", ", ".join(f"{name} {seed}" for name, seed in sorted(seeds.items()) if seed is not None)
    determinism = controls.get("determinism") or {}
    yield "deterministic kernels asked for", "yes" if determinism.get("deterministic") else "no"
    environment = controls.get("environment") or {}
    yield "relevant environment", ", ".join(f"{name}={value}" for name, value in sorted(environment.items()))


def _commit(git: Git | None) -> str:
    if git is None:
        return ""
    changed = f", changed since (diff {git.diff_sha256[:12]})" if git.diff_sha256 else ", changed since"
    return f", commit {git.commit[:12]}{changed if git.dirty else ''}"


def _overridden(sources: Mapping[str, str]) -> str:
    found = sorted(
        f"{name} ({source})"
        for name, source in sources.items()
        if not source.startswith(("default", "file ")) and name != "output.dir"
    )
    return ", ".join(found)


def _launches(manifest: Manifest) -> str:
    states = Counter(launch.status for launch in manifest.launches)
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    order = " ".join(launch.id for launch in manifest.launches)
    return f"{counted}; in this order: {order}" if manifest.launches else ""


def _gpus(machine: Mapping[str, Any]) -> str:
    found = Counter(
        f"{gpu['model']} ({(gpu.get('memory_bytes') or 0) / 2**30:.0f} GiB)" for gpu in machine.get("gpus") or ()
    )
    models = ", ".join(f"{count} x {model}" for model, count in found.items())
    if not models:
        return "none"
    words = [models, f"driver {machine['driver']}" if machine.get("driver") else "", _text(machine.get("interconnect"))]
    return "; ".join(word for word in words if word)


def _cpu(machine: Mapping[str, Any]) -> str:
    cpu = machine.get("cpu") or {}
    memory = machine.get("memory_bytes") or 0
    return (
        f"{cpu.get('model') or 'unknown'}, {cpu.get('usable')} of {cpu.get('logical')} cores, {memory / 2**30:.0f} GiB"
    )


def _samples(data: Mapping[str, Any] | None) -> str:
    if not data:
        return ""
    return (
        f"{data['draws']:,} draws of {data['samples']:,} samples, {data['total_tokens']:,} tokens, lengths "
        f"{data['shortest']:,} to {data['longest']:,}, mean {data['mean_length']:,.1f} ({data['kind']})"
    )


def _named(identity: Mapping[str, Any] | None) -> str:
    return f"{identity.get('name')}, SHA-256 {identity.get('sha256')}" if identity else ""


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {word}" for key, word in value.items() if word)
    return str(value) if value else ""
