"""What ends a launch for want of memory, and when the next batch is made."""

import threading

import pytest
import torch

from dcpbench.spec import Training
from dcpbench.worker.batches import Prefetcher
from dcpbench.worker.loop import _lower
from dcpbench.worker.memory import out_of_memory

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
