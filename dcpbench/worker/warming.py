"""What is compiled or loaded at first use is used before iteration 1: it is no part of an iteration.

cuBLAS chooses among hundreds of kernels by the shape of a product, and CUDA loads each when it is first launched:
5 to 95 ms, seen in the middle of a run whenever a microbatch had a number of rows unlike those before. A
training of a million iterations does not notice; thirty measured ones do, and the case with more kinds of
microbatches more. Those kinds are known before the run starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch

from dcpbench.data.stream import IGNORE_INDEX
from dcpbench.dcp.attention.backend import Backend
from dcpbench.dcp.packing import AttentionLayout
from dcpbench.worker.linear import Linear, kernels_serve
from dcpbench.worker.loss import linear_cross_entropy
from dcpbench.worker.model import GPT

ITERATIONS = 500
"""Iterations from the first on whose microbatches are prepared for."""

MOST_COUNTS = 256
"""Different numbers of rows whose products are tried; of more, as many evenly spaced ones."""


def warm(model: GPT, attention: Backend, layouts: Iterable[AttentionLayout]) -> None:
    """Prepares for microbatches with these layouts. Not collective; gradients stay what they are: zeros are added."""
    if not kernels_serve(model.output.weight):
        return
    counts: set[int] = set()

    def noted() -> Iterator[AttentionLayout]:
        for layout in layouts:
            counts.add(layout.rows)
            yield layout

    each = noted()
    attention.warm(each)
    deque(each, maxlen=0)  # what attention had no use for
    warm_products(model, counts)


def warm_products(model: GPT, counts: Iterable[int]) -> None:
    """Runs every kind of matrix product of the model forward and backward with each number of rows, on zeros."""
    weight = model.output.weight
    wanted = sorted(count for count in set(counts) if count > 0)
    kept = min(len(wanted), MOST_COUNTS)
    linears = [module for module in model.blocks[0].modules() if isinstance(module, Linear)]
    for place in range(kept):
        count = wanted[place * len(wanted) // kept]
        for linear in linears:
            x = weight.new_zeros(count, linear.in_features).requires_grad_()
            result = linear(x)
            result.backward(torch.zeros_like(result))
        hidden = weight.new_zeros(count, model.config.hidden_size).requires_grad_()
        labels = torch.full((count,), IGNORE_INDEX, device=weight.device)
        linear_cross_entropy(hidden, weight, labels).backward()
