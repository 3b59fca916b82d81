"""Runs under torchrun: the real worker on each `FAULT=launch file` of argv, with a fault planted in dcp's passes only.

scale: a loss 0.1 % too large. gradient: the output projection's gradient is doubled, which no loss shows.
"""

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcpbench.plan import Launch
from dcpbench.worker import lockstep, loss
from dcpbench.worker.__main__ import run

SOUND = loss.losses_and_gradient
MEASURE = lockstep.measure


def scaled(logits: Tensor, labels: Tensor, losses: Tensor) -> None:
    SOUND(logits, labels, losses)
    losses.mul_(1.001)
    logits.mul_(1.001)


def faulty(fault: str, trainer: Any, launch: Launch, case: str, *others: Any) -> Any:
    wrong = case == "dcp"
    loss.losses_and_gradient = scaled if wrong and fault == "scale" else SOUND
    found = MEASURE(trainer, launch, case, *others)
    if wrong and fault == "gradient":
        trainer.model.output.weight.main_grad.mul_(2.0)
    return found


def main() -> None:
    torch.set_num_threads(1)
    initialise = dist.init_process_group
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for number, argument in enumerate(sys.argv[1:]):
        fault, _, file = argument.partition("=")
        lockstep.measure = functools.partial(faulty, fault)
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
