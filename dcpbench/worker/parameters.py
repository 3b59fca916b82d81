"""The parameters of a model, their gradients and their float32 weights as flat buffers.

The buffers are divided into segments, each reduced and updated as one: the embeddings, every block's
matrices, the output projection, and all vectors (biases and norms, which have no weight decay).
Gradients of a segment are finished together, so its reduction can start while others are computed.

In float32 compute the parameters are views of the float32 weights; in a narrower type they are views
of a buffer of that type. With `shards` above 1 each rank keeps float32 weights (and later optimizer
state) for its part of every segment only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dcpbench.dcp import collectives

ALIGNMENT = 64
"""Every parameter starts at a multiple of this many elements, for aligned vector loads."""

_BLOCK = re.compile(r"blocks\.\d+")


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of the flat buffers."""

    name: str
    """`blocks.3`, `output`, `vectors`, or `embedding` for all other matrices."""
    start: int
    stop: int

    @property
    def decayed(self) -> bool:
        """Whether weight decay acts on it: on matrices only."""
        return self.name != "vectors"

    def of(self, flat: Tensor) -> Tensor:
        """The segment of a flat buffer."""
        return flat[self.start : self.stop]

    def shard(self, shards: int, shard: int) -> slice:
        """Where the part of one of `shards` ranks lies in the flat buffers."""
        share = (self.stop - self.start) // shards
        return slice(self.start + shard * share, self.start + (shard + 1) * share)


@dataclass(frozen=True)
class Piece:
    """What the optimizer updates on this rank as one: equally long views of the buffers."""

    weight: Tensor
    """Float32 weights."""
    grad: Tensor
    compute: Tensor
    """What forward and backward read; the same memory as `weight` when the types are equal."""
    decayed: bool


def segment_of(name: str, parameter: Tensor) -> str:
    """The name of the segment that a parameter belongs to."""
    if parameter.ndim < 2:
        return "vectors"
    block = _BLOCK.match(name)
    if block:
        return block[0]
    return "output" if name.startswith("output.") else "embedding"


