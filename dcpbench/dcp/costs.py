"""How long one microbatch takes on a CP group, and how short any schedule of a batch could be.

The time of a job of `n` padded tokens on k ranks, forward and backward, all layers, in seconds:

    t(k; n, q) = max(floor_k, d)
    d          = base + (token n + square q) / k
                 + [k > 1] merge (k - 1) n / k
                 + [k > 1] layers (k - 1) sum over forward and backward of
                           max(0, latency + bytes (n / k) / bandwidth - overlap square' q / k^2)

d is what the device takes; floor_k is what the host needs to queue a microbatch's kernels, `floor` on one rank and
`floor_shared` on a group, during which a device with less to do waits. q sums, over the samples, the mean of L^2 and
of L^2 with L rounded up to whole attention tiles in each of the 2k zigzag chunks. `square'` is the share of one layer
and one direction in `square`: a ring hop is hidden behind the attention of the block that has already arrived, and
only the rest of it is exposed. `overlap` is the share of attention that can hide it: 0 where keys are gathered before
attention starts. A group that does not fit in one node pays the latency and bandwidth between nodes.

t never falls when a sample is added to a job: the exposed hop falls by at most (k - 1) / k of what attention adds.

Where attention chooses between two kernels (`kernel_choice.py`), `square` is that of short key ranges, and a job with
at least `keys` keys a query and `work` query-key pairs a rank takes the lower `long.square`. Then t can fall when a
sample is added, on which no search can rest: schedulers plan with one of the two (`planning`), the lower bound with the
lower one for all samples that could get it (`may_be_long`), and what a plan takes is predicted with both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcpbench.dcp.workload import MINIMAL, PaddingRule

TILE = 128
"""Rows of the attention kernels' tiles: a chunk of fewer rows costs about as much as a full one."""


@dataclass(frozen=True)
class Link:
    """One hop of a ring: `latency` in seconds, `bandwidth` in bytes per second and rank."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class LongKernel:
    """The attention kernel of jobs whose queries see many keys."""

    square: float
    """As `CostModel.square`, with this kernel."""
    keys: float
    """The keys a query of such a job sees on average, or more."""
    work: float
    """Its query-key pairs on each rank, or more."""

    def serves(self, size: int, tokens: NDArray[Any], real: NDArray[Any]) -> NDArray[np.bool_]:
        """Which jobs on `size` ranks, of so many tokens and with such sums of squared real lengths, take it."""
        serves: NDArray[np.bool_] = (real >= 2 * self.keys * tokens) & (real >= 2 * self.work * size)
        return serves


@dataclass(frozen=True)
class CostModel:
    """Coefficients of the job time; see the module's text. Times in seconds."""

    name: str
    assumed: bool
    """Whether the coefficients come from data sheets and arithmetic, not from a fit to measured jobs."""
    layers: int
    base: float
    """Per microbatch, whatever is in it: weight reads, gradient updates, launches."""
    token: float
    """Per token: projections, feed-forward, output layer, element-wise work."""
    square: float
    """Per squared token: causal attention of all layers, forward and backward."""
    merge: float
    """Per token and ring hop: adding up partial attention outputs and gradients."""
    hop_bytes: tuple[float, float]
    """Per token and layer that one hop sends, forward (K and V) and backward (K, V and their gradients)."""
    node_size: int
    """Ranks of one node, numbered in a row; a group of more ranks crosses nodes."""
    within: Link
    between: Link
    forward_share: float = 2 / 7
    """Of the attention work: two matrix products of seven (the backward recomputes one and does four)."""
    floor: float = 0.0
    """The least that a microbatch on one rank takes: what the host needs to queue its kernels."""
    floor_shared: float = 0.0
    """The same for a microbatch on a group."""
    overlap: float = 1.0
    """Share of the attention, between 0 and 1, behind which a hop can hide."""
    long: LongKernel | None = None
    """A second attention kernel; None where one serves all."""

    def planning(self, capacity: int) -> CostModel:
        """The model with the one attention kernel that decides how balanced plans are at this capacity.

        It is the one for long key ranges where a single sample that fills a rank has it.
        """
        if self.long is None:
            return self
        full = float(capacity) ** 2
        serves = bool(self.long.serves(1, np.array([float(capacity)]), np.array([full]))[0])
        return replace(self, square=self.long.square if serves else self.square, long=None)

    def may_be_long(self, size: int, capacity: int, lengths: NDArray[np.int64], longest: int) -> NDArray[np.bool_]:
        """Which samples any job on `size` ranks, with all that fits beside them, could take to the second kernel.

        Args:
            size: ranks of the job.
            capacity: tokens per rank.
            lengths: real lengths, shape (samples,).
            longest: the longest sample of the batch.
        """
        if self.long is None or longest < 2 * self.long.keys:  # no query sees more than half of it, on average
            return np.zeros(lengths.shape, np.bool_)
        own = lengths.astype(np.float64)
        room = np.maximum(0.0, size * capacity - own)
        may: NDArray[np.bool_] = own**2 + room * np.minimum(longest, room) >= 2 * self.long.work * size
        return may

    def time(self, size: int, tokens: float, squares: float, real: float | None = None) -> float:
        """Seconds of a job of `tokens` padded tokens and `squares` on `size` ranks; `real` as for `times`."""
        if self.long is not None and real is not None:
            return float(self.times(size, np.array([tokens]), np.array([squares]), np.array([real]))[0])
        k = size
        total = self.base + (self.token * tokens + self.square * squares) / k
        if k == 1:
            return total if total > self.floor else self.floor
        link = self.within if k <= self.node_size else self.between
        sent = tokens / k / link.bandwidth
        hidden = self.overlap * self.square / self.layers * squares / (k * k)
        forward = link.latency + self.hop_bytes[0] * sent - self.forward_share * hidden
        backward = link.latency + self.hop_bytes[1] * sent - (1 - self.forward_share) * hidden
        exposed = (forward if forward > 0 else 0.0) + (backward if backward > 0 else 0.0)
        total += (k - 1) * (self.merge * tokens / k + self.layers * exposed)
        return total if total > self.floor_shared else self.floor_shared

    def times(
        self, size: int, tokens: NDArray[Any], squares: NDArray[Any], real: NDArray[Any] | None = None
    ) -> NDArray[np.float64]:
        """Seconds of jobs on `size` ranks.

        Args:
            size: ranks of each job.
            tokens: padded tokens, shape (jobs,).
            squares: as `squares_of` adds them, same shape.
            real: sums of squared real lengths, same shape; they decide which attention kernel a job takes. Without
                them all take that of short key ranges.
        """
        k = size
        square: float | NDArray[np.float64] = self.square
        if self.long is not None and real is not None:
            square = np.where(self.long.serves(k, tokens, real), self.long.square, self.square)
        total: NDArray[np.float64] = self.base + (self.token * tokens + square * squares) / k
        if k == 1:
            return np.maximum(total, self.floor)
        link = self.within if k <= self.node_size else self.between
        sent = tokens / k / link.bandwidth
        hidden = self.overlap * square / self.layers * squares / (k * k)
        exposed = np.maximum(0.0, link.latency + self.hop_bytes[0] * sent - self.forward_share * hidden)
        exposed += np.maximum(0.0, link.latency + self.hop_bytes[1] * sent - (1 - self.forward_share) * hidden)
        total += (k - 1) * (self.merge * tokens / k + self.layers * exposed)
        return np.maximum(total, self.floor_shared)

    def job_time(self, lengths: Sequence[int], size: int, padding: PaddingRule = MINIMAL) -> float:
        """Seconds of the job that holds samples of these real lengths on `size` ranks."""
        tokens = sum(padding.pad(length, size) for length in lengths)
        squares = sum(squares_of(length, size) for length in lengths)
        return self.time(size, tokens, squares, float(sum(length * length for length in lengths)))


