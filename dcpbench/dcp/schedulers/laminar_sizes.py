"""Which group sizes `laminar` may use, and which of them each sample gets before it is placed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

from dcpbench.dcp.costs import CostModel, squares_of
from dcpbench.dcp.workload import PaddingRule, usable_length

Menu = Literal["any", "pow2", "even"]


def menu_sizes(menu: Menu, ranks: int, node_size: int) -> tuple[int, ...]:
    """Group sizes, ascending. Above a node only whole nodes; the whole domain always.

    `any`: every size within a node. `pow2`: powers of two. `even`: one rank and even sizes within a node.
    """
    within = range(1, min(ranks, node_size) + 1)
    if menu == "pow2":
        found = {1 << n for n in range(ranks.bit_length())}
        found = {k for k in found if k <= node_size or k % node_size == 0}
    else:
        found = {k for k in within if menu == "any" or k == 1 or k % 2 == 0}
        found.update(range(2 * node_size, ranks + 1, node_size))
        if ranks >= node_size:
            found.add(node_size)
    return tuple(sorted(found | {ranks}))


class Batch:
    """The samples of one global batch, longest first, and what each needs on each group size.

    A *place* is a position in that order. `known` remembers solo times, which many candidates ask for.
    """

    def __init__(
        self, lengths: list[int], sizes: Sequence[int], capacity: int, padding: PaddingRule, cost: CostModel
    ) -> None:
        self.samples = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
        """Positions in the global batch, in planning order; equal lengths keep their order."""
        self.lengths = [lengths[sample] for sample in self.samples]
        self.negated = [-length for length in self.lengths]
        """Ascending, for binary search."""
        self.sizes = tuple(sizes)
        self.capacity = capacity
        self.padding = padding
        self.cost = cost
        self.first_usable = {k: bisect_left(self.negated, -usable_length(k * capacity, k, padding)) for k in self.sizes}
        """For each size, the first place whose sample fits memory on it."""
        self.known: dict[tuple[int, int], float] = {}

    def solo(self, place: int, size: int) -> float:
        """Seconds of a job that holds this sample only."""
        length = self.lengths[place]
        time = self.known.get((length, size))
        if time is None:
            time = self.cost.time(size, self.padding.pad(length, size), squares_of(length, size))
            self.known[length, size] = time
        return time

    def least_fitting(self, place: int) -> list[int]:
        """The sizes that hold the sample in memory, ascending."""
        return [k for k in self.sizes if self.first_usable[k] <= place]

    def first_within(self, size: int, limit: float) -> int:
        """The first place that fits memory on `size` ranks and alone takes at most `limit` seconds.

        Solo times never rise along the places, hence binary search.
        """
        low, high = self.first_usable[size], len(self.lengths)
        while low < high:
            middle = (low + high) // 2
            if self.solo(middle, size) <= limit:
                high = middle
            else:
                low = middle + 1
        return low

    def choose(self, sizes: Sequence[int], fraction: float, floor: int, target: float) -> list[int]:
        """The size of every place, never increasing along the places; rank work is least at the smallest size.

        The smallest of `sizes` from `floor` up that fits memory and alone takes at most `fraction` x
        `target` seconds; if there is none, the smallest within `target`; else the fastest.
        `sizes` must contain the largest size of the batch.
        """
        usable = [k for k in sizes if k >= floor]
        chosen = [0] * len(self.lengths)
        open_until = len(chosen)
        for limit in dict.fromkeys((fraction * target, target)):
            for k in usable:
                if open_until == 0:
                    break
                if open_until < len(chosen) and k < chosen[open_until]:
                    continue
                first = self.first_within(k, limit)
                if first < open_until:
                    chosen[first:open_until] = [k] * (open_until - first)
                    open_until = first
        smallest = chosen[open_until] if open_until < len(chosen) else 0
        for place in reversed(range(open_until)):
            fitting = [k for k in usable if k >= smallest and self.first_usable[k] <= place]
            smallest = min((self.solo(place, k), k) for k in fitting)[1]
            chosen[place] = smallest
        return chosen