class FlatParameters:
    """The parameters of a model laid out in flat buffers.

    The model may have been built on the meta device: its parameters are replaced by views of new,
    zeroed buffers, each with `main_grad`, its view of the gradient buffer. Fill the weights with `fill`.

    Args:
        model: its parameters are replaced.
        dtype: compute type.
        device: where the buffers are.
        exact: type of master weights and gradients; float32 outside tests.
        shards: over how many ranks master weights and optimizer state are divided.
        shard: this rank's number among them.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        exact: torch.dtype,
        *,
        shards: int = 1,
        shard: int = 0,
    ) -> None:
        self.shards, self.shard = shards, shard
        named = dict(model.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in named.items()}
        self.count = sum(parameter.numel() for parameter in named.values())
        self.slices, self.segments = _lay_out(named, ALIGNMENT, ALIGNMENT * shards)
        total = self.segments[-1].stop
        self.grad = torch.zeros(total, dtype=exact, device=device)
        self.compute = torch.zeros(total, dtype=dtype, device=device)
        self.master = self.compute if dtype == exact else torch.zeros(total // shards, dtype=exact, device=device)
        """Float32 weights: whole, or the parts of this rank of all segments, one after the other."""
        self.pieces = self._cut()
        for name, shape in self._shapes.items():
            self._replace(model, name, shape)

    @property
    def weight_bytes(self) -> int:
        """What the weights take on this rank: in the compute type and, where that is another, in float32."""
        return self.compute.nbytes + (0 if self.master is self.compute else self.master.nbytes)

    def _cut(self) -> tuple[Piece, ...]:
        """The pieces this rank updates: matrices and vectors, or its part of every segment."""
        if self.shards == 1:
            decayed = max((segment.stop for segment in self.segments if segment.decayed), default=0)
            return tuple(
                Piece(self.master[part], self.grad[part], self.compute[part], decay)
                for part, decay in ((slice(0, decayed), True), (slice(decayed, len(self.grad)), False))
                if part.start < part.stop
            )
        pieces, offset = [], 0
        for segment in self.segments:
            part = segment.shard(self.shards, self.shard)
            length = part.stop - part.start
            weight = self.compute[part] if self.master is self.compute else self.master[offset : offset + length]
            pieces.append(Piece(weight, self.grad[part], self.compute[part], segment.decayed))
            offset += length
        return tuple(pieces)

    def _replace(self, model: nn.Module, name: str, shape: torch.Size) -> None:
        part = self.slices[name]
        parameter = nn.Parameter(self.compute[part].view(shape))
        grad = self.grad[part].view(shape)
        # Layers of linear.py and loss.py add to the buffer themselves. Whatever reaches a parameter
        # through autograd is added there too.
        parameter.main_grad = grad  # type: ignore[attr-defined]
        if parameter.dtype == grad.dtype:
            parameter.grad = grad
        else:
            parameter.register_post_accumulate_grad_hook(_accumulate_into(grad))
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, parameter)

    def fill(self, write: Callable[[dict[str, Tensor]], None]) -> None:
        """Sets the weights: `write` is given them by name in float32, whole and zero, and changes them in place."""
        if self.shards == 1:
            write(self._by_name(self.master))
        else:
            whole = torch.zeros_like(self.grad)
            write(self._by_name(whole))
            for segment, piece in zip(self.segments, self.pieces, strict=True):
                piece.weight.copy_(whole[segment.shard(self.shards, self.shard)])
            self.compute.copy_(whole)
        self.publish()

    def publish(self) -> None:
        """Copies this rank's float32 weights to its compute weights."""
        for piece in self.pieces:
            if piece.compute.data_ptr() != piece.weight.data_ptr():
                piece.compute.copy_(piece.weight)

    def named_master(self) -> dict[str, Tensor]:
        """The float32 weights by parameter name: views, or with shards a copy collected from all ranks (collective)."""
        if self.shards == 1:
            return self._by_name(self.master)
        whole = torch.empty_like(self.grad)
        for segment, piece in zip(self.segments, self.pieces, strict=True):
            collectives.all_gather(segment.of(whole), piece.weight)
        return self._by_name(whole)

    def collect(self, number: int) -> Any:
        """Starts to gather the compute weights of segment `number` from the ranks that updated them; collective.

        The result has `wait`, which makes the current stream wait.
        """
        whole = self.segments[number].of(self.compute)
        return collectives.all_gather(whole, self.pieces[number].compute, async_op=True)

    @property
    def foreign_gradients(self) -> list[Tensor]:
        """The parts of the gradient buffer that other ranks' optimizers work on."""
        return [
            self.grad[segment.shard(self.shards, shard)]
            for segment in self.segments
            for shard in range(self.shards)
            if shard != self.shard
        ]

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: flat[part].view(self._shapes[name]) for name, part in self.slices.items()}


def _lay_out(
    named: dict[str, nn.Parameter], alignment: int, segment_alignment: int
) -> tuple[dict[str, slice], tuple[Segment, ...]]:
    """(place of every parameter, segments in their order): matrices as the model names them, vectors last."""
    members: dict[str, list[str]] = {}
    for name, parameter in sorted(named.items(), key=lambda item: item[1].ndim < 2):
        members.setdefault(segment_of(name, parameter), []).append(name)
    slices: dict[str, slice] = {}
    segments = []
    offset = 0
    for segment, names in members.items():
        start = offset
        for name in names:
            size = named[name].numel()
            slices[name] = slice(offset, offset + size)
            offset += -(-size // alignment) * alignment
        offset = start + -(-(offset - start) // segment_alignment) * segment_alignment
        segments.append(Segment(segment, start, offset))
    return slices, tuple(segments)


def _accumulate_into(total: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            total.add_(parameter.grad)
            parameter.grad = None

    return hook
