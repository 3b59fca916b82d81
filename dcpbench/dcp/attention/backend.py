"""Which kernel and which transport a launch computes attention with.

`cases.attention` names them: `auto`, a kernel (`flash`, `cudnn`, `sdpa`, `reference`), or
`transport/kernel` (`symmetric/flash`, `collective/cudnn`, ...); or `te`, `te/p2p`, `te/a2a`,
`te/all_gather` for Transformer Engine's own context parallelism. What is asked for by name and
cannot serve is refused; nothing falls back in silence, and the launch header names what was used.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from dcpbench.dcp.attention import cudnn
from dcpbench.dcp.attention.gathered import GatheredAttention
from dcpbench.dcp.attention.kernels import FLASH, REFERENCE, SDPA, Kernel
from dcpbench.dcp.attention.layout import DeviceLayout, device_layout
from dcpbench.dcp.attention.transport import CollectiveTransport, Transport
from dcpbench.dcp.groups import CpGroup, RuntimeGroups
from dcpbench.dcp.kernel_choice import LONG_KEYS_PER_QUERY, LONG_WORK
from dcpbench.dcp.packing import AttentionLayout
from dcpbench.errors import PreflightError

KERNELS = ("flash", "cudnn", "sdpa", "reference")
TRANSPORTS = ("symmetric", "collective")
TE_COMMUNICATIONS = ("p2p", "a2a", "all_gather")
TE_MINIMUM = (2, 9)
"""Older releases train packed sequences wrongly."""

FLASH_HEAD_DIMS = 256
"""FlashAttention-2 serves head dimensions up to 256."""

OVERLAP_LENGTH = 12_288
"""From which longest sequence on it pays to split attention so that communication hides behind it."""


class Attention(Protocol):
    """The attention of one microbatch on one rank."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (rows, heads, dim), k and v (rows, kv_heads, dim) -> (rows, heads, dim)."""

    def finish(self) -> None:
        """To be called after the backward of the microbatch."""


@dataclass(frozen=True)
class Sizes:
    """What a backend is made for."""

    heads: int
    kv_heads: int
    dim: int
    rows: int
    """The most rows a rank may hold in one microbatch."""


class Backend(Protocol):
    """Makes the `Attention` of each microbatch; `name` says what it is made of."""

    name: str

    def prepare(self, layout: AttentionLayout, group: CpGroup) -> Attention:
        """The attention of one microbatch of this rank."""

    def warm(self, layouts: Iterable[AttentionLayout]) -> None:
        """Compiles what these microbatches will need; not collective."""


class GatheredBackend:
    """Our own: a transport, and one kernel for short key ranges and one for long."""

    def __init__(
        self,
        kernels: tuple[Kernel, ...],
        transport: Transport,
        sizes: Sizes,
        device: torch.device,
        dtype: torch.dtype,
        overlap: Callable[[DeviceLayout, CpGroup], Attention | None] | None = None,
    ) -> None:
        self._kernels, self._transport, self._overlap = kernels, transport, overlap
        self._sizes, self._device, self._dtype = sizes, device, dtype
        self.name = f"{transport.name}/{'+'.join(kernel.name for kernel in kernels)}"

    def kernel_for(self, layout: AttentionLayout) -> Kernel:
        """The kernel of a microbatch: the last of the list for long key ranges, else the first.

        Raises:
            PreflightError: the only kernel there is does not serve key ranges as long as these.
        """
        keys = layout.keys_per_query
        long = keys >= LONG_KEYS_PER_QUERY and keys * layout.query_counts.sum() >= LONG_WORK
        kernel = self._kernels[-1 if long and _serves(self._kernels[-1], layout) else 0]
        if not _serves(kernel, layout):
            raise PreflightError(
                f"cases.attention cudnn serves sequences of up to {cudnn.LONGEST} tokens; the longest here has "
                f"{int(layout.lengths.max())}; choose flash or auto"
            )
        return kernel

    def prepare(self, layout: AttentionLayout, group: CpGroup) -> Attention:
        """The attention of one microbatch of this rank."""
        on_device = device_layout(layout, self._device)
        if self._overlap is not None and self._overlaps(layout):
            overlapped = self._overlap(on_device, group)
            if overlapped is not None:
                return overlapped
        return GatheredAttention(on_device, group, self.kernel_for(layout), self._transport)

    def warm(self, layouts: Iterable[AttentionLayout]) -> None:
        """See `Backend.warm`."""
        if not any(isinstance(kernel, cudnn.CudnnKernel) for kernel in self._kernels):
            return
        sizes = self._sizes
        for layout in layouts:
            overlapped = self._overlaps(layout)
            kernel = self._kernels[-1] if overlapped else self.kernel_for(layout)
            if isinstance(kernel, cudnn.CudnnKernel) and layout.pieces:
                kernel.warm(layout, sizes.heads, sizes.kv_heads, sizes.dim, self._dtype, overlapped)

    def _overlaps(self, layout: AttentionLayout) -> bool:
        longest = int(layout.lengths.max())
        return self._overlap is not None and layout.size > 1 and OVERLAP_LENGTH <= longest <= cudnn.LONGEST


def _serves(kernel: Kernel, layout: AttentionLayout) -> bool:
    return kernel.name != "cudnn" or int(layout.lengths.max()) <= cudnn.LONGEST


