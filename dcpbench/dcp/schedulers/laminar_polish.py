"""Small changes to the best plan of `laminar`: one sample's size at a time, kept where the plan becomes better."""

from __future__ import annotations

from dcpbench.dcp.compilation import Vector, compiled
from dcpbench.dcp.schedulers.laminar_instance import JOBS, STEPS, Best, Instance, Workspace
from dcpbench.dcp.schedulers.laminar_placement import place_all


@compiled
def squared(load: Vector) -> float:
    """Sum of squared loads: of two plans that take equally long, the more even one has less."""
    total = 0.0
    for value in load:
        total += value * value
    return total


@compiled
def keep(space: Workspace, best: Best) -> None:
    """Make the last pass the best plan."""
    best.jobs[0] = space.counts[JOBS]
    for j in range(len(best.ends)):
        best.ends[j] = space.ends[j]
    for place in range(len(best.job_of)):
        best.job_of[place] = space.job_of[place]
    for job in range(space.counts[JOBS]):
        best.job_first[job], best.job_class[job] = space.job_first[job], space.job_class[job]
    for rank in range(len(best.load)):
        best.load[rank] = space.load[rank]


@compiled
def following(state: int) -> int:
    """The next of a fixed sequence of pseudo-random integers from 1 to 2^31 - 2: Park and Miller's, within 64 bits."""
    return state * 48271 % 2147483647


@compiled
def class_of(ends: Vector, place: int) -> int:
    """Index of the size of a place."""
    j = len(ends) - 2
    while ends[j] <= place:
        j -= 1
    return j


@compiled
def critical_place(instance: Instance, best: Best, state: int) -> int:
    """A sample of one of the jobs on the most loaded rank: `state` says which job and which of its samples."""
    most = 0
    for rank in range(instance.ranks):
        if best.load[rank] > best.load[most]:
            most = rank
    found, wanted, chosen = 0, -1, -1
    for counting in range(2):
        if counting == 1:
            wanted, found = state % found, 0
        for job in range(best.jobs[0]):
            if best.job_first[job] <= most < best.job_first[job] + instance.sizes[best.job_class[job]]:
                if found == wanted:
                    chosen = job
                found += 1
    found, wanted, state, place = 0, -1, state // found, -1
    for counting in range(2):
        if counting == 1:
            wanted, found = state % found, 0
        for at in range(len(best.job_of)):
            if best.job_of[at] == chosen:
                if found == wanted:
                    place = at
                found += 1
    return place


@compiled
def polish(
    instance: Instance,
    space: Workspace,
    best: Best,
    fit: int,
    fill: int,
    pack: int,
    target: float,
    enough: float,
    steps: int,
) -> float:
    """Try changes until `steps` are spent or the plan takes at most `enough` seconds; returns its seconds.

    Two of three changed samples are on the most loaded rank. A sample moves by one or two sizes, or to the size of
    another; so that sizes still never increase along the places, its neighbours in the way move along.
    """
    samples, count = len(instance.lengths), len(instance.sizes)
    time = 0.0
    for load in best.load:
        time = max(time, load)
    spread = squared(best.load)
    state = 20011
    last = space.counts[STEPS] + steps
    while space.counts[STEPS] < last and time > enough:
        space.counts[STEPS] += 200 + 2 * samples
        state = following(state)
        if state % 3 > 0:
            state = following(state)
            place = critical_place(instance, best, state)
        else:
            state = following(state)
            place = state % samples
        now = class_of(best.ends, place)
        state = following(state)
        if state % 3 > 0:
            state = following(state)
            change = state % 4
            wanted = now + (change - 2 if change < 2 else change - 1)
        else:
            state = following(state)
            wanted = class_of(best.ends, state % samples)
        wanted = min(max(wanted, 0), count - 1)
        if wanted == now or instance.usable[wanted] > place:
            continue
        for j in range(count + 1):
            ends = best.ends[j]
            ends = max(ends, place + 1) if j <= wanted else min(ends, place)
            space.ends[j] = ends
        now_time = place_all(instance, space, fit, fill, pack, target)
        if now_time <= time:
            now_spread = squared(space.load)
            if now_time < time or now_spread < spread:
                time, spread = now_time, now_spread
                keep(space, best)
    return time
