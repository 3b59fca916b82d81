"""The device of a rank, and the type it computes in."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dcpbench.errors import PreflightError


def device_of(wanted: str) -> torch.device:
    """The rank's device.

    Raises:
        PreflightError: a GPU is asked for, or there is one to be used, and torch cannot use it.
    """
    # One that is there and that torch was not built for must not become a run on CPUs without a word.
    there = wanted == "cuda" or (Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "")
    if there and wanted != "cpu" and not torch.backends.cuda.is_built():
        raise PreflightError(
            f"topology.device is {wanted}, but torch {torch.__version__} is built without CUDA; install a build "
            "with it, or set topology.device to cpu"
        )
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PreflightError("topology.device is cuda, but torch sees no GPU; set topology.device to cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def dtype_of(wanted: str, device: torch.device) -> torch.dtype:
    """The compute type of a spec; `auto` is bfloat16 on GPUs and float32 on CPUs."""
    if wanted == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]
