"""What a step takes, what ends a launch for want of memory, and when the next batch is made."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dcpbench.dcp.workload import BatchPlan, Job
from dcpbench.records import RunHeader, read
from dcpbench.spec import Training
from dcpbench.worker.batches import Prefetcher, RankBatch, StagedBatch, StagedPack
from dcpbench.worker.emit import Emitter
from dcpbench.worker.loop import Trainer, _lower, train
from dcpbench.worker.memory import out_of_memory
from dcpbench.worker.steps import AHEAD, Steps

RAISED = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.2 GiB is free."
)


def test_out_of_memory_names_the_microbatch_and_what_to_lower() -> None:
    error = out_of_memory("iteration 3, microbatch 2 of 4", RAISED, *_lower(Training()))
    assert int(error.exit_code) == 4
    assert str(error) == (
        "out of GPU memory in iteration 3, microbatch 2 of 4 (tried to allocate 2.50 GiB); lower "
        "cases.max_seqlen_per_dp_cp_rank, or set training.recompute to selective or full, or set "
        "training.optimizer_sharding to true"
    )


def test_advice_leaves_out_what_is_done_already() -> None:
    assert _lower(Training(recompute="full", optimizer_sharding=True)) == ["lower cases.max_seqlen_per_dp_cp_rank"]
    assert "set training.recompute to full" in _lower(Training(recompute="selective"))


def test_a_batch_is_made_when_asked_for_ahead_and_not_before() -> None:
    asked: list[int] = []
    made = threading.Event()

    def make(iteration: int) -> int:
        asked.append(iteration)
        made.set()
        return iteration

    batches = Prefetcher(make, 2)  # type: ignore[arg-type]
    assert batches.take() == 1
    assert asked == [1]
    made.clear()
    batches.prefetch()
    assert made.wait(10)
    assert batches.take() == 2
    batches.prefetch()
    batches.close()
    assert asked == [1, 2]


def test_what_making_a_batch_raises_is_raised_where_it_is_taken() -> None:
    def make(iteration: int) -> int:
        raise ValueError(f"no batch {iteration}")

    batches = Prefetcher(make, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no batch 1"):
        batches.take()
    batches.close()


class _Slow(torch.nn.Module):
    """A model whose every microbatch takes 100 ms."""

    def forward(self, *_: object) -> torch.Tensor:
        time.sleep(0.1)
        return torch.zeros((), dtype=torch.float64, requires_grad=True)


def test_a56_what_is_timed_is_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One value per iteration, the slowest rank's, from a monotonic clock, and no less than the work takes."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        batch = RankBatch(
            1, BatchPlan(1, (Job(0, 1, (0,)),)), (Job(0, 1, (0,)),), (), "d", np.array([8]), 7, 7, 0, 0.0, True, (8,)
        )
        attention = SimpleNamespace(finish=lambda: None)
        pack = StagedPack(torch.zeros(8), torch.zeros(8), torch.zeros(8), attention)  # type: ignore[arg-type]
        header = RunHeader(case="dcp", launch="01-dcp", world_size=1, domain_size=1, cp=1, global_batch_size=1,
                           iterations=2)  # fmt: skip
        emitter = Emitter(tmp_path / "records.jsonl", header)
        # The wall clock may jump; it must not matter.
        monkeypatch.setattr(time, "time", lambda: 0.0)
        batches = Prefetcher(lambda iteration: StagedBatch(replace(batch, iteration=iteration), (pack, pack), None), 2)
        trainer = Trainer(
            _Slow(),  # type: ignore[arg-type]
            SimpleNamespace(overlaps=False, finish=lambda: None),  # type: ignore[arg-type]
            SimpleNamespace(step=lambda tokens, lr: torch.tensor(1.0)),  # type: ignore[arg-type]
            SimpleNamespace(wants=lambda i: False),  # type: ignore[arg-type]
            torch.device("cpu"),
        )
        train(trainer, Training(iterations=2, warmup_iterations=0), batches, emitter)
        emitter.end(1.0)
        batches.close()
    finally:
        dist.destroy_process_group()
    found = read(tmp_path / "records.jsonl").iterations
    assert [record.iteration for record in found] == [1, 2]
    for record in found:
        assert record.seconds is not None
        # Two microbatches of 100 ms: not the 0 ms that starting them takes, and not twice over.
        assert 0.2 <= record.seconds < 0.4
        assert record.seconds == max(record.rank_seconds)


@pytest.mark.parametrize("profiled", [(), (1,), (2, 3), (4,)])
@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_every_iteration_is_written_once_with_its_own_numbers(
    tmp_path: Path, iterations: int, profiled: tuple[int, ...]
) -> None:
    """Records follow the training at a distance, which a profile shortens; each has what its own iteration measured."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        plan = BatchPlan(1, (Job(0, 1, (0,)),))
        header = RunHeader(case="dcp", launch="01-dcp", world_size=1, domain_size=1, cp=1, global_batch_size=1,
                           iterations=iterations)  # fmt: skip
        emitter = Emitter(tmp_path / "records.jsonl", header)
        steps = Steps(torch.device("cpu"), emitter)
        for number in range(1, iterations + 1):
            batch = RankBatch(
                number, plan, plan.jobs, (), "d", np.array([8 + number]), 7, 7, 0, number / 10, True, (8,)
            )
            totals = steps.reduce(torch.tensor(7.0 * number, dtype=torch.float64), 7)
            steps.queued(StagedBatch(batch, (), None), totals, torch.tensor(float(number)), 1e-3 * number)
            steps.finish(leave=0 if number in profiled else AHEAD)
        steps.close()
        emitter.end(1.0)
    finally:
        dist.destroy_process_group()
    found = read(tmp_path / "records.jsonl").iterations
    assert [record.iteration for record in found] == list(range(1, iterations + 1))
    for number, record in enumerate(found, start=1):
        assert record.loss == number
        assert record.grad_norm == number
        assert record.scheduling_seconds == number / 10
        assert record.longest == 8 + number
        assert len(record.rank_seconds) == 1
    assert [record.ended for record in found] == sorted(record.ended or 0.0 for record in found)
