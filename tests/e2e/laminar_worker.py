"""Runs under torchrun on any number of gloo ranks: loss and gradient norm of one batch under several schedulers.

Writes {plan: {"loss", "norm", "sizes", "jobs"}} to the file named in argv; `jobs` are those of each rank.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from normalisation_worker import CPU, TIMEOUT, trained_under

from dcpbench.dcp.groups import RuntimeGroups
from dcpbench.dcp.schedulers import create
from dcpbench.dcp.schedulers.laminar import Laminar
from dcpbench.dcp.workload import Domain, Scheduler

CAPACITY = 96


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