def squares_of(length: int, size: int) -> float:
    """What a sample of `length` real tokens adds to q on `size` ranks."""
    unit = TILE * (2 * size if size > 1 else 1)
    rounded = -(-length // unit) * unit
    return (length * length + rounded * rounded) / 2


def squares_of_all(lengths: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """`squares_of` each of the lengths."""
    unit = TILE * (2 * size if size > 1 else 1)
    rounded = (-(-lengths // unit) * unit).astype(np.float64)
    found: NDArray[np.float64] = (lengths.astype(np.float64) ** 2 + rounded**2) / 2
    return found


def expected_squares(size: NDArray[Any], tokens: NDArray[Any], real: NDArray[Any]) -> NDArray[np.float64]:
    """What `squares_of` would add up to for jobs of which only sums are known.

    A length is rounded up by half a unit on average, so the mean of L^2 and R^2 is about L^2 + L unit / 2.
    """
    unit = TILE * np.where(size > 1, 2 * size, 1)
    found: NDArray[np.float64] = real + tokens * unit / 2
    return found


_NVLINK = Link(12e-6, 400e9)
_NETWORK = Link(25e-6, 50e9)


def h200(
    name: str, *, parameters: float, layers: int, hidden: int, query: int, key_value: int, node_size: int = 8
) -> CostModel:
    """Assumed coefficients for a model on H200: nothing here was fitted to a measurement of a job.

    600 TFLOP/s matrix products (6 operations per parameter and token), 400 TFLOP/s causal attention
    (7 products of which half is masked), 4.0 TB/s memory with 180 bytes of element-wise traffic per hidden value
    and layer, 6 bytes of weight and gradient traffic per parameter and 0.15 ms of launches per layer in every
    microbatch; per hop 12 us and 400 GB/s over NVLink, 25 us and 50 GB/s between nodes; K and V in bf16.
    `query` and `key_value` are the widths of the projections, all heads together.
    """
    sent = 2.0 * 2 * key_value
    return CostModel(
        name=name,
        assumed=True,
        layers=layers,
        base=6 * parameters / 4e12 + 0.15e-3 * layers,
        token=6 * parameters / 600e12 + 180 * hidden * layers / 4e12,
        square=7 * layers * query / 400e12,
        merge=16 * query * layers / 4e12,
        hop_bytes=(sent, 2 * sent),
        node_size=node_size,
        within=_NVLINK,
        between=_NETWORK,
    )


H200_1B = h200("h200-1b", parameters=1.24e9, layers=16, hidden=2048, query=2048, key_value=512)
"""16 layers, hidden size 2048, 32 heads and 8 key-value heads of 64, 1.24e9 parameters in matrix products."""
H200_8B = h200("h200-8b", parameters=7.5e9, layers=32, hidden=4096, query=4096, key_value=1024)
"""32 layers, hidden size 4096, 32 heads and 8 key-value heads of 128, 7.5e9 parameters in matrix products."""
