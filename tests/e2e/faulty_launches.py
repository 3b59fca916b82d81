"""Runs under torchrun: the real worker on each `FAULT=launch file` of argv, with a fault planted in its loss.

scale: 0.1 % too large (in bfloat16 most gradients round that away; the loss is float32 and keeps it). shift: labels
one token off. drop: some labelled rows left out of loss and gradient, while the count of tokens stays, as when a
sample is lost on its way to the loss. Any other name: no fault.
"""

import functools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dcpbench.plan import Launch
from dcpbench.worker import loss
from dcpbench.worker.__main__ import run

SOUND = loss.losses_and_gradient


def faulty(fault: str, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
    SOUND(logits, torch.roll(labels, -1) if fault == "shift" else labels, losses)
    if fault == "scale":
        losses.mul_(1.001)
        logits.mul_(1.001)
    elif fault == "drop":
        losses[:15] = 0.0
        logits[:15] = 0.0


def main() -> None:
    torch.set_num_threads(1)
    initialise = dist.init_process_group
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for number, argument in enumerate(sys.argv[1:]):
        fault, _, file = argument.partition("=")
        loss.losses_and_gradient = functools.partial(faulty, fault)
        dist.init_process_group = functools.partial(
            initialise,
            store=dist.PrefixStore(f"launch {number}", store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        run(Launch.model_validate_json(Path(file).read_text()))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
