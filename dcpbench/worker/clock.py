"""Marks on the timeline of what computes: the device's current stream, or on CPU this process."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

Mark = torch.cuda.Event | float
"""An event on a stream, or seconds of a monotonic clock."""

_HEAD_START_CYCLES = 40_000_000
"""About 20 ms: as long as the host takes to queue the first layers of a microbatch, several times over."""


def mark(device: torch.device) -> Mark:
    """Here, behind everything that has been queued on the device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Waits until `end` has been reached; the time since `begin`, which lies before it on the same device."""
    if isinstance(end, float):
        assert isinstance(begin, float)
        return end - begin
    assert not isinstance(begin, float)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def meet(device: torch.device) -> None:
    """On CUDA: all ranks' devices come to this point at once, and then have a host that is ahead of them.

    As in the middle of a launch, whose host queues an iteration while the device works on the one before.
    """
    if device.type == "cuda":
        torch.cuda._sleep(_HEAD_START_CYCLES)
        if dist.get_world_size() > 1:
            dist.all_reduce(torch.zeros(1, device=device))
