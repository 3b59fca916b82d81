"""Blocks of ranks filled one after the other up to a target time: for few samples per rank, where whole jobs matter.

The other passes choose a size for each sample first and place classes of equal size by load. With one or two jobs on a
rank what decides is how full each block gets. Here a block is taken for the longest sample left, filled up to the
target with the longest samples that still fit, and never split: all its jobs are of its size.
"""

from __future__ import annotations

from dcpbench.dcp.compilation import compiled
from dcpbench.dcp.schedulers.laminar_blocks import free
from dcpbench.dcp.schedulers.laminar_instance import (
    JOBS,
    RATES,
    STEPS,
    STEPS_RANK,
    STEPS_SAMPLE,
    Instance,
    Workspace,
    device_time,
    job_time,
    pad,
    solo,
    squares,
)

WIDER = 3
"""Sizes tried for a block: the smallest that serves its longest sample within the target, and the next ones."""
STEPS_JOIN = 30
"""What counts for each sample that joins a block, kept or not."""
FULL = 0.99
"""A block this full is taken without a look at further sizes."""


@compiled
def longest_joining(instance: Instance, at: int, j: int, tokens: int, total: float, now: float, left: float) -> int:
    """The first place from `at` on whose sample a job of the j-th size takes in `left` seconds, memory permitting.

    `now` is the device's time for the `tokens` and squares that it holds. What a sample adds is at least its time per
    token, which says where to begin; from there steps double until one fits.
    """
    lengths, rates, samples = instance.lengths, instance.rates, len(instance.lengths)
    size, unit = instance.sizes[j], instance.units[j]
    room = size * instance.capacity - tokens
    most, rate = float(room), rates[j * RATES + 1]
    if rate > 0.0:
        most = min(most, (left - now) / rate)
    low, high = at, samples
    while low < high:
        middle = (low + high) // 2
        if lengths[middle] <= most:
            high = middle
        else:
            low = middle + 1
    # The answer is from `low` on, and before `high` once one there fits.
    step, middle, high = 1, low, samples
    while low < high:
        more = pad(lengths[middle], unit)
        if more <= room and job_time(rates, j, tokens + more, total + squares(lengths[middle], size)) <= left:
            high = middle
            middle = (low + high) // 2
        else:
            low = middle + 1
            if high == samples:
                middle = min(middle + step, samples - 1)
                step *= 2
            else:
                middle = (low + high) // 2
    return low


@compiled
def fill_block(instance: Instance, space: Workspace, place: int, j: int, target: float, first: int, look: int) -> float:
    """Fill a block of the j-th size, up to the target; returns what its samples take on one rank, without base.

    `place`, which the block must serve within the target, comes first. Then samples join the open job, the longest
    that fits first; when none does a new job starts. With `first` >= 0 they are placed in jobs from that rank on;
    otherwise nothing is kept but the number of this look, at each sample taken.
    """
    samples, rates, lengths, links = len(instance.lengths), instance.rates, instance.lengths, space.links
    size, unit, looks = instance.sizes[j], instance.units[j], space.tree
    before, total, tokens, at, done, time = 0.0, 0.0, 0, place, 0.0, 0.0
    now, least, steps = rates[j * RATES], rates[j * RATES + 1] * pad(1, unit), 0
    job, low = space.counts[JOBS] - 1, -1
    while True:
        if low < 0:
            low = place
        elif before + now + least <= target:
            steps += STEPS_JOIN
            low = free(links, longest_joining(instance, at, j, tokens, total, now, target - before))
            while low < samples and looks[low] == look:
                low = free(links, low + 1)
        else:
            low = samples
        if low >= samples:
            if tokens == 0:
                break
            before, total, tokens, at, now = time, 0.0, 0, place, rates[j * RATES]
            continue
        if tokens == 0 and first >= 0:
            job = space.counts[JOBS]
            space.counts[JOBS] = job + 1
            space.job_first[job], space.job_class[job] = first, j
        tokens += pad(lengths[low], unit)
        total += squares(lengths[low], size)
        now = device_time(rates, j, tokens, total)
        time = before + max(rates[j * RATES + 9], now)
        done += instance.single_times[low]
        looks[low] = look
        if first >= 0:
            space.job_of[low] = job
            links[low] = low + 1
        at = low + 1
    space.counts[STEPS] += steps
    if first >= 0:
        for rank in range(first, first + size):
            space.load[rank] = time
    return done


