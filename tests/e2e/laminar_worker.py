"""Runs under torchrun on any number of gloo ranks: loss and gradient norm of one batch under several schedulers.

Writes {plan: {"loss", "norm", "sizes", "jobs"}} to the file named in argv; `jobs` are those of each rank.
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
from dcpbench.dcp.schedulers.laminar import Laminar
from dcpbench.dcp.workload import Domain, Scheduler
from dcpbench.worker.model import GPT, initialise
from dcpbench.worker.parameters import FlatParameters

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=120)
MODEL = spec.Model(layers=2, hidden_size=32, ffn_hidden_size=64, kv_heads=2, vocab_size=97, init_std=0.2)
CAPACITY = 96


def trained_under(scheduler: Scheduler, lengths: np.ndarray, groups: RuntimeGroups) -> dict[str, object]:
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
    return {
        "loss": float(loss) / tokens,
        "norm": float(flat.grad.norm()) / tokens,
        "sizes": sorted(plan.cp_sizes()),
        "jobs": [len(own) for own in plan.jobs_by_rank],
    }


def main() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    domain = Domain(ranks, ranks)
    # Needs every rank, all but one, half of them, and one each.
    longest = [CAPACITY * ranks - 3, CAPACITY * (ranks - 1) - 5, CAPACITY * max(1, ranks // 2) - 2]
    lengths = np.array([*longest, 33, 5, 64, 1, 90, 12, 60, 31, 75, 96, 41], np.int64)
    schedulers: dict[str, Scheduler] = {
        "dp_balanced": create("dp_balanced", domain=domain, capacity=CAPACITY),
        "default_dynamic_cp": create("default_dynamic_cp", domain=domain, capacity=CAPACITY),
        "laminar": create("laminar", domain=domain, capacity=CAPACITY),
        "laminar any": Laminar(domain, CAPACITY, menu="any"),
        "laminar even": Laminar(domain, CAPACITY, menu="even"),
    }
    blocks = list(dict.fromkeys(block for scheduler in schedulers.values() for block in scheduler.groups()))
    groups = RuntimeGroups(blocks, CPU, TIMEOUT)
    result = {name: trained_under(scheduler, lengths, groups) for name, scheduler in schedulers.items()}
    one = np.array([50], np.int64)  # one sample: with more than one rank, some have no job at all
    result["idle dp_balanced"] = trained_under(schedulers["dp_balanced"], one, groups)
    result["idle laminar"] = trained_under(schedulers["laminar"], one, groups)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
