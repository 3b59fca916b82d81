"""Where `laminar` puts samples whose group sizes are chosen: blocks of ranks that only ever split.

A *block* is an interval of ranks that all have the same load. A job always covers a whole block, so
its ranks arrive together; a block that is larger than a job needs is split, and the rest keeps its load.
Samples are placed from the largest size to the smallest. Single ranks come last: their microbatches are the
sand that levels what the larger groups left uneven.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import groupby
from typing import Literal

from dcpbench.dcp.costs import TILE, squares_of
from dcpbench.dcp.schedulers.laminar_sizes import Batch

REMEMBERED = 32
"""Microbatches of one rank that further samples of one rank may still join: those with most room."""

GROUPED = 60
"""Further steps of a sample on more than one rank."""
SCANNED = 10
"""Steps that rule `fit` spends on each block for each sample."""


def steps_of(samples: int, ranks: int) -> int:
    """What a pass counts against the search budget when all samples are for single ranks."""
    return 20 * ranks + 40 * samples


@dataclass(frozen=True)
class Rules:
    """How samples on more than one rank find their block, and whether shorter ones top up a job that closes."""

    fit: bool = False
    """Join an open job that stays below the target, else the fullest block that does; else the least loaded."""
    fill: Literal["all", "single", "none"] = "all"
    """Top up with samples of every smaller size, of those meant for single ranks only, or not at all."""


class OpenJob:
    """A job that is being filled."""

    __slots__ = ("first", "members", "room", "size", "squares", "tokens")

    def __init__(self, first: int, size: int, room: int) -> None:
        self.first = first
        self.size = size
        self.room = room
        self.tokens = 0
        self.squares = 0.0
        self.members: list[int] = []


class _Block:
    __slots__ = ("before", "first", "job", "load", "width")

    def __init__(self, first: int, width: int, load: float) -> None:
        self.first = first
        self.width = width
        self.load = load
        self.before = load
        """Load without the open job."""
        self.job: OpenJob | None = None


class Placement:
    """One pass over the batch. `jobs` in execution order and `loads` per rank, in seconds, are the result."""

    def __init__(self, batch: Batch, ranks: int, chosen: list[int], rules: Rules, target: float) -> None:
        self.jobs: list[OpenJob] = []
        self.loads = [0.0] * ranks
        grouped = chosen.index(1) if chosen[-1] == 1 else len(chosen)
        self.steps = steps_of(len(chosen), ranks) + GROUPED * grouped
        """Elementary steps spent: what the search budget counts."""
        self._batch = batch
        self._rules = rules
        self._target = target
        self._next = list(range(len(chosen) + 1))
        self._classes: list[tuple[int, int, int]] = []
        place = 0
        for size, run in groupby(chosen):
            end = place + sum(1 for _ in run)
            self._classes.append((size, place, end))
            place = end
        self._blocks = [_Block(0, ranks, 0.0)]
        self._place(ranks)

    @property
    def makespan(self) -> float:
        """When the last rank is done."""
        return max(self.loads)

    @property
    def rating(self) -> tuple[float, float]:
        """Less is better: the makespan, then the sum of squared loads."""
        return max(self.loads), sum(load * load for load in self.loads)

    def _place(self, ranks: int) -> None:
        node = self._batch.cost.node_size
        cut = ranks <= node
        for number, (size, begin, end) in enumerate(self._classes):
            self._close(number)
            if size <= node and not cut:
                self._cut_at_nodes(node)
                cut = True
            if size == 1:
                self._dissolve()
                self._single_ranks(begin, end)
                return
            if self._rules.fit:
                self._by_fit(number)
            else:
                self._by_load(number)
        self._close(len(self._classes))
        self._dissolve()

    def _free(self, place: int) -> int:
        """The first place at or after `place` that is not placed yet."""
        links = self._next
        while links[place] != place:
            links[place] = links[links[place]]
            place = links[place]
        return place

    def _add(self, job: OpenJob, place: int, tokens: int, squares: float) -> None:
        job.tokens += tokens
        job.squares += squares
        job.room -= tokens
        job.members.append(place)
        self._next[place] = place + 1

    def _time(self, job: OpenJob, tokens: int = 0, squares: float = 0.0) -> float:
        return self._batch.cost.time(job.size, job.tokens + tokens, job.squares + squares)

    def _join(self, block: _Block, place: int) -> bool:
        """Add the sample to the block's open job, or start one; False when an open job has no room."""
        batch, size = self._batch, block.width
        length = batch.lengths[place]
        tokens = batch.padding.pad(length, size)
        if block.job is None:
            block.job = OpenJob(block.first, size, size * batch.capacity)
            self.jobs.append(block.job)
        elif block.job.room < tokens:
            return False
        self._add(block.job, place, tokens, squares_of(length, size))
        block.load = block.before + self._time(block.job)
        return True

    def _finish(self, block: _Block, number: int) -> None:
        """FILL: top the open job up with samples of classes from `number` on, then close it."""
        if block.job is not None and self._rules.fill != "none":
            for size, begin, end in self._classes[number:]:
                if size == 1 or self._rules.fill == "all":
                    self._fill(block, block.job, size, begin, end)
        block.job = None
        block.before = block.load

    def _fill(self, block: _Block, job: OpenJob, own_size: int, begin: int, end: int) -> None:
        batch, size = self._batch, job.size
        unit = batch.padding.multiple(size)
        while job.room >= unit:
            place = self._free(max(begin, bisect_left(batch.negated, -(job.room // unit * unit), begin, end)))
            if place >= end:
                return
            length = batch.lengths[place]
            tokens, squares = batch.padding.pad(length, size), squares_of(length, size)
            load = block.before + self._time(job, tokens, squares)
            alone = own_size * (batch.solo(place, own_size) - batch.cost.base)
            saved = batch.cost.base * length / batch.capacity
            if load > self._target or size * (load - block.load) > alone + saved:
                return
            self._add(job, place, tokens, squares)
            block.load = load

    def _close(self, number: int) -> None:
        for block in self._blocks:
            self._finish(block, number)

    def _cut_at_nodes(self, node: int) -> None:
        pieces: list[_Block] = []
        for block in self._blocks:
            first, end = block.first, block.first + block.width
            while first < end:
                border = min(end, (first // node + 1) * node)
                pieces.append(_Block(first, border - first, block.load))
                first = border
        self._blocks = pieces

    def _split(self, block: _Block, size: int) -> _Block:
        rest = _Block(block.first + size, block.width - size, block.load)
        block.width = size
        self._blocks.append(rest)
        return rest

    def _by_load(self, number: int) -> None:
        """Each sample of the class to the least loaded block that is wide enough, first rank first among equals."""
        size, place, end = self._classes[number]
        heap = [(block.load, block.first, block) for block in self._blocks if block.width >= size]
        heapify(heap)
        while (place := self._free(place)) < end:
            _, _, block = heappop(heap)
            if block.width > size:
                rest = self._split(block, size)
                if rest.width >= size:
                    heappush(heap, (rest.load, rest.first, rest))
            if not self._join(block, place):
                self._finish(block, number + 1)
            heappush(heap, (block.load, block.first, block))

    def _by_fit(self, number: int) -> None:
        """Each sample of the class to the fullest block in which it still meets the target."""
        size, place, end = self._classes[number]
        batch = self._batch
        while (place := self._free(place)) < end:
            wide = [block for block in self._blocks if block.width >= size]
            self.steps += SCANNED * len(self._blocks)
            tokens, squares = batch.padding.pad(batch.lengths[place], size), squares_of(batch.lengths[place], size)
            solo = batch.solo(place, size)
            best: tuple[bool, float, int] | None = None
            chosen = None
            for block in wide:
                merges = block.job is not None and block.job.room >= tokens
                if merges and block.job is not None:
                    load = block.before + self._time(block.job, tokens, squares)
                else:
                    load = block.load + solo
                if load <= self._target and (best is None or (merges, load, -block.first) > best):
                    best, chosen = (merges, load, -block.first), block
            if chosen is None:
                chosen = min(wide, key=lambda block: (block.load, block.first))
            if chosen.width > size:
                self._split(chosen, size)
            if not self._join(chosen, place):
                self._finish(chosen, number + 1)
                if (place := self._free(place)) < end:
                    self._join(chosen, place)

    def _dissolve(self) -> None:
        for block in self._blocks:
            self.loads[block.first : block.first + block.width] = [block.load] * block.width

    def _single_ranks(self, begin: int, end: int) -> None:
        """Samples for one rank each: least loaded rank, its microbatch with the least room that suffices."""
        batch, jobs, links = self._batch, self.jobs, self._next
        cost, capacity, lengths, padding = batch.cost, batch.capacity, batch.lengths, batch.padding
        unit = padding.multiple(1)
        heap = [(load, rank) for rank, load in enumerate(self.loads)]
        heapify(heap)
        rooms: list[list[tuple[int, int]]] = [[] for _ in heap]
        base, token, half = cost.base, cost.token, cost.square / 2
        for place in range(begin, end):
            if links[place] != place:
                continue
            length = lengths[place]
            tokens = length if unit == 1 else -(-length // unit) * unit
            rounded = -(-length // TILE) * TILE
            load, rank = heap[0]
            load += token * tokens + half * (length * length + rounded * rounded)
            own = rooms[rank]
            at = bisect_left(own, (tokens, -1))
            if at < len(own):
                room, number = own.pop(at)
                jobs[number].members.append(place)
            else:
                load += base
                room, number = capacity, len(jobs)
                job = OpenJob(rank, 1, 0)
                job.members.append(place)
                jobs.append(job)
            if room > tokens:
                insort(own, (room - tokens, number))
                if len(own) > REMEMBERED:
                    del own[0]
            heapreplace(heap, (load, rank))
        for load, rank in heap:
            self.loads[rank] = load
