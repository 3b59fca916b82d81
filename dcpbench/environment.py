"""What a run stood on: commit, packages, machine. Plain data that name no host, no user and no home directory.

The versions of CUDA, NCCL and cuDNN that torch loaded are the workers' to report (`RunHeader.versions`): the
orchestrating process never imports torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from dcpbench import __version__
from dcpbench.checks.gpus import GpuSurvey, survey
from dcpbench.redact import redact

PACKAGES = (
    "torch",
    "triton",
    "transformer-engine",
    "transformer-engine-torch",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
    "flash-attn",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cublas-cu12",
    "nvidia-cublas",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-runtime",
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "pydantic",
    "transformers",
    "tokenizers",
    "numba",
)
"""Distributions whose version the manifest holds where they are installed."""

_GIT_LIMIT = 30.0


@dataclass(frozen=True, kw_only=True)
class GitState:
    """The commit that files come from, and whether they were changed since.

    `diff_sha256` is over the difference to the commit and over untracked files of the package; None when clean.
    """

    commit: str
    dirty: bool
    diff_sha256: str | None
    remote: str | None


def probe(environ: Mapping[str, str], gpus: GpuSurvey | None = None) -> dict[str, Any]:
    """Everything, as JSON values: `dcpbench` (version, git), `packages`, `machine`.

    `gpus` saves asking the driver a second time.
    """
    git = git_state(Path(__file__).resolve().parent)
    return {
        "dcpbench": {"version": __version__, "git": None if git is None else asdict(git)},
        "packages": package_versions(),
        "machine": machine(survey(environ) if gpus is None else gpus),
    }


def git_state(package: Path) -> GitState | None:
    """The state of the checkout that a package's folder belongs to.

    None without git, outside a checkout, before the first commit, and for a package that was only
    installed into a folder of someone else's checkout.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(package, "rev-parse", "--verify", "HEAD^{commit}")
    top = _git(package, "rev-parse", "--show-toplevel")
    if commit is None or top is None:
        return None
    root = Path(os.fsdecode(top).rstrip("\n"))
    diff = _git(root, "diff", "HEAD", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv")
    others = _git(package, "ls-files", "--others", "--exclude-standard", "-z", "--full-name", ".")
    untracked = sorted(os.fsdecode(name) for name in (others or b"").split(b"\0") if name)
    dirty = diff != b"" or bool(untracked)
    remote = _git(root, "config", "--get", "remote.origin.url")
    return GitState(
        commit=commit.decode().strip(),
        dirty=dirty,
        # A tree that git could not compare counts as changed, without a digest that would say nothing.
        diff_sha256=_diff_digest(diff, root, untracked) if dirty and diff is not None else None,
        remote=redact(os.fsdecode(remote).strip()) if remote else None,
    )


def _diff_digest(diff: bytes, root: Path, untracked: list[str]) -> str:
    sha = hashlib.sha256(diff)
    for name in untracked:
        sha.update(os.fsencode(f"\0{name}\0"))
        try:
            sha.update((root / name).read_bytes())
        except OSError:
            sha.update(b"unreadable")
    return sha.hexdigest()


def _git(folder: Path, *arguments: str) -> bytes | None:
    # GIT_DIR and its like would make git answer about another checkout.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=true", *arguments],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_LIMIT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def package_versions() -> dict[str, str]:
    """Versions of the installed distributions of `PACKAGES`, from their metadata; nothing is imported."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine(gpus: GpuSurvey) -> dict[str, Any]:
    """CPU, memory, operating system, Python and GPUs."""
    return {
        "cpu": {
            "model": _cpu_model(),
            "logical": os.cpu_count(),
            "physical": psutil.cpu_count(logical=False),
            "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "os": {"system": platform.system(), "release": platform.release(), "architecture": platform.machine()},
        "python": platform.python_version(),
        "gpus": [{"model": gpu.model, "memory_bytes": gpu.memory_bytes} for gpu in gpus.gpus],
        "driver": gpus.driver,
        "interconnect": gpus.interconnect,
    }


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "cpu model", "Model"):
            return value.strip()
    return platform.processor() or None
