"""Runs under torchrun on gloo ranks with Triton's interpreter: the symmetric transport without a GPU.

Mapped memory is a file of each rank that all ranks map; kernels run in the interpreter, and ranks meet by the same
counters as on GPUs. Writes {"library" | "own": {"compared", "wrong", "barriers"}} to the file named in argv, the
first two over all ranks, barriers of the library as rank 0 counts them.
"""

import json
import os
import random
import sys
from datetime import timedelta
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from transport_worker import DIM, KV_HEADS, carry, jobs_of, prepare

from dcpbench.dcp.groups import RuntimeGroups

CPU = torch.device("cpu")
JOBS = 4
LAYOUTS: dict[int, tuple[Path, int, torch.dtype]] = {}
"""Address of a rank's own mapped tensor -> where its files are, elements, type."""


class Handle:
    """What `rendezvous` gives: every rank's memory, and a barrier of all of them."""

    def __init__(self, folder: Path, elements: int, dtype: torch.dtype) -> None:
        self._memory = [
            torch.from_file(str(folder / str(rank)), shared=True, size=elements, dtype=dtype)
            for rank in range(dist.get_world_size())
        ]
        self.barriers = 0

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0):
        whole = self._memory[rank].view(torch.uint8)
        first, count = storage_offset * dtype.itemsize, int(np.prod(sizes)) * dtype.itemsize
        assert first + count <= len(whole)
        return whole[first : first + count].view(dtype).view(sizes)

    def barrier(self, channel: int = 0) -> None:
        self.barriers += 1
        dist.barrier()


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    out, folder = Path(sys.argv[1]), Path(sys.argv[2])
    handles: list[Handle] = []

    def empty(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        place = folder / str(len(handles))
        place.mkdir(exist_ok=True)
        memory = torch.from_file(str(place / str(dist.get_rank())), shared=True, size=elements, dtype=dtype)
        memory.fill_(77)  # memory comes as somebody left it
        LAYOUTS[memory.data_ptr()] = (place, elements, dtype)
        return memory

    def rendezvous(memory: torch.Tensor, group: dist.ProcessGroup) -> Handle:
        dist.barrier(group)
        handles.append(Handle(*LAYOUTS[memory.data_ptr()]))
        return handles[-1]

    symmetric_memory.empty, symmetric_memory.rendezvous = empty, rendezvous
    from dcpbench.dcp.attention.symmetric import SymmetricTransport

    world, rank = dist.get_world_size(), dist.get_rank()
    groups = RuntimeGroups(range(1, world + 1), CPU, timedelta(seconds=120))
    planned = jobs_of(world, random.Random(5))
    jobs = [
        prepare(number, first, size, layers, CPU, torch.float32)
        for number, (first, size, layers) in enumerate(planned[:JOBS] + planned[-2 * world + 1 :])
        if size > 1 and first <= rank < first + size
    ]
    rows = torch.tensor(max(job.layout.rows for job in jobs))
    dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    result = {}
    for name in ("library", "own"):
        transport = SymmetricTransport(
            groups, int(rows), KV_HEADS * DIM, torch.float32, CPU, library_barrier=name == "library"
        )
        found = carry(transport, groups, jobs, CPU)
        totals = torch.tensor([found["compared"], found["wrong"]])
        dist.all_reduce(totals)
        result[name] = dict(zip(("compared", "wrong"), totals.tolist(), strict=True), barriers=handles[-1].barriers)
    if rank == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
