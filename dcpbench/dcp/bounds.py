"""How short any plan of a batch could be under the cost model: what predicted times are compared with.

Everything here holds for any groups, order and packing. A job of k ranks takes k t rank-seconds, of which each sample
answers for a part that only depends on k:

    w(k) = token n + square q + [k > 1] merge (k - 1) n + k base f(n / (k capacity))

with n its padded tokens and q its squares, ring hops left out. f is a *dual feasible* function: over samples that fit
one microbatch together its values add up to at most 1, so a microbatch's base cost covers its samples' shares. f is the
identity, or for a threshold e up to 1/2: 1 above 1 - e, 0 below e, the identity between (the bound L2 of bin packing by
Martello and Toth: two samples of more than half a microbatch never share one).

No plan is shorter than the least T for which the samples' least w, over sizes on which they alone take at most T, add
up to N T. With f = 0, N base is added instead: a rank without microbatches is idle for T, no less than the base.
Nor is T below the host's floor for as many microbatches as the tokens fill on the fullest rank. Of two attention
kernels the quicker is assumed for every sample that any job could take to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dcpbench.dcp.costs import CostModel, squares_of_all
from dcpbench.dcp.workload import MINIMAL, PaddingRule

THRESHOLDS = (None, 0.0, 0.2, 0.25, 1 / 3, 0.5)
"""Of f; None for f = 0."""

MANY = 5_000_000
"""Samples x sizes above which, without a cost that grows with the size, the thresholds above 0 are left out."""

Floats = NDArray[np.float64]


def lower_bound(
    lengths: Sequence[int],
    ranks: int,
    capacity: int,
    sizes: Sequence[int],
    cost: CostModel,
    padding: PaddingRule = MINIMAL,
) -> float:
    """Seconds that no plan with groups of these sizes can beat. `capacity` is in tokens per rank.

    Infinite when a sample fits no size.
    """
    batch = _Batch(lengths, capacity, sizes, cost, padding)
    best = batch.longest
    if not np.isfinite(best):
        return best
    exact = cost.merge > 0 or len(lengths) * len(sizes) <= MANY
    for threshold in THRESHOLDS if exact else THRESHOLDS[:2]:
        best = batch.least_time(threshold, ranks, best)
    return batch.least_time_of_floors(ranks, best)


class _Batch:
    """Distinct lengths against group sizes, one size at a time: thousands of each would not fit memory."""

    def __init__(
        self, lengths: Sequence[int], capacity: int, sizes: Sequence[int], cost: CostModel, padding: PaddingRule
    ) -> None:
        self._lengths, self._counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
        self._capacity, self._sizes, self._cost, self._padding = capacity, sorted(sizes), cost, padding
        self._quick = None if cost.long is None else replace(cost, square=min(cost.square, cost.long.square), long=None)
        self._square = cost.square if self._quick is None else self._quick.square
        """The least of a squared token."""
        self.longest = min((float(self._solo(self._lengths[-1:], k)[0]) for k in sizes), default=math.inf)
        """Seconds of the longest sample alone, on the size on which it takes least. No other takes longer."""

    def _solo(self, lengths: NDArray[np.int64], k: int) -> Floats:
        """Seconds alone on k ranks; infinite where memory does not suffice."""
        tokens = self._padding.pad_all(lengths, k)
        squares = squares_of_all(lengths, k)
        time = self._cost.times(k, tokens, squares)
        if self._quick is not None:
            time = np.where(self._may_be_quick(lengths, k), self._quick.times(k, tokens, squares), time)
        return np.where(tokens <= k * self._capacity, time, np.inf)

    def _may_be_quick(self, lengths: NDArray[np.int64], k: int) -> NDArray[np.bool_]:
        return self._cost.may_be_long(k, self._capacity, lengths, int(self._lengths[-1]))

    def _work(self, lengths: NDArray[np.int64], k: int, threshold: float | None) -> Floats:
        """w on k ranks."""
        cost, tokens = self._cost, self._padding.pad_all(lengths, k)
        square: float | Floats = cost.square
        if self._quick is not None:
            square = np.where(self._may_be_quick(lengths, k), self._square, square)
        work: Floats = (cost.token + cost.merge * (k - 1)) * tokens + square * squares_of_all(lengths, k)
        if threshold is not None:
            part = tokens / (k * self._capacity)
            if threshold > 0:
                part = np.where(part > 1 - threshold, 1.0, np.where(part >= threshold, part, 0.0))
            work += k * cost.base * part
        return work

    def least_time(self, threshold: float | None, ranks: int, known: float) -> float:
        """The least T, from `known` on, that leaves the ranks enough time for all samples' work."""
        cost, lengths = self._cost, self._lengths
        least, allowed = np.full(len(lengths), np.inf), np.full(len(lengths), np.inf)
        rows: list[tuple[NDArray[np.int64], Floats, Floats]] = []
        for k in self._sizes:
            # Work without padding and base never falls with k: who may use a cheaper size needs no larger.
            floor = (cost.token + cost.merge * (k - 1)) * lengths + self._square * lengths.astype(np.float64) ** 2
            active = np.flatnonzero(floor < allowed)
            if not len(active):
                break
            solo = self._solo(lengths[active], k)
            work = np.where(np.isfinite(solo), self._work(lengths[active], k, threshold), np.inf)
            rows.append((active, work, solo))
            least[active] = np.minimum(least[active], work)
            allowed[active] = np.minimum(allowed[active], np.where(solo <= known, work, np.inf))
        # Most samples may use their cheapest size at once; only the others need another look for each T.
        waiting = np.flatnonzero(allowed > least)
        settled = float((least * self._counts)[allowed <= least].sum())
        if threshold is None:
            settled += ranks * cost.base
        place = np.full(len(lengths), -1)
        place[waiting] = np.arange(len(waiting))
        works = np.full((len(rows), len(waiting)), np.inf)
        solos = np.full((len(rows), len(waiting)), np.inf)
        for number, (active, work, solo) in enumerate(rows):
            held = place[active] >= 0
            works[number, place[active[held]]] = work[held]
            solos[number, place[active[held]]] = solo[held]

        def enough(limit: float) -> bool:
            work = np.where(solos <= limit, works, np.inf).min(axis=0) if len(waiting) else np.zeros(0)
            return settled + float((work * self._counts[waiting]).sum()) <= ranks * limit

        if enough(known):
            return known
        low, high = known, 2 * known
        while not enough(high):
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return low

    def least_time_of_floors(self, ranks: int, known: float) -> float:
        """The same of the host's floors alone: on k ranks as many microbatches as their tokens fill."""
        tokens = float((self._lengths * self._counts).sum())
        return max(known, min(self._cost.floor, self._cost.floor_shared) * math.ceil(tokens / self._capacity / ranks))
