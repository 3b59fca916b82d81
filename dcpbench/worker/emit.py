"""Statistics of an iteration: one small all-reduce, one JSON line and one console line.

The all-reduce also carries what each rank measured in an iteration before, because a rank's own time is known
only after its step has ended. So a record is written later than its iteration, and no extra synchronisation enters
the loop (see `steps.py`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor

from dcpbench import records
from dcpbench.worker.batches import RankBatch

_SHARED = 2
_PER_RANK = 6


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank knows only after its step."""

    seconds: float = 0.0
    scheduling_seconds: float = 0.0
    peak_memory_bytes: float = 0.0
    reserved_memory_bytes: float = 0.0
    plan_digest: float = 0.0
    """First 48 bits of the plan's digest, exact in a float64: all ranks must have planned the same."""
    ended: float = 0.0
    """Seconds since 1970 at the end of the step."""


class Statistics:
    """The small vector that is summed over all ranks once per iteration."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def reduce(self, loss_sum: Tensor, own_token_count: int, previous: RankMeasurement) -> Tensor:
        """Starts the sum over ranks; nothing waits here. Shape (2 + 6 x world,), float64, on the device."""
        host = torch.zeros(_SHARED + _PER_RANK * self._world, dtype=torch.float64)
        host[1] = own_token_count
        slot = _SHARED + _PER_RANK * self._rank
        host[slot : slot + _PER_RANK] = torch.tensor(
            (
                previous.seconds,
                previous.scheduling_seconds,
                previous.peak_memory_bytes,
                previous.reserved_memory_bytes,
                previous.plan_digest,
                previous.ended,
            ),
            dtype=torch.float64,
        )
        vector = host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host
        vector[0] = loss_sum
        dist.all_reduce(vector)
        return vector

    def unpack(self, vector: Tensor) -> tuple[float, int, list[RankMeasurement]]:
        """(loss sum, token count, what every rank measured in the iteration before)."""
        values = vector.tolist()
        return (
            values[0],
            int(values[1]),
            [
                RankMeasurement(*values[_SHARED + _PER_RANK * rank : _SHARED + _PER_RANK * (rank + 1)])
                for rank in range(self._world)
            ],
        )


class RecordWriter:
    """Writes headers, records and end mark to the file and the console; only rank 0 has them."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] | None = path.open("x", encoding="utf-8") if dist.get_rank() == 0 else None

    @property
    def writes(self) -> bool:
        """Whether this rank does."""
        return self._file is not None

    def header(self, header: records.RunHeader) -> None:
        """Writes a header."""
        self._write(header, records.console_header(header))

    def iteration(self, record: records.IterationRecord, iterations: int) -> None:
        """Writes one iteration, of so many."""
        self._write(record, records.console_line(record, iterations))

    def end(self, iterations: int, seconds: float) -> None:
        """Marks the launch as complete."""
        end = records.RunEnd(iterations=iterations, seconds=seconds)
        self._write(end, records.console_end(end))
        self.close()

    def close(self) -> None:
        """Closes the file; without `end` the launch counts as incomplete."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: records.RunHeader | records.IterationRecord | records.RunEnd, line: str) -> None:
        if self._file is not None:
            # One write per line and a flush: a reader that follows the file never sees half a record for long.
            self._file.write(records.to_json(record) + "\n")
            self._file.flush()
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


class Emitter:
    """Writes the records of a launch of one case."""

    def __init__(self, path: Path, header: records.RunHeader) -> None:
        self._header = header
        self._consumed_tokens = 0
        self._writer = RecordWriter(path)
        self._writer.header(header)

    def iteration(
        self,
        batch: RankBatch,
        loss_sum: float,
        token_count: int,
        grad_norm: float,
        learning_rate: float,
        ranks: list[RankMeasurement],
    ) -> None:
        """Writes one iteration.

        Raises:
            RuntimeError: the ranks planned differently, or trained on another number of tokens than the data has.
        """
        check(batch, token_count, ranks)
        self._consumed_tokens += int(batch.lengths.sum())
        if self._writer.writes:
            record = record_of(self._header, batch, self._consumed_tokens, loss_sum, grad_norm, learning_rate, ranks)
            self._writer.iteration(record, self._header.iterations)

    def end(self, seconds: float) -> None:
        """Marks the launch as complete."""
        self._writer.end(self._header.iterations, seconds)

    def close(self) -> None:
        """Closes the file; without `end` the launch counts as incomplete."""
        self._writer.close()


def check(batch: RankBatch, token_count: int, ranks: list[RankMeasurement]) -> None:
    """Nothing, or what shows that the ranks did not do the same work.

    Raises:
        RuntimeError: the ranks planned differently, or trained on another number of tokens than the data has.
    """
    if len({rank.plan_digest for rank in ranks}) > 1:
        raise RuntimeError(f"iteration {batch.iteration}: the ranks made different plans of the same batch")
    if token_count != batch.token_count:
        raise RuntimeError(
            f"iteration {batch.iteration}: the ranks trained on {token_count} tokens; the batch has {batch.token_count}"
        )


def record_of(
    header: records.RunHeader,
    batch: RankBatch,
    consumed_tokens: int,
    loss_sum: float,
    grad_norm: float,
    learning_rate: float,
    ranks: list[RankMeasurement],
) -> records.IterationRecord:
    """The record of an iteration of which everything is known. `consumed_tokens` has this iteration's."""
    tokens, squared = int(batch.lengths.sum()), int((batch.lengths**2).sum())
    seconds = max(rank.seconds for rank in ranks)
    work = (header.flops_per_token or 0.0) * tokens + (header.flops_per_squared_length or 0.0) * squared
    return records.IterationRecord(
        iteration=batch.iteration,
        consumed_samples=batch.iteration * header.global_batch_size,
        consumed_tokens=consumed_tokens,
        samples=len(batch.lengths),
        tokens=tokens,
        padding_tokens=batch.padding_tokens,
        squared_lengths=squared,
        longest=int(batch.lengths.max()),
        loss=loss_sum / batch.token_count,
        loss_sum=loss_sum,
        token_count=batch.token_count,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        seconds=seconds,
        rank_seconds=tuple(rank.seconds for rank in ranks),
        scheduling_seconds=max(rank.scheduling_seconds for rank in ranks),
        microbatches=batch.plan.microbatches,
        cp_sizes=batch.plan.cp_sizes(),
        batch_digest=batch.digest,
        peak_memory_bytes=int(max(rank.peak_memory_bytes for rank in ranks)),
        reserved_memory_bytes=int(max(rank.reserved_memory_bytes for rank in ranks)) or None,
        tflops_per_gpu=work / (seconds * header.world_size * 1e12),
        ended=ranks[0].ended or None,
        jobs=batch.jobs_summary(),
    )
