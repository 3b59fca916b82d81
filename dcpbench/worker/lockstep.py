"""Both cases in one process: every global batch under either plan, at the same weights, then one update.

A *pass* is forward, backward and the sum of gradients over ranks under one case's plan. It is timed as an
iteration of a launch is: on the device's clock, from where all ranks have met to the end of the sum, with a
host that is ahead of the device. Everything else lies between the passes and is in nobody's time: waiting for
batches, sketching and keeping gradients, the sums of statistics.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from dcpbench import records
from dcpbench.plan import CaseName, Launch, places
from dcpbench.worker.batches import Prefetcher, StagedBatch
from dcpbench.worker.clock import Mark, mark, meet, seconds_between
from dcpbench.worker.emit import RankMeasurement, RecordWriter, Statistics, check, record_of
from dcpbench.worker.loop import Trainer, compute
from dcpbench.worker.memory import peak_memory, reserved_memory, settle, start_peak
from dcpbench.worker.optimizer import learning_rate
from dcpbench.worker.parameters import FlatParameters
from dcpbench.worker.sketch import GradientComparison, GradientSketcher, compare, own_parts

UPDATE_FROM: CaseName = "baseline"
"""Whose gradient every update is made from, whichever case came first: the weights are those of a baseline launch."""

Batches = dict[CaseName, StagedBatch]


@dataclass(frozen=True)
class Pass:
    """One case's share of an iteration on this rank."""

    staged: StagedBatch
    place: int
    """1 or 2."""
    loss_sum: Tensor
    begin: Mark
    end: Mark
    """Of the pass, without the update."""
    peak_memory_bytes: float
    reserved_memory_bytes: float

    def measured(self) -> RankMeasurement:
        """What this rank measured; waits for the end of the pass."""
        host = self.staged.host
        seconds, digest = seconds_between(self.begin, self.end), float(int(host.plan.digest()[:12], 16))
        memory = self.peak_memory_bytes, self.reserved_memory_bytes
        return RankMeasurement(seconds, host.scheduling_seconds, *memory, digest, time.time())


class KeptGradient:
    """A summed gradient kept while the next one is computed in the same buffer: on each rank its part only."""

    def __init__(self, flat: FlatParameters, rank: int, world: int) -> None:
        self._flat = flat
        self._parts = [part for _, part in own_parts(flat, rank, world)]
        self._kept = torch.empty(
            sum(part.stop - part.start for part in self._parts), dtype=flat.grad.dtype, device=flat.grad.device
        )

    def keep(self) -> None:
        """Keeps what the buffer holds."""
        self._copy(back=False)

    def put_back(self) -> None:
        """Makes the buffer what it was; collective unless gradients are sharded."""
        if self._flat.shards > 1:
            self._copy(back=True)  # no optimizer reads the other parts
            return
        self._flat.grad.zero_()
        self._copy(back=True)
        if dist.get_world_size() > 1:
            dist.all_reduce(self._flat.grad)  # each element has one rank that holds it, so this adds zeros

    def _copy(self, *, back: bool) -> None:
        offset = 0
        for part in self._parts:
            kept = self._kept[offset : offset + part.stop - part.start]
            offset += len(kept)
            if back:
                self._flat.grad[part].copy_(kept)
            else:
                kept.copy_(self._flat.grad[part])


class LockstepEmitter:
    """Writes the records of a lockstep launch: a header for each case, then two records for each iteration."""

    def __init__(self, launch: Launch, headers: dict[CaseName, records.RunHeader]) -> None:
        self._headers = headers
        self._consumed_tokens = 0
        self._writer = RecordWriter(launch.records)
        for header in headers.values():
            self._writer.header(header)

    def iteration(
        self,
        passes: dict[CaseName, Pass],
        totals: dict[CaseName, tuple[float, int, list[RankMeasurement]]],
        updates: list[float],
        gradients: GradientComparison,
        rate: float,
    ) -> None:
        """Writes one iteration; `updates` are the ranks' seconds of the update that both cases share.

        Raises:
            RuntimeError: the ranks planned differently, or trained on another number of tokens than the data has.
        """
        for case, (_, token_count, ranks) in totals.items():
            check(passes[case].staged.host, token_count, ranks)
        self._consumed_tokens += int(passes[UPDATE_FROM].staged.host.lengths.sum())
        if not self._writer.writes:
            return
        for case, header in self._headers.items():
            loss_sum, token_count, ranks = totals[case]
            whole = [replace(rank, seconds=rank.seconds + update) for rank, update in zip(ranks, updates, strict=True)]
            norm, batch = gradients.norms[case] / token_count, passes[case].staged.host
            record = replace(
                record_of(header, batch, self._consumed_tokens, loss_sum, norm, rate, whole),
                case=case,
                order=passes[case].place,
                pass_seconds=max(rank.seconds for rank in ranks),
                update_seconds=max(updates),
                gradient_difference=gradients.difference,
                gradient_segment=gradients.segment,
                gradient_sketch=gradients.sketches[case],
            )
            self._writer.iteration(record, header.iterations)

    def end(self, seconds: float) -> None:
        """Marks the launch as complete."""
        self._writer.end(self._headers[UPDATE_FROM].iterations, seconds)

    def close(self) -> None:
        """Closes the file; without `end` the launch counts as incomplete."""
        self._writer.close()


