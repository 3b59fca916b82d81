"""How short any plan of a batch could be under the cost model: what predicted times are compared with.

Everything here holds for any groups of the given sizes, any order and packing. A job of k ranks takes k t rank-seconds,
of which each sample answers for a part that only depends on k:

    w(k) = (token + (k - 1) (merge + layers c)) n + square (1 - overlap s (k - 1) / k) q + k base' f(n / (k capacity))
    base' = base + (k - 1) layers latency e

with n its padded tokens and q its squares. For each size the ring hops of either direction count or are left out: c
is the sum of hop bytes / bandwidth, s of the shares of attention that hide them, and e the number, of the directions
that count. A job's hop, max(0, x), is at least x and at least 0, and x is linear in n and q: so either is right for all
jobs of a size, and which is better does not matter to the proof. f is a *dual feasible* function: over samples that
fit one microbatch together its values add up to at most 1, so what a microbatch costs at any rate covers its samples'
shares. f is the identity, or for a threshold e up to 1/2: 1 above 1 - e, 0 below e, the identity between (the bound L2
of bin packing by Martello and Toth: two samples of more than half a microbatch never share one); or 1 for a longest
sample and 0 for all others, which is best where one sample takes most of an iteration.

The w of a job's samples therefore add up to at most k t, and those of a plan to at most its length T times the ranks.
As t never falls when a sample is added, a plan of length T has each sample on a size on which it alone takes at most T.
So no plan is shorter than the least T for which the samples' least w, over such sizes, add up to N T. With f = 0, N
base is added instead: a rank without microbatches is idle for T, no less than the base.
Nor is T below the host's floor for as many microbatches as the tokens fill on the fullest rank. Of two attention
kernels the quicker is assumed for every sample that any job could take to it: w and t do not fall with `square`.

The fewer sizes are given the greater is the least T: the bound of a menu says what plans of that menu can reach. What
holds for more sizes holds for it too, and may be a trifle greater as the directions of hops are chosen for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dcpbench.dcp.costs import CostModel, squares_of_all
from dcpbench.dcp.workload import MINIMAL, PaddingRule

LONGEST = 1.0
"""In place of a threshold: f is 1 for a longest sample only."""
THRESHOLDS = (None, 0.0, LONGEST, 0.2, 0.25, 1 / 3, 0.5)
"""Of f; None for f = 0."""

MANY = 5_000_000
"""Samples x sizes above which, without a cost that grows with the size, the thresholds above 0 are left out."""

ROUNDS = 3
"""Times at most that the directions of hops that count are chosen anew."""

Floats = NDArray[np.float64]
Hops = Mapping[int, tuple[bool, bool]]
"""For group sizes, whether hops forward and backward count; they do not for sizes left out."""


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
    thresholds = THRESHOLDS if exact else THRESHOLDS[:3]
    for threshold in thresholds:
        best = batch.least_time(threshold, ranks, best, {})
    for _ in range(ROUNDS):  # which hops are exposed depends on the sizes, and these on the time
        before, hops = best, batch.exposed_hops(best)
        for threshold in thresholds:
            best = batch.least_time(threshold, ranks, best, hops)
        if best == before:
            break
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

    def _directions(self, k: int) -> tuple[tuple[float, float, float], ...]:
        """Of a hop forward and backward on k ranks: latency, seconds a token of the group, seconds hidden a square.

        The last is for a `square` of 1.
        """
        cost = self._cost
        link = cost.within if k <= cost.node_size else cost.between
        shares = (cost.forward_share, 1 - cost.forward_share)
        return tuple(
            (link.latency, sent / k / link.bandwidth, cost.overlap * share / cost.layers / (k * k))
            for sent, share in zip(cost.hop_bytes, shares, strict=True)
        )

    def _rates(self, k: int, hops: Hops) -> tuple[float, float, float]:
        """Of w on k ranks: seconds a token; the factor of the squares; base'."""
        cost = self._cost
        token, square, fixed = cost.token + cost.merge * (k - 1), 1.0, cost.base
        for counts, (latency, sent, hidden) in zip(hops.get(k, (False, False)), self._directions(k), strict=True):
            if counts:
                token += k * (k - 1) * cost.layers * sent
                square -= k * (k - 1) * cost.layers * hidden
                fixed += (k - 1) * cost.layers * latency
        return token, square, fixed

    def _work(self, lengths: NDArray[np.int64], k: int, threshold: float | None, hops: Hops) -> Floats:
        """w on k ranks."""
        tokens, (rate, factor, fixed) = self._padding.pad_all(lengths, k), self._rates(k, hops)
        square: float | Floats = self._cost.square
        if self._quick is not None:
            square = np.where(self._may_be_quick(lengths, k), self._square, square)
        work: Floats = rate * tokens + factor * square * squares_of_all(lengths, k)
        if threshold is not None:
            part = tokens / (k * self._capacity)
            if threshold == LONGEST:  # of several equally long ones each gets its part
                part = np.where(lengths == self._lengths[-1], 1 / self._counts[-1], 0.0)
            elif threshold > 0:
                part = np.where(part > 1 - threshold, 1.0, np.where(part >= threshold, part, 0.0))
            work += k * fixed * part
        return work

    def exposed_hops(self, limit: float) -> Hops:
        """The directions of hops that take time for the samples which need a size to stay within `limit`.

        Of a size that none needs, those of the longest sample that it would serve.
        """
        hops: dict[int, tuple[bool, bool]] = {}
        served = 0  # of the lengths, ascending; a size that serves one serves all shorter ones
        for k in self._sizes:
            fits = self._solo(self._lengths[served:], k) <= limit
            more = int(fits.sum())
            first = served if more else max(0, served - 1)
            served += more
            if k == 1 or served == 0:
                continue
            own, count = self._lengths[first:served], self._counts[first:served]
            tokens = float((count * self._padding.pad_all(own, k)).sum())
            squares = self._square * float((count * squares_of_all(own, k)).sum())
            part = tokens / (k * self._capacity)
            forward, backward = (
                latency * part + sent * tokens - hidden * squares > 0 for latency, sent, hidden in self._directions(k)
            )
            hops[k] = forward, backward
        return hops

    def least_time(self, threshold: float | None, ranks: int, known: float, hops: Hops) -> float:
        """The least T, from `known` on, that leaves the ranks enough time for all samples' work."""
        cost, lengths = self._cost, self._lengths
        least, allowed = np.full(len(lengths), np.inf), np.full(len(lengths), np.inf)
        rows: list[tuple[NDArray[np.int64], Floats, Floats]] = []
        # Least rates of a size and all larger ones: who may use a cheaper size already needs no larger.
        rates = np.array([self._rates(k, hops)[:2] for k in self._sizes])
        rates = np.minimum.accumulate(rates[::-1], axis=0)[::-1]
        for k, (rate, factor) in zip(self._sizes, rates.tolist(), strict=True):
            floor = rate * lengths + factor * self._square * lengths.astype(np.float64) ** 2
            active = np.flatnonzero(floor < allowed)
            if not len(active):
                break
            solo = self._solo(lengths[active], k)
            work = np.where(np.isfinite(solo), self._work(lengths[active], k, threshold, hops), np.inf)
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
