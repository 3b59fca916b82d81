"""Samples of the best plan exchanged between its jobs, so that the most loaded rank gets less.

The groups stay where they are. Whatever is in them, ranks of a group have the same jobs before it, so they still
arrive together and the plan still takes as long as the most loaded rank.
"""

from __future__ import annotations

from dcpbench.dcp.compilation import compiled
from dcpbench.dcp.schedulers.laminar_instance import STEPS, Best, Instance, Workspace, job_time, pad, squares

STEPS_EXCHANGE = 8
"""What counts for each exchange that is looked at."""


@compiled
def load_jobs(instance: Instance, space: Workspace, best: Best) -> None:
    """Tokens, squares and seconds of each job of the best plan, into `space`."""
    for job in range(best.jobs[0]):
        space.job_tokens[job], space.job_squares[job] = 0, 0.0
    for place in range(len(best.job_of)):
        job = best.job_of[place]
        j = best.job_class[job]
        space.job_tokens[job] += pad(instance.lengths[place], instance.units[j])
        space.job_squares[job] += squares(instance.lengths[place], instance.sizes[j])
    for job in range(best.jobs[0]):
        tokens, total = space.job_tokens[job], space.job_squares[job]
        space.job_times[job] = job_time(instance.rates, best.job_class[job], tokens, total)


@compiled
def weigh(instance: Instance, space: Workspace, best: Best) -> int:
    """Loads of all ranks, and the most of each job's, into `space.job_most`; returns the most loaded rank."""
    load, most = best.load, 0
    for rank in range(instance.ranks):
        load[rank] = 0.0
    for job in range(best.jobs[0]):
        first = best.job_first[job]
        for rank in range(first, first + instance.sizes[best.job_class[job]]):
            load[rank] += space.job_times[job]
    for rank in range(instance.ranks):
        if load[rank] > load[most]:
            most = rank
    for job in range(best.jobs[0]):
        first = best.job_first[job]
        greatest = 0.0
        for rank in range(first, first + instance.sizes[best.job_class[job]]):
            greatest = max(greatest, load[rank])
        space.job_most[job] = greatest
    return most


@compiled
def time_with(instance: Instance, space: Workspace, best: Best, job: int, more: int, less: int) -> float:
    """Seconds of a job with the sample `more` and without the sample `less`, -1 for none.

    0 without any sample, infinite where tokens do not fit.
    """
    j = best.job_class[job]
    size, unit = instance.sizes[j], instance.units[j]
    tokens, total = space.job_tokens[job], space.job_squares[job]
    if more >= 0:
        tokens += pad(instance.lengths[more], unit)
        total += squares(instance.lengths[more], size)
    if less >= 0:
        tokens -= pad(instance.lengths[less], unit)
        total -= squares(instance.lengths[less], size)
    if tokens == 0:
        return 0.0
    if tokens > size * instance.capacity:
        return float("inf")
    time: float = job_time(instance.rates, j, tokens, total)
    return time


@compiled
def most_after(
    instance: Instance, space: Workspace, best: Best, job: int, change: float, other: int, other_change: float
) -> float:
    """An upper bound on the loads of two jobs' ranks when their times change."""
    begin, other_begin = best.job_first[job], best.job_first[other]
    end = begin + instance.sizes[best.job_class[job]]
    other_end = other_begin + instance.sizes[best.job_class[other]]
    after, other_after = space.job_most[job] + change, space.job_most[other] + other_change
    if begin <= other_begin and other_end <= end:
        other_after += change
    elif other_begin <= begin and end <= other_end:
        after += other_change
    most: float = max(after, other_after)
    return most


@compiled
def put(instance: Instance, space: Workspace, best: Best, place: int, job: int) -> None:
    """Move a sample to a job, whose time is not right afterwards."""
    for sign in range(-1, 2, 2):
        at = best.job_of[place] if sign < 0 else job
        j = best.job_class[at]
        space.job_tokens[at] += sign * pad(instance.lengths[place], instance.units[j])
        space.job_squares[at] += sign * squares(instance.lengths[place], instance.sizes[j])
    best.job_of[place] = job


@compiled
def drop_empty(best: Best, space: Workspace) -> None:
    """Take out jobs without samples."""
    kept, number = 0, space.links
    for job in range(best.jobs[0]):
        number[job] = kept
        if space.job_tokens[job] > 0:
            best.job_first[kept], best.job_class[kept] = best.job_first[job], best.job_class[job]
            kept += 1
    for place in range(len(best.job_of)):
        best.job_of[place] = number[best.job_of[place]]
    best.jobs[0] = kept


@compiled
def exchange(instance: Instance, space: Workspace, best: Best, enough: float, steps: int) -> float:
    """Exchange samples until nothing helps, `steps` are spent or the plan takes at most `enough`; returns its seconds.

    A sample of the most loaded rank moves to another job, or changes places with a shorter one: of all such changes
    the one after which the ranks of both jobs have least to do, as long as that is less than the rank had.
    """
    samples, last = len(best.job_of), space.counts[STEPS] + steps
    load_jobs(instance, space, best)
    while True:
        rank = weigh(instance, space, best)
        space.counts[STEPS] += samples + instance.ranks
        time: float = best.load[rank]
        least, chosen, partner, target = time, -1, -1, -1
        for place in range(samples):
            job = best.job_of[place]
            first = best.job_first[job]
            if not first <= rank < first + instance.sizes[best.job_class[job]]:
                continue
            if time <= enough or space.counts[STEPS] >= last:
                break
            alone = time_with(instance, space, best, job, -1, place) - space.job_times[job]
            space.counts[STEPS] += STEPS_EXCHANGE * best.jobs[0]
            for other in range(best.jobs[0]):
                if other == job or space.job_tokens[other] == 0:
                    continue
                change = time_with(instance, space, best, other, place, -1) - space.job_times[other]
                after = most_after(instance, space, best, job, alone, other, change)
                if after < least:
                    least, chosen, partner, target = after, place, -1, other
            for second in range(place + 1, samples):
                other = best.job_of[second]
                if other == job or (space.job_most[other] >= time and best.job_first[other] == first):
                    continue
                space.counts[STEPS] += STEPS_EXCHANGE
                mine = time_with(instance, space, best, job, second, place) - space.job_times[job]
                change = time_with(instance, space, best, other, place, second) - space.job_times[other]
                after = most_after(instance, space, best, job, mine, other, change)
                if after < least:
                    least, chosen, partner, target = after, place, second, other
        if chosen < 0:
            break
        job = best.job_of[chosen]
        put(instance, space, best, chosen, target)
        if partner >= 0:
            put(instance, space, best, partner, job)
        space.job_times[job] = time_with(instance, space, best, job, -1, -1)
        space.job_times[target] = time_with(instance, space, best, target, -1, -1)
    drop_empty(best, space)
    return time
