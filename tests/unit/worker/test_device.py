"""The device of a rank: what was asked for, or one sentence; never CPUs in place of GPUs without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcpbench.errors import PreflightError
from dcpbench.worker.device import device_of


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the driver's device file is there."""
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl" or exists(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def without_cuda(monkeypatch: pytest.MonkeyPatch, built: bool) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("wanted", ["cuda", "auto"])
def test_gpus_that_torch_was_not_built_for_are_named(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    without_cuda(monkeypatch, built=False)
    with pytest.raises(PreflightError, match=rf"topology.device is {wanted}, but torch .* is built without CUDA"):
        device_of(wanted)
    assert device_of("cpu").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_of("auto").type == "cpu"


def test_without_gpus_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch, built=True)
    assert device_of("auto").type == "cpu"
    with pytest.raises(PreflightError, match="torch sees no GPU; set topology"):
        device_of("cuda")
