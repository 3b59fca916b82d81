"""Samples of one size packed into few microbatches before these are placed: best where a microbatch is dear."""

from __future__ import annotations

from dcpbench.dcp.compilation import Vector, compiled
from dcpbench.dcp.schedulers.laminar_blocks import finish, new_block, sift_down, sift_up
from dcpbench.dcp.schedulers.laminar_instance import BLOCKS, JOBS, Instance, Workspace, job_time, pad, squares

PACK_NONE, PACK_SINGLE, PACK_ALL = 0, 1, 2
"""Pack no samples, those of single ranks, or those of every size."""


@compiled
def first_fit(instance: Instance, space: Workspace, j: int) -> int:
    """Put the samples of a class that are left into new jobs by first fit, longest first; returns the jobs' number.

    A tree over jobs, of which each node has the most room below it, finds the first one with enough.
    """
    tree, links, lengths = space.tree, space.links, instance.lengths
    begin, end, old = space.ends[j + 1], space.ends[j], space.counts[JOBS]
    size, unit = instance.sizes[j], instance.units[j]
    leaves = 1
    while leaves < end - begin:
        leaves *= 2
    for node in range(1, 2 * leaves):
        tree[node] = size * instance.capacity
    count = 0
    for place in range(begin, end):
        if links[place] != place:
            continue
        links[place] = place + 1
        tokens = pad(lengths[place], unit)
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < tokens:
                node += 1
        job = old + node - leaves
        if job == old + count:
            count += 1
            space.job_class[job], space.job_tokens[job], space.job_squares[job] = j, 0, 0.0
        space.job_of[place] = job
        space.job_tokens[job] += tokens
        space.job_squares[job] += squares(lengths[place], size)
        tree[node] -= tokens
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
    space.counts[JOBS] = old + count
    return count


@compiled
def sort_down(order: Vector, count: int, values: Vector) -> None:
    """The first `count` of `order` by their values, descending: Shell's sort. Equal ones get some fixed order."""
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for at in range(gap, count):
            item, to = order[at], at
            while to >= gap and values[order[to - gap]] < values[item]:
                order[to] = order[to - gap]
                to -= gap
            order[to] = item
        gap //= 3


@compiled
def place_packed(instance: Instance, space: Workspace, j: int, fill: int, target: float) -> None:
    """Pack the samples of the class and place the microbatches."""
    old = space.counts[JOBS]
    count = first_fit(instance, space, j)
    for job in range(old, old + count):
        space.job_times[job] = job_time(instance.rates, j, space.job_tokens[job], space.job_squares[job])
    place_jobs(instance, space, j, old, count, fill, target)


@compiled
def place_jobs(instance: Instance, space: Workspace, j: int, old: int, count: int, fill: int, target: float) -> None:
    """Each of `count` jobs from `old` on, longest time first, to the least loaded block that is wide enough."""
    order, times, size = space.tree, space.job_times, instance.sizes[j]
    for own in range(count):
        order[own] = old + own
    sort_down(order, count, times)
    heap, keys, load, first, width = space.heap, space.keys, space.load, space.first, space.width
    among = 0
    for block in range(space.counts[BLOCKS]):
        if width[block] >= size:
            heap[among], keys[among] = block, load[block]
            among += 1
    for at in range(among // 2 - 1, -1, -1):
        sift_down(heap, keys, first, among, at, keys[at])
    for own in range(count):
        job, block = order[own], heap[0]
        if width[block] > size:
            rest = new_block(space, first[block] + size, width[block] - size, load[block])
            width[block] = size
            if width[rest] >= size:
                sift_up(heap, keys, first, among, rest, load[rest])
                among += 1
        space.job_first[job], space.open[block] = first[block], job
        load[block] += times[job]
        finish(instance, space, block, j, fill, target)
        sift_down(heap, keys, first, among, 0, load[block])
