"""Runs under torchrun: the real worker on each `FAULT=launch file` of argv, with a fault planted in its loss.

scale: 0.1 % too large (in bfloat16 most gradients round that away; the loss is float32 and keeps it). shift: labels
one token off. drop: some labelled rows left out of loss and gradient, while the count of tokens stays, as when a
sample is lost on its way to the loss. Any other name: no fault.
"""

import functools
import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from worker_launches import run_each

from dcpbench.worker import loss

SOUND = loss.losses_and_gradient


def faulty(fault: str, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
    SOUND(logits, torch.roll(labels, -1) if fault == "shift" else labels, losses)
    if fault == "scale":
        losses.mul_(1.001)
        logits.mul_(1.001)
    elif fault == "drop":
        losses[:15] = 0.0
        logits[:15] = 0.0


def launches(arguments: list[str]) -> Iterator[str]:
    for argument in arguments:
        fault, _, file = argument.partition("=")
        loss.losses_and_gradient = functools.partial(faulty, fault)
        yield file


if __name__ == "__main__":
    run_each(launches(sys.argv[1:]))
