"""The two single-tensor collectives, under the names that the installed torch wants.

torch 2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor` and warns at every use of
the old names; older releases know only those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output (k x rows, ...), input (rows, ...), group=...): the inputs of all ranks, rank by rank."""

reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(output (rows, ...), input (k x rows, ...), group=...): this rank's part of the sum over ranks."""
