"""Runs under torchrun on any number of gloo ranks: loss and gradients of one batch under several schedulers.

Writes {plan: {"loss", "norm", "sizes", "jobs", "difference"}} to the file named in argv: `jobs` are those of each
rank, `difference` is how far the gradients lie from those of `dp_balanced`, relative to their norm.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from normalisation_worker import CPU, TIMEOUT, trained_under

from dcpbench.dcp.groups import RuntimeGroups
from dcpbench.dcp.schedulers import create
from dcpbench.dcp.schedulers.laminar import Laminar
from dcpbench.dcp.workload import MINIMAL, BatchPlan, Domain, Job, check_plan
from dcpbench.worker.lifetime import leave

CAPACITY = 96


class Walking:
    """Each sample alone on the fewest ranks that hold it, from a rank that moves on: partners change with every job."""

    padding = MINIMAL

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def group_sizes(self) -> tuple[int, ...]:
        return tuple(range(1, self._ranks + 1))

    def plan(self, lengths: list[int]) -> BatchPlan:
        jobs = []
        for sample, length in enumerate(lengths):
            size = next(k for k in self.group_sizes() if self.padding.pad(length, k) <= k * CAPACITY)
            jobs.append(Job(3 * sample % (self._ranks - size + 1), size, (sample,)))
        plan = BatchPlan(self._ranks, tuple(jobs), lockstep=False)
        check_plan(plan, lengths, self.padding, CAPACITY)
        return plan


def main() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    domain = Domain(ranks, ranks)
    # Needs every rank, all but one, half of them, each other number, and one each.
    shared = [CAPACITY * k - 7 for k in range(2, ranks)]
    longest = [CAPACITY * ranks - 3, CAPACITY * (ranks - 1) - 5, CAPACITY * max(1, ranks // 2) - 2]
    lengths = np.array([*longest, *shared, 33, 5, 64, 1, 90, 12, 60, 31, 75, 96, 41], np.int64)
    schedulers: dict[str, Any] = {
        "dp_balanced": create("dp_balanced", domain=domain, capacity=CAPACITY),
        "default_dynamic_cp": create("default_dynamic_cp", domain=domain, capacity=CAPACITY),
        "laminar": create("laminar", domain=domain, capacity=CAPACITY),
        "laminar any": Laminar(domain, CAPACITY, menu="any"),
        "laminar even": Laminar(domain, CAPACITY, menu="even"),
        "walking": Walking(ranks),
    }
    sizes = {size for scheduler in schedulers.values() for size in scheduler.group_sizes()}
    groups = RuntimeGroups(sizes, CPU, TIMEOUT)
    groups.connect()
    result = {}
    result["dp_balanced"], gradient = trained_under(schedulers["dp_balanced"], lengths, groups)
    for name, scheduler in schedulers.items():
        result[name], _ = trained_under(scheduler, lengths, groups, gradient)
    one = np.array([50], np.int64)  # one sample: with more than one rank, some have no job at all
    result["idle dp_balanced"], gradient = trained_under(schedulers["dp_balanced"], one, groups)
    result["idle laminar"], _ = trained_under(schedulers["laminar"], one, groups, gradient)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
