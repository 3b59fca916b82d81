"""Times the microbatches of a calibration, forward and backward as in training, on all groups of a size at once."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from dcpbench.data.stream import SampleStream
from dcpbench.data.tokens import Zipf
from dcpbench.dcp.attention.backend import Backend
from dcpbench.dcp.groups import RuntimeGroups
from dcpbench.dcp.packing import RankPack, pack_rank
from dcpbench.dcp.timings import FILE, Calibration, Point, Timing, Timings
from dcpbench.dcp.workload import PaddingRule
from dcpbench.worker.batches import stage
from dcpbench.worker.clock import mark, seconds_between
from dcpbench.worker.loop import forward_backward
from dcpbench.worker.memory import out_of_memory, settle
from dcpbench.worker.model import GPT
from dcpbench.worker.warming import warm

BURST_SECONDS, MOST_IN_BURST = 0.1, 4
"""Short microbatches are timed several in a row, as training runs them: the host queues one while the device works
on another, so their time is that of whichever is slower."""
LED_SECONDS = 0.15
"""Shorter microbatches are timed behind one that is not: a device that begins idle waits for its first kernels."""
LEAST_REPETITIONS, MOST_REPETITIONS = 3, 9
"""Of bursts. One is enough of a microbatch that is long enough to be timed alone: its repetitions differ by 0.2 %."""


class Timer:
    """Times points on this rank together with all others; every rank must time the same points in the same order."""

    def __init__(
        self, model: GPT, attention: Backend, groups: RuntimeGroups, padding: PaddingRule, device: torch.device
    ) -> None:
        self._model, self._attention, self._groups = model, attention, groups
        self._padding, self._device = padding, device
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def time_all(self, calibration: Calibration, folder: Path) -> None:
        """Times every point; rank 0 writes the answer to `folder`. Gradients hold sums of no meaning afterwards."""
        packs = self._packs(calibration.points)
        warm(self._model, self._attention, [pack.layout for pack in packs if pack is not None])
        settle(self._device)
        end = time.perf_counter() + calibration.seconds
        timings = []
        for number, (point, pack) in enumerate(zip(calibration.points, packs, strict=True)):
            left = len(packs) - number
            try:
                timing = self._time(point, pack, self._agreed(end - time.perf_counter()) / left)
            except torch.OutOfMemoryError as error:
                what = f"calibration of {sum(point.lengths)} tokens on a CP group of {point.size}"
                raise out_of_memory(what, error, "lower cases.max_seqlen_per_dp_cp_rank") from None
            timings.append(timing)
            if self._rank == 0:
                sys.stdout.write(
                    f"dcpbench calibration {number + 1}/{len(packs)} | {point.kind}, cp {point.size}, "
                    f"{sum(point.lengths)} tokens: {1e3 * timing.seconds:.3f} ms, {timing.repetitions} repetitions |\n"
                )
                sys.stdout.flush()
        if self._rank == 0:
            answer = Timings(backend=self._attention.name, timings=tuple(timings))
            (folder / FILE).write_text(answer.model_dump_json(), encoding="utf-8")

    def _first(self, size: int) -> int | None:
        """The first rank of this rank's group; None where the domain's remainder leaves it without one."""
        first = self._rank // size * size
        return first if first + size <= self._world else None

    def _packs(self, points: tuple[Point, ...]) -> list[RankPack | None]:
        lengths = np.concatenate([np.array(point.lengths, np.int64) for point in points])
        tokens = Zipf(self._model.config.vocab_size, 0)
        reader = SampleStream(lengths, lengths - 1, tokens, global_batch_size=len(lengths), iterations=1)
        packs: list[RankPack | None] = []
        begin = 0
        for point in points:
            positions = range(begin, begin + len(point.lengths))
            begin = positions.stop
            first = self._first(point.size)
            if first is None:
                packs.append(None)
                continue
            own = lengths[positions.start : positions.stop]
            packs.append(pack_rank(reader, list(positions), own, self._padding, point.size, self._rank - first))
        return packs

    def _time(self, point: Point, pack: RankPack | None, share: float) -> Timing:
        self._burst(point, pack, 1, 0)  # compiles kernels and grows the allocator
        once = self._agreed(self._burst(point, pack, 1, 0))
        lead = int(once < LED_SECONDS)
        burst = int(min(max(round(BURST_SECONDS / once), 1), MOST_IN_BURST))
        least = LEAST_REPETITIONS if lead else 1
        repetitions = int(min(max(share / ((burst + lead) * once), least), MOST_REPETITIONS))
        own = [] if lead else [once]
        while len(own) < repetitions:
            own.append(self._burst(point, pack, burst, lead) / burst)
        low, median, high = np.percentile(own, (25, 50, 75)).tolist()
        slowest = self._agreed(median)
        return Timing(seconds=slowest, repetitions=repetitions, spread=self._agreed((high - low) / 2 / median))

    def _burst(self, point: Point, pack: RankPack | None, count: int, lead: int) -> float:
        """Seconds of `count` microbatches in a row on this rank, after `lead` others that begin when all are ready."""
        staged = []
        if pack is not None:
            first = self._first(point.size)
            assert first is not None
            group = self._groups.of(first, point.size)
            # An attention serves one microbatch; batches are prepared ahead in training, too.
            staged = [stage(pack, group, self._attention, self._device) for _ in range(lead + count)]
        dist.all_reduce(torch.ones(1, device=self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        begin = mark(self._device)
        for number, each in enumerate(staged):
            if number == lead:
                begin = mark(self._device)
            forward_backward(self._model, each, None)
        # A rank without a group takes no time, which is never the slowest.
        return max(seconds_between(begin, mark(self._device)), 1e-9)

    def _agreed(self, value: float) -> float:
        """The greatest of all ranks' values, for decisions that all must make alike."""
        shared = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return float(shared.item())
