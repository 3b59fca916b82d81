"""Runs under torchrun: the real worker on each `FAULT=launch file` of argv, with a fault planted in dcp's passes only.

scale: a loss 0.1 % too large. gradient: the output projection's gradient is doubled, which no loss shows.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from worker_launches import run_each

from dcpbench.plan import Launch
from dcpbench.worker import lockstep, loss

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


def launches(arguments: list[str]) -> Iterator[str]:
    for argument in arguments:
        fault, _, file = argument.partition("=")
        lockstep.measure = functools.partial(faulty, fault)
        yield file


if __name__ == "__main__":
    run_each(launches(sys.argv[1:]))
