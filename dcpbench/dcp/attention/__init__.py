"""Context-parallel attention on packed sequences.

A backend is a kernel of `kernels.py` under the communication of `allgather.py`. `select` turns the
name in the spec into one, once, before the first iteration; the launch header names it.
"""

from __future__ import annotations

import torch

from dcpbench.dcp.attention.kernels import KERNELS, Kernel
from dcpbench.errors import PreflightError

FLASH_HEAD_DIMS = 256
"""FlashAttention-2 serves head dimensions up to 256."""


def select(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The attention kernel that `name` stands for on this device.

    `auto` takes `flash` on CUDA in bfloat16 or float16 and `sdpa` elsewhere. A kernel that is asked
    for by name and cannot serve is refused: nothing falls back in silence.

    Raises:
        PreflightError: unknown name, or a kernel that does not fit the device, type or head size.
    """
    fits_flash = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and head_dim <= FLASH_HEAD_DIMS
    if name == "auto":
        if device.type == "cuda" and head_dim > FLASH_HEAD_DIMS:
            raise PreflightError(
                f"cases.attention auto: head dimension {head_dim} is above {FLASH_HEAD_DIMS}, which no fused kernel "
                "serves; choose a smaller model.head_dim or name cases.attention sdpa to measure the slow path"
            )
        return KERNELS["flash" if fits_flash else "sdpa"]
    if name not in KERNELS:
        raise PreflightError(f"cases.attention: unknown backend {name!r}; known: auto, {', '.join(KERNELS)}")
    if name == "flash" and not fits_flash:
        raise PreflightError(
            f"cases.attention flash needs CUDA, bfloat16 or float16 and a head dimension up to {FLASH_HEAD_DIMS}; "
            f"this launch has {device.type}, {str(dtype).removeprefix('torch.')} and {head_dim}"
        )
    return KERNELS[name]
