"""Where `laminar` puts samples whose group sizes are chosen: classes from the largest size to the smallest.

Single ranks come last: their microbatches level what larger groups left uneven.
"""

from __future__ import annotations

from dcpbench.dcp.compilation import compiled
from dcpbench.dcp.schedulers.laminar_blocks import (
    FILL_EVERY,
    FILL_NONE,
    cut,
    finish,
    free,
    join,
    new_block,
    sift_down,
    sift_up,
)
from dcpbench.dcp.schedulers.laminar_instance import (
    BLOCKS,
    JOBS,
    REMEMBERED,
    RESERVE,
    RESERVED,
    STEPS,
    STEPS_RANK,
    STEPS_SAMPLE,
    STEPS_SCAN,
    STEPS_SHARED,
    Instance,
    Workspace,
    job_time,
    pad,
    squares,
)
from dcpbench.dcp.schedulers.laminar_packing import PACK_ALL, PACK_NONE, place_packed


@compiled
def place_by_load(instance: Instance, space: Workspace, j: int, fill: int, target: float) -> None:
    """Each sample of the class to the least loaded block that is wide enough, first rank first among equals.

    This is `join` and `finish` for every sample; what most samples need of them is written out, as a compiled call that
    takes all vectors costs more than it does.
    """
    heap, keys, links, lengths, rates = space.heap, space.keys, space.links, instance.lengths, instance.rates
    load, first, width, opened, before = space.load, space.first, space.width, space.open, space.before
    job_of, job_tokens, job_squares = space.job_of, space.job_tokens, space.job_squares
    counts, job_first, job_class = space.counts, space.job_first, space.job_class
    size, end, count = instance.sizes[j], space.ends[j], 0
    unit, limit = instance.units[j], size * instance.capacity
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
        job = opened[block]
        tokens = pad(lengths[place], unit)
        if job < 0:
            job = counts[JOBS]
            counts[JOBS] = job + 1
            job_first[job], job_class[job], opened[block] = first[block], j, job
            job_tokens[job], job_squares[job] = 0, 0.0
        if job_tokens[job] + tokens <= limit:
            tokens += job_tokens[job]
            total = job_squares[job] + squares(lengths[place], size)
            job_tokens[job], job_squares[job] = tokens, total
            job_of[place], links[place] = job, place + 1
            load[block] = before[block] + job_time(rates, j, tokens, total)
        elif fill != FILL_NONE:
            finish(instance, space, block, j, fill, target)
        else:
            opened[block], before[block] = -1, load[block]
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
            if pack != PACK_NONE:
                place_packed(instance, space, j, fill, target)
            break
        counts[STEPS] += STEPS_SHARED * (end - begin)
        if pack == PACK_ALL:
            place_packed(instance, space, j, fill, target)
        elif fit != 0:
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
    if single and pack == PACK_NONE:
        place_singles(instance, space)
    greatest = 0.0
    for rank in range(ranks):
        greatest = max(greatest, space.load[rank])
    return greatest
