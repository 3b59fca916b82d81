"""The attention layout of a microbatch as tensors on its device: made once, used by every layer and the backward."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dcpbench.dcp.packing import AttentionLayout, Ints, offsets_of

MAX_ROWS = 2**31
"""Row numbers and offsets are int32 on the device."""


@dataclass(frozen=True)
class DeviceLayout:
    """An `AttentionLayout` whose index arrays are tensors; the kernels' own tables are made on demand and kept."""

    host: AttentionLayout
    query_rows: Tensor | None
    key_rows: Tensor | None
    gradient_rows: Tensor | None
    query_offsets: Tensor
    key_offsets: Tensor
    max_query: int
    max_key: int
    tables: dict[object, object] = field(default_factory=dict)
    """What a kernel derives from the layout once per microbatch, under a key of its own."""

    @property
    def size(self) -> int:
        """Ranks of the CP group."""
        return self.host.size

    @property
    def rows(self) -> int:
        """Rows of this rank, padding included."""
        return self.host.rows

    @property
    def pieces(self) -> int:
        """Number of query pieces."""
        return self.host.pieces

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.query_offsets.device


def to_device(array: Ints | NDArray[np.bool_], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A host array as a tensor on `device`; through pinned memory on CUDA, so that the copy does not block."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def device_layout(layout: AttentionLayout, device: torch.device) -> DeviceLayout:
    """Copies the index arrays of `layout` to `device`.

    Raises:
        ValueError: more rows than 32-bit offsets can number.
    """
    if max(int(layout.key_counts.sum()), layout.rows * layout.size) >= MAX_ROWS:
        raise ValueError("a microbatch of 2^31 rows or more cannot be indexed by the attention kernels")
    query_rows = layout.query_rows
    return DeviceLayout(
        layout,
        None if query_rows is None else to_device(query_rows, device),
        None if layout.key_rows is None else to_device(layout.key_rows, device),
        None if layout.gradient_rows is None else to_device(layout.gradient_rows, device, torch.int32),
        to_device(offsets_of(layout.query_counts), device, torch.int32),
        to_device(offsets_of(layout.key_counts), device, torch.int32),
        int(layout.query_counts.max(initial=0)),
        int(layout.key_counts.max(initial=0)),
    )
