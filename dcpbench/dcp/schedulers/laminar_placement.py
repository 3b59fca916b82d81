"""Where `laminar` puts samples whose group sizes are chosen: blocks of ranks that only ever split.

A *block* is an interval of ranks that all have the same load. A job always covers a whole block, so its ranks arrive
together; a block that is larger than a job needs is split, and the rest keeps its load. Classes are placed from the
largest size to the smallest. Single ranks come last: their microbatches level what larger groups left uneven.
"""

from __future__ import annotations

from dcpbench.dcp.compilation import Vector, compiled
from dcpbench.dcp.schedulers.laminar_instance import (
    BLOCKS,
    JOBS,
    RATES,
    REMEMBERED,
    RESERVE,
    RESERVED,
    STEPS,
    STEPS_RANK,
    STEPS_SAMPLE,
    STEPS_SCAN,
    STEPS_SHARED,
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


@compiled
def place_by_load(instance: Instance, space: Workspace, j: int, fill: int, target: float) -> None:
    """Each sample of the class to the least loaded block that is wide enough, first rank first among equals."""
    heap, keys, links = space.heap, space.keys, space.links
    load, first, width = space.load, space.first, space.width
    size, end, count = instance.sizes[j], space.ends[j], 0
    for block in range(space.counts[BLOCKS]):
        if width[block] >= size:
            heap[count], keys[count] = block, load[block]
            count += 1
    for at in range(count // 2 - 1, -1, -1):
        sift_down(heap, keys, first, count, at, keys[at])
    place = free(links, space.ends[j + 1])
    while place < end:
        block = heap[0]
        if width[block] > size:
            rest = new_block(space, first[block] + size, width[block] - size, load[block])
            width[block] = size
            if width[rest] >= size:
                sift_up(heap, keys, first, count, rest, load[rest])
                count += 1
        if not join(instance, space, block, place, j):
            finish(instance, space, block, j, fill, target)
        sift_down(heap, keys, first, count, 0, load[block])
        place = free(links, place)


@compiled
def place_by_fit(instance: Instance, space: Workspace, j: int, fill: int, target: float) -> None:
    """Each sample of the class to a block that stays within the target, else to the least loaded.

    Among those that do: one whose open job takes the sample, then the fullest, then the first.
    """
    size, end, rates = instance.sizes[j], space.ends[j], instance.rates
    limit, unit = size * instance.capacity, instance.units[j]
    load, first, width, opened, before = space.load, space.first, space.width, space.open, space.before
    job_tokens, job_squares = space.job_tokens, space.job_squares
    place = free(space.links, space.ends[j + 1])
    while place < end:
        length = instance.lengths[place]
        tokens, more = pad(length, unit), squares(length, size)
        alone = job_time(rates, j, tokens, more)
        chosen, merged, fullest = -1, False, 0.0
        least = -1
        space.counts[STEPS] += STEPS_SCAN * space.counts[BLOCKS]
        for block in range(space.counts[BLOCKS]):
            if width[block] < size:
                continue
            if least < 0 or load[block] < load[least] or (load[block] == load[least] and first[block] < first[least]):
                least = block
            job = opened[block]
            merges = job >= 0 and job_tokens[job] + tokens <= limit
            if merges:
                full = before[block] + job_time(rates, j, job_tokens[job] + tokens, job_squares[job] + more)
            else:
                full = load[block] + alone
            if full <= target and merges >= merged:
                if chosen < 0 or merges > merged or full > fullest:
                    chosen, merged, fullest = block, merges, full
                elif full == fullest and first[block] < first[chosen]:
                    chosen = block
        if chosen < 0:
            chosen = least
        if width[chosen] > size:
            new_block(space, first[chosen] + size, width[chosen] - size, load[chosen])
            width[chosen] = size
        if not join(instance, space, chosen, place, j):
            finish(instance, space, chosen, j, fill, target)
            place = free(space.links, place)
            if place < end:
                join(instance, space, chosen, place, j)
        place = free(space.links, place)


@compiled
def place_singles(instance: Instance, space: Workspace) -> None:
    """Samples of one rank, longest first: least loaded rank, its microbatch with the least room that suffices."""
    load, room, number, links, remembered = space.load, space.room, space.number, space.links, space.remembered
    heap, keys, first, job_of = space.heap, space.keys, space.first, space.job_of
    job_first, job_class = space.job_first, space.job_class
    single_tokens, single_times, times = instance.single_tokens, instance.single_times, space.job_squares
    base, floor, capacity = instance.rates[0], instance.rates[9], instance.capacity
    ranks, jobs = instance.ranks, space.counts[JOBS]
    for rank in range(ranks):
        heap[rank], keys[rank] = rank, load[rank]
        remembered[rank] = 0
    for at in range(ranks // 2 - 1, -1, -1):
        sift_down(heap, keys, first, ranks, at, keys[at])
    for place in range(space.ends[1], space.ends[0]):
        if links[place] != place:
            continue
        tokens = single_tokens[place]
        rank = heap[0]
        begin = rank * REMEMBERED
        end = begin + remembered[rank]
        low, high = begin, end
        while low < high:
            middle = (low + high) // 2
            if room[middle] < tokens:
                low = middle + 1
            else:
                high = middle
        if low < end:
            left, job = room[low] - tokens, number[low]
            time = times[job] + single_times[place]
            load[rank] += max(floor, base + time) - max(floor, base + times[job])
            times[job] = time
            if left > 0:
                while low > begin and room[low - 1] >= left:
                    room[low], number[low] = room[low - 1], number[low - 1]
                    low -= 1
                room[low], number[low] = left, job
            else:
                for at in range(low, end - 1):
                    room[at], number[at] = room[at + 1], number[at + 1]
                remembered[rank] -= 1
        else:
            left, job = capacity - tokens, jobs
            jobs += 1
            job_first[job], job_class[job] = rank, 0
            times[job] = single_times[place]
            load[rank] += max(floor, base + times[job])
            if left > 0:
                low = begin  # of the microbatches with equal room, the newest comes first
                while low < end and room[low] < left:
                    low += 1
                if end - begin < REMEMBERED:
                    for at in range(end, low, -1):
                        room[at], number[at] = room[at - 1], number[at - 1]
                    room[low], number[low] = left, job
                    remembered[rank] += 1
                elif low > begin:  # the one with least room is forgotten
                    for at in range(begin, low - 1):
                        room[at], number[at] = room[at + 1], number[at + 1]
                    room[low - 1], number[low - 1] = left, job
        job_of[place] = job
        sift_down(heap, keys, first, ranks, 0, load[rank])
    space.counts[JOBS] = jobs


@compiled
def pack_singles(instance: Instance, space: Workspace) -> None:
    """Samples of one rank in few microbatches: packed by first fit, longest first, which are then levelled.

    A tree over microbatches, of which each node has the most room below it, finds the first one with enough.
    """
    tree, times, links = space.tree, space.job_squares, space.links
    begin, end, ranks, old = space.ends[1], space.ends[0], instance.ranks, space.counts[JOBS]
    leaves = 1
    while leaves < end - begin:
        leaves *= 2
    for node in range(1, 2 * leaves):
        tree[node] = instance.capacity
    count = 0
    for place in range(begin, end):
        if links[place] != place:
            continue
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < instance.single_tokens[place]:
                node += 1
        own = node - leaves
        if own == count:
            count += 1
            times[old + own] = 0.0
        times[old + own] += instance.single_times[place]
        space.job_of[place] = old + own
        tree[node] -= instance.single_tokens[place]
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
    order = tree  # microbatches by time, descending: Shell's sort; equal ones keep no order but a fixed one
    for own in range(count):
        order[own] = old + own
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for at in range(gap, count):
            job, to = order[at], at
            while to >= gap and times[order[to - gap]] < times[job]:
                order[to] = order[to - gap]
                to -= gap
            order[to] = job
        gap //= 3
    heap, keys, first, load = space.heap, space.keys, space.first, space.load
    for rank in range(ranks):
        heap[rank], keys[rank] = rank, load[rank]
    for at in range(ranks // 2 - 1, -1, -1):
        sift_down(heap, keys, first, ranks, at, keys[at])
    for own in range(count):
        job, rank = order[own], heap[0]
        space.job_first[job], space.job_class[job] = rank, 0
        load[rank] += max(instance.rates[9], instance.rates[0] + times[job])
        sift_down(heap, keys, first, ranks, 0, load[rank])
    space.counts[JOBS] = old + count


@compiled
def place_all(instance: Instance, space: Workspace, fit: int, fill: int, pack: int, target: float) -> float:
    """One pass with the sizes of `space.ends`; afterwards `load` has the seconds of each rank. Returns the greatest."""
    samples, ranks, counts = len(instance.lengths), instance.ranks, space.counts
    counts[JOBS], counts[BLOCKS] = 0, 0
    counts[STEPS] += STEPS_RANK * ranks + STEPS_SAMPLE * samples
    for place in range(samples + 1):
        space.links[place] = place
    new_block(space, 0, ranks, 0.0)
    whole = ranks > instance.node
    single = instance.sizes[0] == 1 and space.ends[0] > space.ends[1]
    counts[RESERVED] = samples
    if single and fill != FILL_EVERY:
        kept, enough = 0.0, RESERVE * ranks * instance.single_times[space.ends[1]]
        while kept < enough and counts[RESERVED] > space.ends[1]:
            counts[RESERVED] -= 1
            kept += instance.single_times[counts[RESERVED]]
    for j in range(len(instance.sizes) - 1, -1, -1):
        begin, end = space.ends[j + 1], space.ends[j]
        if begin == end:
            continue
        for block in range(counts[BLOCKS]):
            finish(instance, space, block, j + 1, fill, target)
        if whole and instance.sizes[j] <= instance.node:
            cut(space, instance.node)
            whole = False
        if instance.sizes[j] == 1:
            break
        counts[STEPS] += STEPS_SHARED * (end - begin)
        if fit != 0:
            place_by_fit(instance, space, j, fill, target)
        else:
            place_by_load(instance, space, j, fill, target)
    if not single:
        for block in range(counts[BLOCKS]):
            finish(instance, space, block, 0, fill, target)
    for block in range(counts[BLOCKS]):  # blocks become single ranks; `before` is free for their loads
        for rank in range(space.first[block], space.first[block] + space.width[block]):
            space.heap[rank] = block
    for rank in range(ranks):
        space.before[rank] = space.load[space.heap[rank]]
    for rank in range(ranks):
        space.first[rank], space.load[rank] = rank, space.before[rank]
    if single and pack != 0:
        pack_singles(instance, space)
    elif single:
        place_singles(instance, space)
    greatest = 0.0
    for rank in range(ranks):
        greatest = max(greatest, space.load[rank])
    return greatest
