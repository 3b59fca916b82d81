"""Runs under torchrun on any number of gloo ranks or GPUs: what transports carry, job by job, with changing partners.

Writes {transport: {"compared": values, "wrong": values}} to the file named in argv. Keys, values and gradients are
small whole numbers, which every type adds up exactly, so what arrives must be equal to what was sent, to the bit.
Ranks have different jobs, groups start anywhere, and on GPUs each rank dawdles at random places.
"""

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from dcpbench.dcp.attention.layout import DeviceLayout, device_layout
from dcpbench.dcp.attention.transport import CollectiveTransport, Transport
from dcpbench.dcp.groups import RuntimeGroups
from dcpbench.dcp.packing import attention_layout
from dcpbench.worker.lifetime import leave

KV_HEADS, DIM = 2, 24
JOBS = 60
LAYERS = (1, 2, 3)


@dataclass(frozen=True)
class Prepared:
    """One job of this rank and what it must see; a list has an entry for each layer."""

    first: int
    size: int
    layout: DeviceLayout
    sent: list[torch.Tensor]
    """(rows, 2, kv_heads, dim)"""
    collected: list[torch.Tensor]
    found: list[torch.Tensor]
    """(keys, 2, kv_heads, dim)"""
    returned: list[torch.Tensor]


def jobs_of(world: int, order: random.Random) -> list[tuple[int, int, int]]:
    """(first rank, size, layers): anywhere for the most part, at the end in blocks that only split."""
    jobs = []
    for number in range(JOBS):
        size = order.randint(1, world)
        jobs.append((order.randint(0, world - size), size, LAYERS[number % len(LAYERS)]))
    blocks = [(0, world)]
    while blocks:
        first, size = blocks.pop(0)
        jobs.append((first, size, order.choice(LAYERS)))
        if size > 1:
            cut = order.randint(1, size - 1)
            blocks += [(first, cut), (first + cut, size - cut)]
    return jobs


def whole_numbers(shape: tuple[int, ...], most: int, *key: int) -> torch.Tensor:
    """The same on every rank for the same key."""
    return torch.from_numpy(np.random.default_rng(key).integers(0, most + 1, shape))


def prepare(number: int, first: int, size: int, layers: int, device: torch.device, dtype: torch.dtype) -> Prepared:
    rng = np.random.default_rng((number, 99))
    lengths = rng.integers(1, 200, int(rng.integers(1, 5)))
    padded = -(-lengths // (2 * size)) * (2 * size)
    layouts = [attention_layout(lengths, padded, size, member) for member in range(size)]
    origins = [torch.from_numpy(layout.key_rows) for layout in layouts]
    rows, own = layouts[0].rows, dist.get_rank() - first
    made: list[list[torch.Tensor]] = [[], [], [], []]
    for layer in range(layers):
        sent = [whole_numbers((rows, 2, KV_HEADS, DIM), 200, number, layer, member, 0) for member in range(size)]
        found = [
            whole_numbers((len(origin), 2, KV_HEADS, DIM), 7, number, layer, member, 1)
            for member, origin in enumerate(origins)
        ]
        total = torch.zeros((rows * size, 2, KV_HEADS, DIM), dtype=torch.int64)
        for origin, part in zip(origins, found, strict=True):
            total.index_add_(0, origin, part)
        everything = (sent[own], torch.cat(sent)[origins[own]], found[own], total[own * rows : (own + 1) * rows])
        for tensors, tensor in zip(made, everything, strict=True):
            tensors.append(tensor.to(device, dtype))
    return Prepared(first, size, device_layout(layouts[own], device), *made)


def carry(transport: Transport, groups: RuntimeGroups, jobs: list[Prepared], device: torch.device) -> dict[str, int]:
    order = random.Random(dist.get_rank())
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    compared = 0

    def dawdle() -> None:
        if device.type == "cuda" and order.random() < 0.3:
            torch.cuda._sleep(order.choice((10_000, 300_000, 3_000_000)))

    for job in jobs:
        group = groups.of(job.first, job.size)
        for sent, expected in zip(job.sent, job.collected, strict=True):
            dawdle()
            got = transport.collect(sent[:, 0], sent[:, 1], job.layout, group)
            dawdle()
            wrong += (got != expected).sum()
            compared += expected.numel()
        for found, expected in zip(job.found, job.returned, strict=True):
            dawdle()
            room = transport.gradients(tuple(found.shape), found)
            room.copy_(found)
            got = transport.give_back(room, job.layout, group)
            dawdle()
            wrong += (got != expected).sum()
            compared += expected.numel()
        transport.finish(group)
    return {"compared": compared, "wrong": int(wrong)}


def transports(groups: RuntimeGroups, rows: int, device: torch.device, dtype: torch.dtype):
    yield "collective", CollectiveTransport
    if device.type == "cuda":
        from dcpbench.dcp.attention.symmetric import SymmetricTransport

        def symmetric(library: bool) -> Callable[[], Transport]:
            return lambda: SymmetricTransport(groups, rows, KV_HEADS * DIM, dtype, device, library_barrier=library)

        yield "symmetric", symmetric(True)
        yield "symmetric, own barrier", symmetric(False)


def main() -> None:
    if sys.argv[2] == "cuda":
        device, dtype = torch.device("cuda", int(os.environ["LOCAL_RANK"])), torch.bfloat16
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=120))
    else:
        device, dtype = torch.device("cpu"), torch.float32
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        torch.set_num_threads(1)
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = RuntimeGroups(range(1, world + 1), device, timedelta(seconds=120))
    groups.connect()
    jobs = [
        prepare(number, first, size, layers, device, dtype)
        for number, (first, size, layers) in enumerate(jobs_of(world, random.Random(5)))
        if size > 1 and first <= rank < first + size
    ]
    rows = torch.tensor(max((job.layout.rows for job in jobs), default=1), device=device)
    dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    result = {}
    for name, make in transports(groups, int(rows), device, dtype):
        transport = make()
        for _ in range(3 if device.type == "cuda" else 1):
            found = carry(transport, groups, jobs, device)
            totals = torch.tensor([found["compared"], found["wrong"]], device=device)
            dist.all_reduce(totals)
            before = result.get(name, {"compared": 0, "wrong": 0})
            result[name] = {
                key: before[key] + value for key, value in zip(("compared", "wrong"), totals.tolist(), strict=True)
            }
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
