"""Blocks of ranks that only ever split, the heap of them, and their open jobs.

A *block* is an interval of ranks that all have the same load. A job always covers a whole block, so its ranks arrive
together; a block that is larger than a job needs is split, and the rest keeps its load.
"""

from __future__ import annotations

from dcpbench.dcp.compilation import Vector, compiled
from dcpbench.dcp.schedulers.laminar_instance import (
    BLOCKS,
    JOBS,
    RATES,
    RESERVED,
    STEPS,
    STEPS_TIME,
    Instance,
    Workspace,
    device_time,
    job_time,
    pad,
    squares,
)

FILL_NONE, FILL_SINGLE, FILL_ALL, FILL_EVERY = 0, 1, 2, 3
"""Top a closing job up not at all, with samples meant for single ranks, with those of every smaller size, or with those
that are otherwise kept to the end (see RESERVE) too."""


@compiled
def sift_down(heap: Vector, keys: Vector, first: Vector, count: int, at: int, key: float) -> None:
    """Give the block at `at` a key that is not less, and restore the heap of `count` blocks.

    Blocks go by key, then by first rank. `keys` are in the order of `heap`.
    """
    block = heap[at]
    rank = first[block]
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        least = keys[child]
        if child + 1 < count:
            other = keys[child + 1]
            if other < least or (other == least and first[heap[child + 1]] < first[heap[child]]):
                child += 1
                least = other
        if key < least or (key == least and rank < first[heap[child]]):
            break
        heap[at], keys[at] = heap[child], least
        at = child
    heap[at], keys[at] = block, key


@compiled
def sift_up(heap: Vector, keys: Vector, first: Vector, at: int, block: int, key: float) -> None:
    """Add a block to a heap of `at` blocks."""
    while at > 0:
        parent = (at - 1) // 2
        if keys[parent] < key or (keys[parent] == key and first[heap[parent]] < first[block]):
            break
        heap[at], keys[at] = heap[parent], keys[parent]
        at = parent
    heap[at], keys[at] = block, key


@compiled
def free(links: Vector, place: int) -> int:
    """The first place at or after `place` that is not placed yet."""
    while links[place] != place:
        links[place] = links[links[place]]
        place = links[place]
    return place


@compiled
def join(instance: Instance, space: Workspace, block: int, place: int, j: int) -> bool:
    """Add the sample to the block's open job, or start one; False when an open job has no room."""
    length, job = instance.lengths[place], space.open[block]
    tokens = pad(length, instance.units[j])
    if job < 0:
        job = space.counts[JOBS]
        space.counts[JOBS] = job + 1
        space.job_first[job], space.job_class[job] = space.first[block], j
        space.job_tokens[job], space.job_squares[job] = 0, 0.0
        space.open[block] = job
    elif space.job_tokens[job] + tokens > instance.sizes[j] * instance.capacity:
        return False
    tokens += space.job_tokens[job]
    total = space.job_squares[job] + squares(length, instance.sizes[j])
    space.job_tokens[job], space.job_squares[job] = tokens, total
    space.job_of[place] = job
    space.links[place] = place + 1
    space.load[block] = space.before[block] + job_time(instance.rates, j, tokens, total)
    return True


@compiled
def finish(instance: Instance, space: Workspace, block: int, below: int, fill: int, target: float) -> None:
    """FILL: top the block's open job up with samples of classes below `below`, largest first, then close it.

    A sample joins if the load stays within the target, and if the job's additional rank-time is at most what the
    sample costs on its own group without the base, plus its share of a microbatch saved.
    """
    job = space.open[block]
    if job >= 0 and fill != FILL_NONE:
        lengths, sizes, units, rates = instance.lengths, instance.sizes, instance.units, instance.rates
        ends, links, job_of = space.ends, space.links, space.job_of
        j = space.job_class[job]
        size, unit, base, limit = sizes[j], units[j], rates[0], sizes[j] * instance.capacity
        tokens, total, load, before = (
            space.job_tokens[job],
            space.job_squares[job],
            space.load[block],
            space.before[block],
        )
        steps = 0
        for own in range(below - 1, -1, -1):
            begin, end = ends[own + 1], min(ends[own], space.counts[RESERVED])
            if begin >= end or (fill == FILL_SINGLE and sizes[own] > 1):
                continue
            while True:
                room = (limit - tokens) // unit * unit
                if room < unit:
                    break
                low, high = begin, end
                while low < high:
                    middle = (low + high) // 2
                    if lengths[middle] <= room:
                        high = middle
                    else:
                        low = middle + 1
                place = free(links, low)
                if place >= end:
                    break
                steps += 2 * STEPS_TIME
                length = lengths[place]
                more_tokens, more_squares = tokens + pad(length, unit), total + squares(length, size)
                more_load = before + job_time(rates, j, more_tokens, more_squares)
                alone = device_time(rates, own, pad(length, units[own]), squares(length, sizes[own])) - base
                saved = max(base, rates[own * RATES + 9]) * length / instance.capacity
                if more_load > target or size * (more_load - load) > sizes[own] * alone + saved:
                    break
                tokens, total, load = more_tokens, more_squares, more_load
                job_of[place] = job
                links[place] = place + 1
        space.job_tokens[job], space.job_squares[job], space.load[block] = tokens, total, load
        space.counts[STEPS] += steps
    space.open[block] = -1
    space.before[block] = space.load[block]


@compiled
def new_block(space: Workspace, first: int, width: int, load: float) -> int:
    """A block without an open job."""
    block: int = space.counts[BLOCKS]
    space.counts[BLOCKS] = block + 1
    space.first[block], space.width[block], space.open[block] = first, width, -1
    space.load[block] = space.before[block] = load
    return block


@compiled
def cut(space: Workspace, piece: int) -> None:
    """Cut all blocks at multiples of `piece` ranks."""
    for block in range(space.counts[BLOCKS]):
        end = space.first[block] + space.width[block]
        border = (space.first[block] // piece + 1) * piece
        if border < end:
            space.width[block] = border - space.first[block]
            while border < end:
                new_block(space, border, min(piece, end - border), space.load[block])
                border += piece
