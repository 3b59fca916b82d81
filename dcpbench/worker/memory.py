"""Memory of this rank: how much it took, and what to say when there was not enough."""

from __future__ import annotations

import resource
import sys

import torch

from dcpbench.errors import LaunchError


def peak_memory(device: torch.device) -> float:
    """Bytes at the highest point so far: the allocator's on CUDA, the process's resident set on CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)


def reserved_memory(device: torch.device) -> float:
    """Bytes the allocator held at the highest point so far, free blocks included; 0 on CPU."""
    return float(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else 0.0


def settle(device: torch.device) -> None:
    """Gives back what setting up needed, and starts the peaks anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    start_peak(device)


def start_peak(device: torch.device) -> None:
    """Starts the peaks anew; on CPU they stay what they were."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def out_of_memory(where: str, error: torch.OutOfMemoryError, *lower: str) -> LaunchError:
    """The error that ends a launch for want of GPU memory: what was being done, and what to change."""
    asked = str(error).partition(". ")[2].partition(". ")[0]
    wanted = f" ({asked[0].lower()}{asked[1:]})" if asked else ""
    return LaunchError(f"out of GPU memory in {where}{wanted}; {', or '.join(lower)}")
