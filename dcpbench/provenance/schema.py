"""The schema of `manifest.json`: version 1. Keys may be added to it, none changes its meaning."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
_HASH = r"^[0-9a-f]{64}$"


class Part(BaseModel):
    """A part of the manifest: no unknown keys, nothing that JSON cannot hold, no input echoed in errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)


class Git(Part):
    """A checkout that something ran from; `diff_sha256` where it was changed since the commit."""

    commit: str = Field(pattern=r"^[0-9a-f]{40,64}$")
    dirty: bool
    diff_sha256: str | None = Field(pattern=_HASH)
    remote: str | None


class Program(Part):
    """dcpbench itself; `git` is null for a copy that was not run from a checkout."""

    version: str
    git: Git | None


class LaunchFacts(Part):
    """One launch as it happened; an id that was started twice is there twice.

    `status` is completed, failed, timeout or interrupted, and unfinished where no end was written.
    `worker` is what the launch said of itself.
    """

    id: str
    case: str | None
    pair: int | None
    started: str
    ended: str | None
    status: str
    exit_code: int | None
    reason: str | None
    worker: dict[str, Any] | None


class TopologyFacts(Part):
    """Ranks and how they were divided."""

    nodes: int
    gpus_per_node: int
    world_size: int
    tp: int
    cp: int
    pp: int
    dp: int
    domain_size: int


class Versions(Part):
    """`packages`: installed distributions; `workers`: what the launches loaded (torch, CUDA, NCCL, cuDNN, ...)."""

    packages: dict[str, str]
    workers: dict[str, str]


class Artifact(Part):
    """A file of the run folder."""

    sha256: str = Field(pattern=_HASH)
    bytes: int = Field(ge=0)


class Manifest(Part):
    """The whole document. `refreshed` is when the results were computed again, if they were.

    `megatron` is the checkout that `runner: megatron_lm` ran.
    """

    schema_version: Literal[1]
    created: str
    refreshed: str | None = None
    dcpbench: Program
    megatron: Git | None = None
    spec: dict[str, Any]
    sources: dict[str, str]
    launches: list[LaunchFacts]
    topology: TopologyFacts
    machine: dict[str, Any]
    versions: Versions
    data: dict[str, Any] | None
    tokenizer: dict[str, Any] | None
    checkpoint: dict[str, Any] | None
    controls: dict[str, Any]
    artifacts: dict[str, Artifact]
    results: dict[str, Any]
