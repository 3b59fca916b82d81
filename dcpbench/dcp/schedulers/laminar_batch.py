"""The samples of one batch in the order of `laminar`, and what they need on each group size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dcpbench.dcp.compilation import vector
from dcpbench.dcp.costs import TILE, CostModel, squares_of_all
from dcpbench.dcp.ordering import stable_order
from dcpbench.dcp.schedulers.laminar_instance import Instance
from dcpbench.dcp.workload import PaddingRule, usable_length


class Batch:
    """The samples of one global batch, longest first, and what each needs on each group size.

    A *place* is a position in that order. `lengths` has shape (samples,) and is in tokens.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        ranks: int,
        sizes: tuple[int, ...],
        capacity: int,
        padding: PaddingRule,
        cost: CostModel,
    ) -> None:
        self.samples: NDArray[np.int64] = stable_order(lengths.max() - lengths)
        """Positions in the global batch, in planning order; equal lengths keep their order."""
        self.lengths: NDArray[np.int64] = lengths[self.samples]
        self.ranks, self.sizes, self.capacity, self.cost = ranks, sizes, capacity, cost
        self._padding = padding
        self._units = np.array([padding.multiple(k) for k in sizes], np.int64)
        limits = [usable_length(k * capacity, k, padding) for k in sizes]
        self.usable: NDArray[np.int64] = np.searchsorted(-self.lengths, -np.array(limits), side="left")
        """For each size, the first place whose sample fits memory on it."""
        self.instance = self._instance(padding)

    def _instance(self, padding: PaddingRule) -> Instance:
        cost, k = self.cost, np.array(self.sizes, np.float64)
        within, shared = k <= cost.node_size, k > 1
        bandwidth = np.where(within, cost.within.bandwidth, cost.between.bandwidth)
        hidden = cost.overlap * cost.square / cost.layers / (k * k)
        self._rates = np.stack(
            [
                np.full(len(k), float(cost.base)),
                (cost.token + cost.merge * (k - 1)) / k,
                cost.square / k,
                cost.layers * (k - 1),
                np.where(within, cost.within.latency, cost.between.latency),
                cost.hop_bytes[0] / k / bandwidth,
                cost.hop_bytes[1] / k / bandwidth,
                cost.forward_share * hidden,
                (1 - cost.forward_share) * hidden,
                np.where(shared, cost.floor_shared, cost.floor),
            ],
            axis=1,
        )
        tokens = padding.pad_all(self.lengths, 1)
        return Instance(
            ranks=self.ranks,
            node=cost.node_size,
            capacity=self.capacity,
            lengths=vector(self.lengths),
            single_tokens=vector(tokens),
            single_times=vector(cost.token * tokens + cost.square * squares_of_all(self.lengths, 1)),
            sizes=vector(np.array(self.sizes, np.int64)),
            units=vector(self._units),
            usable=vector(self.usable),
            rates=vector(self._rates.reshape(-1)),
        )

    def fastest(self) -> float:
        """Seconds of the longest sample, alone on the size on which that takes least."""
        longest, k = int(self.lengths[0]), np.array(self.sizes)
        tokens = -(-longest // self._units) * self._units
        tile = TILE * np.where(k > 1, 2 * k, 1)
        squares = (float(longest) ** 2 + (-(-longest // tile) * tile).astype(np.float64) ** 2) / 2
        base, token, square, hops, latency, *sent_and_hidden, floor = self._rates.T
        times = base + token * tokens + square * squares
        for sent, hidden in zip(sent_and_hidden[:2], sent_and_hidden[2:], strict=True):
            times += hops * np.maximum(0.0, latency + sent * tokens - hidden * squares)
        return float(np.maximum(times, floor)[self.usable == 0].min())

    def bound(self) -> float:
        """Seconds to start a search from: least work spread evenly, or the fastest time of the longest sample.

        Least work is on the smallest size that memory allows.
        """
        cost, work, end = self.cost, 0.0, len(self.lengths)
        for number, (k, first) in enumerate(zip(self.sizes, self.usable.tolist(), strict=True)):
            if first < end:
                own, unit = self.lengths[first:end], int(self._units[number])
                tokens = -(-own // unit) * unit
                rate = cost.token + cost.merge * (k - 1)
                work += float((rate * tokens + cost.square * squares_of_all(own, k)).sum())
                end = first
            if end == 0:
                break
        work += cost.base * max(self.ranks, float(self.lengths.sum()) / self.capacity)
        filled = -(-int(self.lengths.sum()) // (self.capacity * self.ranks))
        return max(work / self.ranks, self.fastest(), filled * min(cost.floor, cost.floor_shared))

    def padded_order(self, sizes: tuple[int, ...], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Places in the order of `default_dynamic_cp`, and the index in `sizes` of what each needs; None if that fails.

        It fails if a sample does not fit the largest size. The order is by padded tokens on the smallest size that
        holds a sample, then on the largest, then by position in the batch.
        """
        units = [self._padding.multiple(k) for k in sizes]
        limits = [usable_length(k * capacity, k, self._padding) for k in sizes]
        if self.lengths[0] > limits[-1]:
            return None
        needs = np.searchsorted(np.maximum.accumulate(limits), self.lengths)
        unit = np.array(units, np.int64)[needs]
        keys = (self.samples, -self.lengths // units[-1], -self.lengths // unit * unit)
        order: NDArray[np.int64] = np.lexsort(keys)
        return order, needs[order]
