"""What is kept of a gradient to compare it with another: a random projection of it, and its norm, by segment.

The projection is a count sketch (Charikar, Chen and Farach-Colton 2002) of the flat gradient: each element
gets a fixed random sign and is added to one of `BUCKETS` numbers. It is linear, so the difference of two
sketches is the sketch of the difference, and the squared length of a sketch is, on average over signs, that
of the gradient; with 64 buckets the length of a segment's difference is known to about 9 %, that of a
whole gradient better. The same gradient always has the same sketch, whoever holds which part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dcpbench.worker.parameters import FlatParameters

BUCKETS = 64
SEED = 20_240_601
CHUNK = 1 << 22
"""Elements whose signs are drawn; every further chunk has the same ones, turned around bucket by bucket at random."""


def own_parts(flat: FlatParameters, rank: int, world: int) -> list[tuple[int, slice]]:
    """(segment, place in the flat gradient) of what this rank looks at after; all ranks' parts make up the whole.

    With sharded gradients it is what the rank has the sum of; else an equal share of it.
    """
    if flat.shards > 1:
        return [(number, segment.shard(flat.shards, flat.shard)) for number, segment in enumerate(flat.segments)]
    total = len(flat.grad)
    low, high = rank * total // world, (rank + 1) * total // world
    parts = [
        (number, slice(max(segment.start, low), min(segment.stop, high)))
        for number, segment in enumerate(flat.segments)
    ]
    return [(number, part) for number, part in parts if part.start < part.stop]


class GradientSketcher:
    """Sketches the gradients of `flat`; every rank its own part."""

    def __init__(self, flat: FlatParameters, rank: int, world: int) -> None:
        self._flat = flat
        self._parts = own_parts(flat, rank, world)
        total, device, dtype = len(flat.grad), flat.grad.device, flat.grad.dtype
        self._chunk = min(CHUNK, max(BUCKETS, 1 << (total - 1).bit_length()))
        draw = np.random.default_rng(SEED)
        self._signs = torch.from_numpy(2 * draw.integers(0, 2, self._chunk) - 1).to(device, dtype)
        flips = 2.0 * draw.integers(0, 2, (-(-total // self._chunk), BUCKETS)) - 1
        self._flips = torch.from_numpy(flips).to(device, torch.float64)
        self._buffer = torch.zeros(self._chunk, dtype=dtype, device=device)

    @property
    def shape(self) -> tuple[int, int]:
        """Of what a call returns."""
        return len(self._flat.segments), BUCKETS + 1

    def __call__(self) -> Tensor:
        """This rank's part, (segments, BUCKETS + 1) float64 on the device; summed over ranks it is the whole.

        The last column holds sums of squares. Queued, not waited for.
        """
        table = torch.zeros(self.shape, dtype=torch.float64, device=self._flat.grad.device)
        for number, part in self._parts:
            for chunk, values, place in self._chunks(part):
                if len(values) < self._chunk:
                    self._buffer.zero_()
                torch.mul(values, self._signs[place], out=self._buffer[place])
                # Neighbours go to different buckets: a gradient is often large in a stretch of its elements.
                sums = self._buffer.view(-1, BUCKETS).sum(0, dtype=torch.float64)
                table[number, :BUCKETS].addcmul_(sums, self._flips[chunk])
                self._buffer.mul_(self._buffer)
                table[number, BUCKETS] += self._buffer.sum(dtype=torch.float64)
        return table

    def _chunks(self, part: slice) -> Iterator[tuple[int, Tensor, slice]]:
        """(chunk, its elements that lie in the part, their place in the chunk)."""
        for chunk in range(part.start // self._chunk, -(-part.stop // self._chunk)):
            origin = chunk * self._chunk
            low, high = max(part.start, origin), min(part.stop, origin + self._chunk)
            yield chunk, self._flat.grad[low:high], slice(low - origin, high - origin)


@dataclass(frozen=True)
class GradientComparison:
    """Two gradients at the same weights, from their whole sketches. Norms are of the sums over labelled tokens."""

    norms: dict[str, float]
    difference: float | None
    """Norm of the difference over the baseline's norm; None where that is 0."""
    segment: str | None
    """Where the same ratio of a segment is greatest; None where the gradients are equal."""
    sketches: dict[str, tuple[float, ...]]
    """Of the whole gradients: those of the segments added up."""


def compare(baseline: Tensor, dcp: Tensor, segments: tuple[str, ...]) -> GradientComparison:
    """Compares sketches of shape (segments, BUCKETS + 1), summed over ranks, on the host."""
    apart = (baseline - dcp)[:, :-1].square().sum(1)
    squares = baseline[:, -1]
    norm = float(squares.sum().sqrt())
    shares = torch.where(squares > 0, apart / squares.clamp(min=1e-300), torch.zeros_like(apart))
    worst = int(shares.argmax())
    return GradientComparison(
        norms={"baseline": norm, "dcp": float(dcp[:, -1].sum().sqrt())},
        difference=float(apart.sum().sqrt()) / norm if norm != 0 else None,
        segment=segments[worst] if bool(shares[worst] != 0) else None,
        sketches={case: tuple(table[:, :-1].sum(0).tolist()) for case, table in (("baseline", baseline), ("dcp", dcp))},
    )