def create(
    name: str,
    groups: RuntimeGroups,
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    *,
    deterministic: bool = False,
) -> Backend:
    """The backend that `name` stands for; collective over the domain, as it may map memory of peers.

    Raises:
        PreflightError: see `check`; or a transport that this machine does not offer.
    """
    transport_name, kernel_name = check(name, device, dtype, sizes.dim)
    if transport_name == "te":
        from dcpbench.dcp.attention.te import TransformerEngineBackend  # noqa: PLC0415  # optional, slow to import

        return TransformerEngineBackend(sizes.heads, sizes.kv_heads, sizes.dim, kernel_name, groups, device, dtype)
    kernels = _kernels(kernel_name, device, dtype, sizes.dim, deterministic)
    transport = _transport(transport_name, groups, sizes, device, dtype)
    return GatheredBackend(kernels, transport, sizes, device, dtype, _overlap(kernels[-1], transport, device))


def check(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """(transport or `auto`, kernel or `auto`) of a backend name; (`te`, communication) for Transformer Engine.

    Raises:
        PreflightError: an unknown name, or one that does not fit the device, type or head size.
    """
    first, slash, second = name.partition("/")
    if first == "te":
        return _check_te(second or "p2p", device, dtype)
    transport, kernel = (first, second) if slash else ("auto", first)
    if kernel not in (*KERNELS, "auto") or transport not in (*TRANSPORTS, "auto"):
        raise PreflightError(
            f"cases.attention: unknown backend {name!r}; known: auto, {', '.join(KERNELS)}, or one of these after "
            f"{' or '.join(f'{t}/' for t in TRANSPORTS)}; te, te/{', te/'.join(TE_COMMUNICATIONS[1:])}"
        )
    described = f"this launch has {device.type}, {str(dtype).removeprefix('torch.')} and a head dimension of {head_dim}"
    half = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if kernel == "flash" and not (half and head_dim <= FLASH_HEAD_DIMS):
        raise PreflightError(
            f"cases.attention flash needs CUDA, bfloat16 or float16 and a head dimension up to {FLASH_HEAD_DIMS}; "
            f"{described}"
        )
    if kernel == "cudnn" and not (device.type == "cuda" and cudnn.usable(dtype, head_dim)):
        raise PreflightError(
            f"cases.attention cudnn needs a GPU of compute capability 9.0 or newer, bfloat16 or float16, a head "
            f"dimension of {' or '.join(map(str, cudnn.HEAD_DIMS))} and the package nvidia-cudnn-frontend; {described}"
        )
    if transport == "symmetric" and device.type != "cuda":
        raise PreflightError(f"cases.attention symmetric/... needs CUDA; {described}")
    if kernel == "auto" and half and head_dim > FLASH_HEAD_DIMS:
        raise PreflightError(
            f"cases.attention auto: head dimension {head_dim} is above {FLASH_HEAD_DIMS}, which no fused kernel "
            "serves; choose a smaller model.head_dim or name cases.attention sdpa to measure the slow path"
        )
    return transport, kernel


def _check_te(communication: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    if communication not in TE_COMMUNICATIONS:
        raise PreflightError(
            f"cases.attention: Transformer Engine has no communication {communication!r}; known: "
            f"{', '.join(TE_COMMUNICATIONS)}"
        )
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        raise PreflightError("cases.attention te needs CUDA and bfloat16 or float16")
    try:
        version = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        raise PreflightError("cases.attention te needs the package transformer-engine; it is not installed") from None
    if tuple(int(part) for part in version.split(".")[:2]) < TE_MINIMUM:
        raise PreflightError(
            f"cases.attention te needs Transformer Engine {'.'.join(map(str, TE_MINIMUM))} or newer; found {version}"
        )
    return "te", communication


def _kernels(name: str, device: torch.device, dtype: torch.dtype, dim: int, deterministic: bool) -> tuple[Kernel, ...]:
    if name == "reference":
        return (REFERENCE,)
    if name == "sdpa" or device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return (SDPA,)
    if name == "flash":
        return (FLASH,)
    if name == "cudnn":
        return (cudnn.kernel(deterministic),)
    return (FLASH, cudnn.kernel(deterministic)) if cudnn.usable(dtype, dim) else (FLASH,)


def _transport(name: str, groups: RuntimeGroups, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Transport:
    if groups.largest == 1:
        return CollectiveTransport()
    wanted = name != "collective" and device.type == "cuda"
    missing = _no_mapped_memory(groups.world) if wanted else None
    if wanted and missing is None:
        from dcpbench.dcp.attention.symmetric import SymmetricTransport  # noqa: PLC0415  # needs Triton

        return SymmetricTransport(groups, sizes.rows, sizes.kv_heads * sizes.dim, dtype, device)
    if name == "symmetric":
        raise PreflightError(f"cases.attention symmetric/...: {missing}; choose collective/... or auto")
    groups.connect()
    return CollectiveTransport()


def _no_mapped_memory(ranks: int) -> str | None:
    """Why the ranks, one for each of this machine's first GPUs, cannot read each other's memory; None if they can."""
    for module in ("triton", "torch.distributed._symmetric_memory"):
        if find_spec(module) is None:
            return f"{module} is not installed"
    # All pairs, not only this rank's: every rank must come to the same answer.
    for gpu, peer in itertools.permutations(range(ranks), 2):
        if not torch.cuda.can_device_access_peer(gpu, peer):
            return f"GPU {gpu} cannot access the memory of GPU {peer}"
    return None


def _overlap(
    kernel: Kernel, transport: Transport, device: torch.device
) -> Callable[[DeviceLayout, CpGroup], Attention | None] | None:
    """How long microbatches hide their communication, where kernel and transport allow it."""
    if not isinstance(kernel, cudnn.CudnnKernel) or transport.name != "symmetric":
        return None
    from dcpbench.dcp.attention import overlapped, symmetric  # noqa: PLC0415  # need Triton

    assert isinstance(transport, symmetric.SymmetricTransport)
    return functools.partial(overlapped.prepare, kernel=kernel, transport=transport, stream=torch.cuda.Stream(device))
