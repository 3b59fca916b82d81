"""The attention layout of a microbatch as tensors on its device: made once, used by every layer and the backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dcpbench.dcp.packing import AttentionLayout, Ints


@dataclass(frozen=True)
class DeviceLayout:
    """An `AttentionLayout` whose index arrays are tensors. Offsets are int32, as the kernels want them."""

    host: AttentionLayout
    query_rows: Tensor | None
    key_rows: Tensor | None
    query_offsets: Tensor
    key_offsets: Tensor
    max_query: int
    max_key: int

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
        return len(self.host.query_offsets) - 1


def to_device(array: Ints, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A host array as a tensor on `device`; through pinned memory on CUDA, so that the copy does not block."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def device_layout(layout: AttentionLayout, device: torch.device) -> DeviceLayout:
    """Copies the index arrays of `layout` to `device`.

    Raises:
        ValueError: offsets that do not fit 32 bits.
    """
    if max(int(layout.query_offsets[-1]), int(layout.key_offsets[-1])) >= 2**31:
        raise ValueError("a microbatch of 2^31 rows or more cannot be indexed by the attention kernels")
    return DeviceLayout(
        layout,
        None if layout.query_rows is None else to_device(layout.query_rows, device),
        None if layout.key_rows is None else to_device(layout.key_rows, device),
        to_device(layout.query_offsets, device, torch.int32),
        to_device(layout.key_offsets, device, torch.int32),
        layout.max_query,
        layout.max_key,
    )
