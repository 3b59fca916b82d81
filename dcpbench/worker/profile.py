"""Profiles of chosen iterations: torch's trace, and where the time went."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dcpbench import profiles
from dcpbench.profiles import PARTS, ProfiledIteration

_MARK = "dcpbench iteration"

KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"adamw|Optimizer\.(step|zero)", re.IGNORECASE)),
    ("loss", re.compile(r"cross_entropy|LinearCrossEntropy|logsumexp|log_softmax", re.IGNORECASE)),
    (
        "communication",
        re.compile(
            r"nccl|gloo|c10d|record_param_comms|all_?reduce|all_?gather|reduce_?scatter|barrier_kernel|"
            r"(put|wait)_signal|^_(put|pick|add_up|signal_and_wait)$",
            re.IGNORECASE,
        ),
    ),
    (
        "attention",
        re.compile(
            r"flash|fmha|sdpa|scaled_dot_product|attention|cudnn_generated|^_(Gathered|Overlapped)|^_(merge|add_rows)$",
            re.IGNORECASE,
        ),
    ),
    ("gemm", re.compile(r"gemm|nvjet|cutlass|cublas|xmma|splitk|wgmma|^aten::(mm|addmm|bmm|baddbmm)$", re.IGNORECASE)),
)
"""What the name of a kernel (or, on CPU, of an operator) tells of its purpose; the first that matches counts."""

_HOST = re.compile(r"^(aten::|c10d::|gloo:|nccl:|Optimizer\.|_(Gathered|LinearCrossEntropy))")
"""Operators on the CPU that do something themselves; the others only wrap them."""


class Event(NamedTuple):
    """A kernel on a stream of the device, or on CPU an operator on a thread. Times in seconds."""

    name: str
    start: float
    end: float
    stream: int


def kind(name: str) -> str:
    """The purpose of a kernel: one of `optimizer loss communication attention gemm other`."""
    return next((label for label, pattern in KINDS if pattern.search(name)), "other")


def breakdown(events: Iterable[Event], begin: float, end: float) -> tuple[dict[str, float], float]:
    """(time for each of `profiles.PARTS` in [begin, end], all communication); the parts add up to end - begin.

    Where streams, or operators inside operators, run at once, the first of PARTS counts.
    """
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        start, stop = max(event.start, begin), min(event.end, end)
        if start < stop:
            by_kind.setdefault(kind(event.name), []).append((start, stop))
    parts = dict.fromkeys(PARTS, 0.0)
    free = [(begin, end)] if begin < end else []
    for part in PARTS[:-1]:
        covered = union(by_kind.get("communication" if part == "exposed_communication" else part, []))
        left = subtract(free, covered)
        parts[part] = _length(free) - _length(left)
        free = left
    parts["idle"] = _length(free)
    return parts, _length(union(by_kind.get("communication", [])))


def union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same points as disjoint intervals in order."""
    result: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], stop))
        else:
            result.append((start, stop))
    return result


def subtract(intervals: list[tuple[float, float]], holes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """`intervals` without `holes`; both disjoint and in order, and so is the result."""
    result: list[tuple[float, float]] = []
    first = 0
    for start, stop in intervals:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        position, at = first, start
        while position < len(holes) and holes[position][0] < stop:
            if holes[position][0] > at:
                result.append((at, holes[position][0]))
            at = max(at, holes[position][1])
            position += 1
        if at < stop:
            result.append((at, stop))
    return result


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in intervals)


class Profiler:
    """Profiles the iterations it was told to, and nothing between them."""

    def __init__(self, folder: Path, rank: int, iterations: Collection[int], device: torch.device) -> None:
        self._folder, self._rank, self._iterations, self._device = folder, rank, frozenset(iterations), device
        self._profile: profile | None = None
        self._mark: record_function | None = None
        if iterations:
            folder.mkdir(parents=True, exist_ok=True)

    def wants(self, iteration: int) -> bool:
        """Whether this iteration is to be profiled."""
        return iteration in self._iterations

    def start(self, iteration: int) -> None:
        """To be called right before an iteration, with nothing left to do for the device."""
        if not self.wants(iteration):
            return
        cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *cuda])
        self._profile.start()
        self._mark = record_function(_MARK)
        self._mark.__enter__()

    def stop(self, iteration: int, scheduling_seconds: float) -> None:
        """To be called when the device has finished the iteration."""
        if self._profile is None or self._mark is None:
            return
        self._mark.__exit__(None, None, None)
        self._profile.stop()
        found = self._profile
        self._profile = self._mark = None
        found.export_chrome_trace(str(profiles.trace_file(self._folder, self._rank, iteration)))
        seconds, events = _events(found, self._device.type == "cuda")
        parts, communication = breakdown(events, 0.0, seconds)
        profiles.write(
            self._folder,
            ProfiledIteration(
                self._rank, iteration, seconds, parts, communication, scheduling_seconds, self._device.type
            ),
        )


def _events(found: profile, cuda: bool) -> tuple[float, list[Event]]:
    """(seconds the iteration took, what ran on the device, in seconds since it began)."""
    assert found.profiler is not None
    results: Any = found.profiler.kineto_results
    recorded = results.events()
    # On CUDA the mark appears on the device's timeline too; the host's contains the waiting at the end.
    mark = next(event for event in recorded if event.name() == _MARK and _on_host(event))
    origin = mark.start_ns()  # nanoseconds since 1970 do not fit a float
    events = []
    for event in recorded:
        name = event.name()
        if _on_host(event) == cuda or name == _MARK or not (cuda or _HOST.match(name)):
            continue
        if cuda and event.is_user_annotation():
            continue  # a range on the device's timeline, gaps included, around kernels that are there themselves
        start = (event.start_ns() - origin) * 1e-9
        stream = event.device_resource_id() if cuda else event.start_thread_id()
        events.append(Event(name, start, start + event.duration_ns() * 1e-9, stream))
    return mark.duration_ns() * 1e-9, events


def _on_host(event: Any) -> bool:
    return bool(event.device_type().name == "CPU")