def train(
    trainer: Trainer, flat: FlatParameters, launch: Launch, batches: Prefetcher[Batches], emitter: LockstepEmitter
) -> None:
    """Runs every iteration of a lockstep launch."""
    training, device = launch.spec.training, trainer.device
    rank, world = dist.get_rank(), dist.get_world_size()
    statistics = Statistics(device)
    sketch, kept = GradientSketcher(flat, rank, world), KeptGradient(flat, rank, world)
    segments = tuple(segment.name for segment in flat.segments)
    settle(device)
    gc.collect()
    gc.freeze()

    for iteration in range(1, training.iterations + 1):
        staged = batches.take()
        order = places(launch.spec.launches.order, launch.pair, iteration)
        passes: dict[CaseName, Pass] = {}
        sketches: dict[CaseName, Tensor] = {}
        for place, case in enumerate(order, start=1):
            passes[case] = measure(trainer, launch, case, staged[case], place)
            sketches[case] = sketch()
            if place == 1:
                if case == UPDATE_FROM:
                    kept.keep()
                flat.grad.zero_()
        if order[1] != UPDATE_FROM:
            kept.put_back()

        # Planned, read and copied while nothing is timed but the device's own time of the update.
        batches.prefetch()
        rate = learning_rate(training, iteration)
        update = _update(trainer, passes[UPDATE_FROM].staged.host.token_count, rate)

        totals = {
            case: statistics.unpack(
                statistics.reduce(found.loss_sum, found.staged.host.own_token_count, found.measured())
            )
            for case, found in passes.items()
        }
        updates, tables = _add_up(update, sketches, rank, world, sketch.shape)
        gradients = compare(tables["baseline"], tables["dcp"], segments)
        emitter.iteration(passes, totals, updates, gradients, rate)


def measure(trainer: Trainer, launch: Launch, case: CaseName, staged: StagedBatch, place: int) -> Pass:
    """One pass of one case, timed on this rank; the gradient buffer has been zero and then holds the ranks' sum.

    Raises:
        LaunchError: out of GPU memory.
    """
    device = trainer.device
    staged.wait()
    start_peak(device)
    meet(device)
    begin = mark(device)
    loss_sum = compute(trainer, launch.spec.training, staged)
    trainer.reduction.finish()
    # The allocator keeps its accounts as the host queues work, so the peak of the pass is known already.
    return Pass(staged, place, loss_sum, begin, mark(device), peak_memory(device), reserved_memory(device))


def _update(trainer: Trainer, token_count: int, rate: float) -> float:
    """The optimizer's step, and its seconds on this rank.

    On CUDA the device still has sketches to make when the step is queued, so, as in a launch, it does not
    wait for the host.
    """
    begin = mark(trainer.device)
    trainer.optimizer.step(token_count, rate)
    return seconds_between(begin, mark(trainer.device))


def _add_up(
    update: float, sketches: dict[CaseName, Tensor], rank: int, world: int, shape: tuple[int, int]
) -> tuple[list[float], dict[CaseName, Tensor]]:
    """(every rank's seconds of the update, the whole sketches), on the host."""
    device = sketches[UPDATE_FROM].device
    seconds = torch.zeros(world, dtype=torch.float64, device=device)
    seconds[rank] = update
    vector = torch.cat([seconds, *(table.flatten() for table in sketches.values())])
    dist.all_reduce(vector)
    host = vector.cpu()
    tables = host[world:].view(len(sketches), *shape)
    return host[:world].tolist(), dict(zip(sketches, tables, strict=True))
