"""Sums over rows, in two steps whose order is fixed: programs leave partial sums, one kernel adds them up."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpbench.dcp.launching import kernel

_BLOCK = 64
_ROWS = 32


@kernel(numbers=("rows",))
def _add_columns(parts, first, second, third, rows, width, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    # parts (targets, rows, width); target t += the sum of parts[t] over its rows.
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    number = tl.program_id(1)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, ROWS):
        places = start + tl.arange(0, ROWS)
        offsets = (number * rows + places).to(tl.int64)[:, None] * width + columns[None, :]
        total += tl.sum(tl.load(parts + offsets, mask=(places < rows)[:, None] & inside[None, :], other=0.0), 0)
    target = first
    if number == 1:
        target = second
    if number == 2:
        target = third
    tl.store(target + columns, tl.load(target + columns, mask=inside, other=0.0) + total, mask=inside)


def add_columns(parts: Tensor, targets: Sequence[Tensor]) -> None:
    """targets[t] += parts[t].sum(0), one launch for all.

    Shapes: parts (len(targets), rows, width) float32, contiguous; one to three targets (width,) float32, contiguous.
    """
    count, rows, width = parts.shape
    first, second, third = [*targets, *[targets[-1]] * (3 - count)]
    _add_columns[(triton.cdiv(width, _BLOCK), count)](
        parts, first, second, third, rows, width, BLOCK=_BLOCK, ROWS=_ROWS, num_warps=4
    )


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a small number elsewhere, where kernels run in an interpreter."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 3
