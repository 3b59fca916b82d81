"""Commit, packages and machine: what the manifest says, and what it never says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from dcpbench import environment
from dcpbench.checks.gpus import Gpu, GpuSurvey
from dcpbench.environment import git_state, probe


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a package in it; returns the package's folder."""
    package = tmp_path / "repo" / "package"
    package.mkdir(parents=True)
    git(package.parent, "init", "-q")
    (package / "__init__.py").write_text("x = 1\n")
    (package.parent / ".gitignore").write_text("*.pyc\n")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "first")
    return package


def test_a63_commit_of_a_changed_tree(checkout: Path) -> None:
    clean = git_state(checkout)
    assert clean is not None
    assert clean.commit == git(checkout, "rev-parse", "HEAD")
    assert len(clean.commit) == 40
    assert (clean.dirty, clean.diff_sha256, clean.remote) == (False, None, None)

    (checkout / "__init__.py").write_text("x = 2\n")
    dirty = git_state(checkout)
    assert dirty is not None
    assert dirty.dirty
    assert dirty.commit == clean.commit
    assert dirty.diff_sha256 is not None
    assert len(dirty.diff_sha256) == 64

    (checkout / "__init__.py").write_text("x = 3\n")
    other = git_state(checkout)
    assert other is not None
    assert other.diff_sha256 != dirty.diff_sha256

    (checkout / "__init__.py").write_text("x = 1\n")
    assert git_state(checkout) == clean


def test_a63_staged_and_untracked_files_count(checkout: Path) -> None:
    (checkout / "cache.pyc").write_text("ignored")
    (checkout.parent / "notes.txt").write_text("outside the package")
    clean = git_state(checkout)
    assert clean is not None
    assert not clean.dirty

    (checkout / "new.py").write_text("y = 1\n")
    untracked = git_state(checkout)
    assert untracked is not None
    assert untracked.dirty
    (checkout / "new.py").write_text("y = 2\n")
    changed = git_state(checkout)
    assert changed is not None
    assert changed.diff_sha256 != untracked.diff_sha256

    git(checkout, "add", "new.py")
    staged = git_state(checkout)
    assert staged is not None
    assert staged.dirty


def test_a63_outside_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__init__.py").write_text("")
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None


def test_installed_package_inside_someone_elses_checkout(checkout: Path) -> None:
    installed = checkout.parent / "venv" / "dcpbench"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert git_state(installed) is None


def test_repository_without_a_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "__init__.py").write_text("")
    git(tmp_path, "add", ".")
    assert git_state(tmp_path) is None


def test_variables_of_git_do_not_lead_elsewhere(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere/.git")
    state = git_state(checkout)
    assert state is not None


@pytest.mark.parametrize(
    ("remote", "shown"),
    [
        ("https://bot:TOKEN@host/a/b.git", "https://host/a/b.git"),
        ("git@host:a/b.git", "git@host:a/b.git"),
        ("/home/carol/mirror.git", "/home/[user]/mirror.git"),
    ],
)
def test_a59_token_in_the_remote(checkout: Path, remote: str, shown: str) -> None:
    git(checkout, "remote", "add", "origin", remote)
    state = git_state(checkout)
    assert state is not None
    assert state.remote == shown


def test_probe_names_no_host_user_or_home() -> None:
    gpus = GpuSurvey(gpus=(Gpu(name="GPU-1", model="H200", memory_bytes=5),), driver="580", interconnect="NVLink")
    found = probe({}, gpus)
    text = json.dumps(found, allow_nan=False)
    assert str(Path.home()) not in text
    assert f'"{socket.gethostname()}"' not in text
    assert "GPU-1" not in text  # a UUID is a serial number
    assert found["machine"]["gpus"] == [{"model": "H200", "memory_bytes": 5}]
    assert found["machine"]["driver"] == "580"
    assert found["machine"]["cpu"]["logical"] == os.cpu_count()
    assert found["machine"]["memory_bytes"] > 2**20


def test_package_versions_come_from_metadata() -> None:
    versions = environment.package_versions()
    assert {"torch", "numpy", "pydantic"} <= set(versions)
    assert set(versions) <= set(environment.PACKAGES)
