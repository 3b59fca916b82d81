"""Peak memory of this rank."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory(device: torch.device) -> float:
    """Bytes at the highest point so far: the allocator's on CUDA, the process's resident set on CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)