@compiled
def find_block(instance: Instance, space: Workspace, size: int, aligned: bool, begin: int, end: int, front: int) -> int:
    """The first rank of a free block, or -1: of more ranks than a node from node `front` on, else where least is left.

    Nodes before `begin` are full, and those from `end` on empty.
    """
    node, ranks, used = instance.node, instance.ranks, space.remembered
    if size > node:
        first = pad(front * node, size) if aligned else front * node
        if first + size > ranks:
            return -1
        for number in range(first // node, min(end, (first + size + node - 1) // node)):
            if used[number] > 0:
                return -1
        return first
    chosen, least = -1, 0
    for number in range(begin, min(end + 1, (ranks + node - 1) // node)):
        left = min(node, ranks - number * node) - used[number]
        if left >= size and (chosen < 0 or left < least) and not (aligned and used[number] % size > 0):
            chosen, least = number, left
    space.counts[STEPS] += (end - begin) // 4
    found: int = -1 if chosen < 0 else chosen * node + used[chosen]
    return found


@compiled
def serves(instance: Instance, place: int, j: int, target: float) -> bool:
    """Whether the sample fits memory on the j-th size and alone takes at most the target."""
    fits: bool = instance.usable[j] <= place and solo(instance, place, j) <= target
    return fits


@compiled
def cover(instance: Instance, space: Workspace, target: float, aligned: bool) -> float:
    """One pass; afterwards `load` has the seconds of each rank. Returns the greatest, infinite if ranks do not suffice.

    `aligned` blocks start at a multiple of their size, as those of `pow2` must.
    """
    samples, ranks, node, sizes = len(instance.lengths), instance.ranks, instance.node, instance.sizes
    base, count, used = instance.rates[0], len(sizes), space.remembered
    space.counts[JOBS] = 0
    space.counts[STEPS] += STEPS_RANK * ranks + STEPS_SAMPLE * samples
    for place in range(samples + 1):
        space.links[place] = place
    for place in range(samples):
        space.tree[place] = 0
    nodes, begin, end, front, look = (ranks + node - 1) // node, 0, 0, 0, 0
    for number in range(nodes):  # ranks in use of each node
        used[number] = 0
    for rank in range(ranks):
        space.load[rank] = 0.0
    place, smallest = 0, 0
    while place < samples:
        if place == 0:
            while smallest < count and not serves(instance, place, smallest, target):
                smallest += 1
        while smallest > 0 and serves(instance, place, smallest - 1, target):
            smallest -= 1
        best, most, start = -1, 0.0, -1
        for j in range(smallest, min(count, smallest + WIDER)):
            size = sizes[j]
            if j > smallest and not serves(instance, place, j, target):
                continue
            first = find_block(instance, space, size, aligned, begin, end, front)
            if first < 0:
                continue
            look += 1
            done = fill_block(instance, space, place, j, target, -1, look) / size
            if best < 0 or done > most:
                best, most, start = j, done, first
            if done >= FULL * (target - base):
                break
        if best < 0:
            return float("inf")
        look += 1
        fill_block(instance, space, place, best, target, start, look)
        size = sizes[best]
        if size > node:
            front = (start + size + node - 1) // node
            for number in range(start // node, front):
                used[number] = min(node, ranks - number * node)
        else:
            used[start // node] = start % node + size
        end = max(end, (start + size + node - 1) // node)
        while begin < end and used[begin] == min(node, ranks - begin * node):
            begin += 1
        place = free(space.links, place)
    greatest = 0.0
    for rank in range(ranks):
        greatest = max(greatest, space.load[rank])
    return greatest
