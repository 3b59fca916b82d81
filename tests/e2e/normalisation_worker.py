"""Runs under torchrun on 8 gloo ranks: what a loss and a gradient are divided by, under every way to split a batch.

Writes to the file named in argv: `groups` (process groups made for Transformer Engine, and for the rest), `statistics`
(losses from known sums) and `plans` (loss and gradient norm of one batch under several plans).
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from cp_numerics_worker import RandomSamples

from dcpbench import spec
from dcpbench.dcp.attention.gathered import GatheredAttention
from dcpbench.dcp.attention.kernels import SDPA
from dcpbench.dcp.attention.layout import device_layout
from dcpbench.dcp.attention.transport import CollectiveTransport
from dcpbench.dcp.groups import RuntimeGroups
from dcpbench.dcp.packing import pack_rank
from dcpbench.dcp.schedulers import create
from dcpbench.dcp.workload import Domain, Scheduler
from dcpbench.worker.emit import RankMeasurement, Statistics
from dcpbench.worker.lifetime import leave
from dcpbench.worker.model import GPT, initialise
from dcpbench.worker.parameters import FlatParameters

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=120)
MODEL = spec.Model(layers=2, hidden_size=32, ffn_hidden_size=64, kv_heads=2, vocab_size=97, init_std=0.2)
LENGTHS = np.array([700, 33, 5, 260, 64, 1, 410, 90, 12, 150, 31, 505], np.int64)
CAPACITY = 128


def count_groups() -> tuple[RuntimeGroups, dict[str, int]]:
    """How many communicators the groups of a dynamic scheduler with sizes 1, 2, 4 and 8 take.

    `all` and this rank's `own` where each block has one, `parent` where the domain's must do.
    """
    made: list[list[int]] = []
    original = dist.new_group

    def counting(ranks: list[int], **options: object) -> dist.ProcessGroup:
        made.append(ranks)
        return original(ranks, **options)

    scheduler = create("default_dynamic_cp", domain=Domain(8, 4), capacity=64)
    dist.new_group = counting
    try:
        groups = RuntimeGroups(scheduler.group_sizes(), CPU, TIMEOUT)
        groups.connect()
        parent = len(made)
        blocks = RuntimeGroups(scheduler.group_sizes(), CPU, TIMEOUT, blocks=scheduler.groups())
    finally:
        dist.new_group = original
    own = sum(dist.get_rank() in ranks for ranks in made)
    for some in (groups, blocks):
        assert some.of(0, 8).group is dist.group.WORLD
        assert some.of(dist.get_rank(), 1).group is None
    assert len(blocks.communicators) == own + 1
    return groups, {"all": len(made), "own": own, "parent": parent}


def known_sums() -> dict[str, float]:
    """Two ranks' sums, and one rank's two microbatches, through the worker's own reduction."""
    statistics = Statistics(CPU)
    rank = dist.get_rank()
    losses = {}
    for name, by_rank in {
        "ranks": {0: [(6.0, 3)], 1: [(1.0, 1)]},
        "microbatches": {0: [(8.0, 2), (6.0, 6)]},
    }.items():
        own = by_rank.get(rank, [])
        loss_sum = torch.zeros((), dtype=torch.float64)
        for value, _ in own:
            loss_sum += value
        total, count, _ = statistics.unpack(
            statistics.reduce(loss_sum, sum(tokens for _, tokens in own), RankMeasurement())
        )
        losses[name] = total / count
    return losses


def trained_under(
    scheduler: Scheduler, lengths: np.ndarray, groups: RuntimeGroups, against: torch.Tensor | None = None
) -> tuple[dict[str, object], torch.Tensor]:
    """Loss and gradient norm of a batch, divided by its labelled tokens, under a scheduler's plan; on any ranks.

    Also returns the gradient; `difference` is how far it lies from `against`, relative to that.
    """
    plan = scheduler.plan(lengths.tolist())
    samples = RandomSamples(lengths, MODEL.vocab_size, 3)
    with torch.device("meta"):
        model = GPT(MODEL, 1024)
    flat = FlatParameters(model, torch.float32, CPU, torch.float32)
    initialise(flat.named_master(), MODEL, 7)
    loss = torch.zeros((), dtype=torch.float64)
    for job in (plan.jobs[index] for index in plan.jobs_by_rank[dist.get_rank()]):
        group = groups.of(job.first_rank, job.size)
        own = list(job.samples)
        pack = pack_rank(samples, own, lengths[own], scheduler.padding, job.size, group.rank)
        attention = GatheredAttention(device_layout(pack.layout, CPU), group, SDPA, CollectiveTransport())
        part = model(*(torch.from_numpy(x) for x in (pack.tokens, pack.labels, pack.positions)), attention)
        part.backward()
        loss += part.detach()
    dist.all_reduce(loss)
    dist.all_reduce(flat.grad)
    tokens = int((lengths - 1).sum())
    gradient = flat.grad.double() / tokens
    found = {
        "loss": float(loss) / tokens,
        "norm": float(gradient.norm()),
        "sizes": sorted(plan.cp_sizes()),
        "jobs": [len(own) for own in plan.jobs_by_rank],
    }
    if against is not None:
        found["difference"] = float((gradient - against).norm() / against.norm())
    return found, gradient


def main() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.set_num_threads(1)
    groups, made = count_groups()
    schedulers = {
        f"fixed {cp}": create("dp_balanced", domain=Domain(8, cp), capacity=CAPACITY * 8 // cp) for cp in (1, 2, 4, 8)
    }
    schedulers["dynamic"] = create("default_dynamic_cp", domain=Domain(8, 8), capacity=CAPACITY)
    plans = {name: trained_under(scheduler, LENGTHS, groups)[0] for name, scheduler in schedulers.items()}
    result = {"groups": made, "statistics": known_sums(), "plans": plans}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
