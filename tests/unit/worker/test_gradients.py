"""Which ranks may reduce while they compute, and in which order all of them reduce."""

import itertools
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.dcp.workload import BatchPlan, Job
from dcpbench.worker.parallel.gradients import GradientReduction, reduces_early, reduction_order
from dcpbench.worker.parameters import FlatParameters, Segment

LAYERS = 3


def plan_of(ranks: int, *jobs: tuple[int, int]) -> BatchPlan:
    return BatchPlan(ranks, tuple(Job(first, size, (index,)) for index, (first, size) in enumerate(jobs)), False)


def test_a_rank_whose_partner_has_more_to_do_waits_with_reducing() -> None:
    plan = plan_of(4, (0, 2), (1, 1), (2, 2))
    assert [reduces_early(plan, rank) for rank in range(4)] == [False, True, True, True]


def test_without_a_job_there_is_nothing_to_overlap() -> None:
    assert [reduces_early(plan_of(2, (0, 1)), rank) for rank in range(2)] == [True, False]


def sequence(plan: BatchPlan, rank: int) -> list[tuple[str, int, int]]:
    """The collectives that a rank issues: ("job", job, step) with its CP group, ("gradients", 0, layer) with all."""
    own = plan.jobs_by_rank[rank]
    early = reduces_early(plan, rank)
    issued = []
    for index in own:
        issued += [("job", index, layer) for layer in range(LAYERS)]
        for layer in reversed(range(LAYERS)):
            issued.append(("job", index, 2 * LAYERS - layer))
            if early and index == own[-1]:
                issued.append(("gradients", 0, layer))
    if not early:
        issued += [("gradients", 0, layer) for layer in reversed(range(LAYERS))]
    return issued


def runs_through(plan: BatchPlan) -> bool:
    """Whether every rank finishes when each collective waits for all its ranks and a rank does one at a time."""
    left = [sequence(plan, rank) for rank in range(plan.ranks)]
    while any(left):
        heads = [queue[0] if queue else None for queue in left]
        for rank, head in enumerate(heads):
            if head is None:
                continue
            members = plan.jobs[head[1]].ranks if head[0] == "job" else range(plan.ranks)
            if all(heads[member] == head for member in members):
                for member in members:
                    left[member].pop(0)
                break
            del rank
        else:
            return False
    return True


@given(st.lists(st.sampled_from([(first, size) for size in (1, 2, 4) for first in range(0, 4, size)]), max_size=7))
def test_no_plan_can_deadlock_even_if_collectives_never_overlap(blocks: list[tuple[int, int]]) -> None:
    assert runs_through(plan_of(4, *blocks))


def test_reducing_early_in_every_last_job_would_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(2, (0, 2), (1, 1))
    assert runs_through(plan)
    monkeypatch.setitem(globals(), "reduces_early", lambda plan, rank: True)
    assert not runs_through(plan)


def test_the_order_is_that_in_which_a_backward_finishes() -> None:
    names = ["embedding", "blocks.0", "blocks.1", "blocks.10", "output", "vectors"]
    segments = tuple(Segment(name, i, i + 1) for i, name in enumerate(names))
    assert [s.name for s in reduction_order(segments)] == [
        "output", "blocks.10", "blocks.1", "blocks.0", "embedding", "vectors",
    ]  # fmt: skip
    assert [s.name for s in reduction_order(segments[:4])] == ["blocks.10", "blocks.1", "blocks.0", "embedding"]


def test_a_segment_out_of_turn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Work:
        def wait(self) -> None:
            started.append(-1)

    def all_reduce(tensor: torch.Tensor, **_: object) -> Work:
        started.append(len(tensor))
        return Work()

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 16)])
    model.output = torch.nn.Linear(16, 64)
    flat = FlatParameters(model, torch.float32, torch.device("cpu"), torch.float32)
    reduction = GradientReduction(flat, overlap=True, own_group=False, timeout=timedelta(seconds=5))
    for _ in range(2):
        reduction.ready("output")
        with pytest.raises(RuntimeError, match=r"blocks\.0 were finished when those of blocks\.1 were expected"):
            reduction.ready("blocks.0")
        reduction.ready("blocks.1")
        reduction.finish()
        assert started == [1024, 128, 64, 192, -1, -1, -1, -1]
        started.clear()
    late = GradientReduction(flat, overlap=False, own_group=False, timeout=timedelta(seconds=5))
    assert not late.overlaps
    late.finish()
    assert started == [len(flat.grad), -1]


def test_alone_nothing_is_sent(tmp_path: Path) -> None:
    flat = FlatParameters(torch.nn.Linear(2, 2), torch.float32, torch.device("cpu"), torch.float32)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        reduction = GradientReduction(flat, overlap=True, own_group=True, timeout=timedelta(seconds=5))
        flat.grad.fill_(3.0)
        reduction.finish()
        assert not reduction.overlaps
        assert (flat.grad == 3).all()
    finally:
        dist.destroy_process_group()


def test_every_pair_of_blocks_on_two_ranks_runs_through() -> None:
    for blocks in itertools.product([(0, 1), (1, 1), (0, 2)], repeat=4):
        assert runs_through(plan_of(2, *blocks))
