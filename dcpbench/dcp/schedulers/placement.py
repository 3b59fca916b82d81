"""Where the dynamic-CP rule puts each sample of one microbatch, in logarithmic time per sample.

The rule itself is stated in `default_dynamic_cp.py`. Followed literally it tries every group of every size
for every sample that is left, in every round. Here each group waits in a heap for the moment it becomes
the rule's choice, and samples that fit nowhere are skipped by binary search; the result is the same.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from dataclasses import dataclass
from heapq import heappop, heappush

from dcpbench.dcp.workload import PaddingRule, usable_length

Block = tuple[int, list[int]]
"""A group before it has ranks: its size and its samples, as places in the order of a `Batch`."""


class Batch:
    """The samples of a global batch longest first, and which of them are not yet in a finished microbatch.

    "Longest" is measured in padded tokens, as Megatron-LM does, for the smallest group that holds the sample
    and then for the largest group; samples equal in both keep their order. So the padded tokens of every
    size never increase along the order, which is what binary search and the queues below rest on.
    """

    def __init__(self, lengths: list[int], sizes: tuple[int, ...], capacity: int, padding: PaddingRule) -> None:
        usable = [usable_length(k * capacity, k, padding) for k in sizes]
        needs = [bisect_left(usable, length) for length in lengths]
        largest = sizes[-1]
        keys = [
            (-padding.pad(length, sizes[need]), -padding.pad(length, largest))
            for length, need in zip(lengths, needs, strict=True)
        ]
        self.sizes = sizes
        self.samples = sorted(range(len(lengths)), key=keys.__getitem__)
        """Positions in the global batch, in planning order."""
        self.needs = [needs[sample] for sample in self.samples]
        """For each place in that order, the index in `sizes` of the smallest size that holds the sample."""
        by_unit: dict[int, list[int]] = {}
        for unit in map(padding.multiple, sizes):
            if unit not in by_unit:
                by_unit[unit] = [-(-lengths[sample] // unit) * unit for sample in self.samples]
        self.tokens = {k: by_unit[padding.multiple(k)] for k in sizes}
        """For each size, the padded length at each place."""
        self.units = {k: math.lcm(*sizes) // k for k in sizes}
        """1 / k in units that make all work a whole number, so that every comparison is exact."""
        self._next = list(range(len(lengths) + 1))

    def next(self, place: int) -> int:
        """The first place at or after `place` that is left; the number of samples if there is none."""
        links = self._next
        while links[place] != place:
            links[place] = links[links[place]]
            place = links[place]
        return place

    def remove(self, blocks: list[Block]) -> None:
        """Take the samples of a finished microbatch out."""
        for _, members in blocks:
            for place in members:
                self._next[place] = place + 1


@dataclass(slots=True)
class _Group:
    number: int
    members: list[int]
    room: int
    """Tokens of the whole group that are still free."""
    work: int
    """Sum of s^2 / k over the samples, in the units of the batch."""


class _Queue:
    """The groups of one size, arranged so that the rule's choice among them is always at the top of a heap.

    Samples come longest first and the maximum never falls. So for a group that nothing is added to, a
    sample that had room, or did not raise the maximum, is followed only by samples of which the same is
    true: each group moves from `full` to `raising` to `free`, in that direction only, until it is used.
    """

    def __init__(self) -> None:
        self.full: list[tuple[int, int, _Group]] = []
        """Without room for the sample; most room first."""
        self.raising: list[tuple[int, int, _Group]] = []
        """With room, but the sample would raise the maximum; least work first, then creation order."""
        self.free: list[tuple[int, _Group]] = []
        """With room and below the maximum; in creation order."""

    def put(self, group: _Group) -> None:
        heappush(self.full, (-group.room, group.number, group))

    def look(self, tokens: int, slack: int) -> _Group | None:
        """The first group that takes `tokens` with at most `slack` work before, else the one with least work."""
        full, raising, free = self.full, self.raising, self.free
        while full and -full[0][0] >= tokens:
            group = heappop(full)[2]
            heappush(raising, (group.work, group.number, group))
        while raising and raising[0][0] <= slack:
            _, number, group = heappop(raising)
            heappush(free, (number, group))
        return free[0][1] if free else raising[0][2] if raising else None

    def most_room(self) -> int:
        """The most room in any group, when all are full."""
        return -self.full[0][0]

    def take(self) -> _Group:
        """Remove the group that `look` has just returned."""
        return heappop(self.free)[1] if self.free else heappop(self.raising)[2]


class Microbatch:
    """One pass of the rule over the samples that are left: where each goes, before idle ranks are filled.

    Two parts of Megatron-LM's rule need no code. It also tries sizes above the first group's, but never
    chooses one: wherever it fits, a new group of the first group's size fits too, and does not raise the
    maximum, as the first sample is the longest. Hence no sample is padded beyond the first one's padded length T, no
    rank gets more work than T x capacity, and the rule's limit of 1.05 x T x capacity never refuses anything.
    """

    def __init__(self, batch: Batch, ranks: int, capacity: int) -> None:
        self.blocks: list[Block] = []
        """The groups in creation order, which is from rank 0 upward."""
        self._batch = batch
        self._capacity = capacity
        self._idle = ranks
        self._maximum = 0
        self._queues: dict[int, _Queue] = {}

        place = batch.next(0)
        self._largest = batch.needs[place]
        self._add(place, batch.sizes[self._largest], new=True)
        while (place := batch.next(place + 1)) < len(batch.samples):
            choice = self._choose(place)
            if choice is not None:
                self._add(place, *choice)
            else:
                place = self._next_with_room(place + 1) - 1

    def _choose(self, place: int) -> tuple[int, bool] | None:
        """(size, whether in a new group) with the least maximum, the first one among equals."""
        batch, maximum = self._batch, self._maximum
        least, choice = None, None
        for size in batch.sizes[batch.needs[place] : self._largest + 1]:
            tokens = batch.tokens[size][place]
            work = tokens * tokens * batch.units[size]
            queue = self._queues.get(size)
            group = queue.look(tokens, maximum - work) if queue else None
            if group is not None and (least is None or max(maximum, group.work + work) < least):
                least, choice = max(maximum, group.work + work), (size, False)
            if size <= self._idle and (least is None or max(maximum, work) < least):
                least, choice = max(maximum, work), (size, True)
            if least == maximum:
                break  # no choice can be lower
        return choice

    def _add(self, place: int, size: int, new: bool) -> None:
        queue = self._queues.setdefault(size, _Queue())
        if new:
            group = _Group(len(self.blocks), [], size * self._capacity, 0)
            self.blocks.append((size, group.members))
            self._idle -= size
        else:
            group = queue.take()
        tokens = self._batch.tokens[size][place]
        group.members.append(place)
        group.room -= tokens
        group.work += tokens * tokens * self._batch.units[size]
        self._maximum = max(self._maximum, group.work)
        queue.put(group)

    def _next_with_room(self, place: int) -> int:
        """The first place from `place` on that has room somewhere, when every group is full for the one before."""
        batch = self._batch
        rooms = [(size, queue.most_room()) for size, queue in self._queues.items()]
        rooms.extend((size, size * self._capacity) for size in batch.sizes if size <= self._idle)
        found = len(batch.samples)
        for size, room in rooms:
            found = bisect_left(batch.tokens[size], -room, place, found, key=operator.neg)
        return found
