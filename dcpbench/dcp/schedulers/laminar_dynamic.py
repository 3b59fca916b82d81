"""The jobs that the dynamic-CP rule makes of a batch, placed as `laminar` places jobs: no plan is much worse than it.

The rule is stated in `default_dynamic_cp.py`, which keeps a heap for each size. Here every group is looked at for every
sample, which needs no more than a loop, and is quicker for the batches this is meant for. Samples that have room
nowhere are skipped by binary search there and here.
"""

from __future__ import annotations

from typing import NamedTuple

from dcpbench.dcp.compilation import Vector, compiled, floats, integers
from dcpbench.dcp.schedulers.laminar_blocks import FILL_NONE, cut, new_block
from dcpbench.dcp.schedulers.laminar_instance import (
    BLOCKS,
    JOBS,
    RESERVED,
    STEPS,
    Instance,
    Workspace,
    job_time,
    pad,
    squares,
)
from dcpbench.dcp.schedulers.laminar_packing import place_jobs


class Rule(NamedTuple):
    """The state of the rule in one microbatch: S samples, N ranks, R of the instance's sizes.

    A *position* is a place in the rule's order, which is by padded tokens.
    """

    order: Vector
    """(S,) the place at each position."""
    needs: Vector
    """(S,) the smallest of its sizes that holds the sample, as an index of `classes`."""
    classes: Vector
    """(R,) indices among the instance's sizes, ascending."""
    links: Vector
    """(S + 1,) for a sample of an earlier microbatch a later position, else the position itself."""
    following: Vector
    """(S,) the next position of the same group; -1 at its end."""
    head: Vector
    """(N,) the last position that joined each group."""
    kind: Vector
    """(N,) its size, as an index of `classes`."""
    room: Vector
    """(N,) its free tokens."""
    work: Vector
    """(N,) sum of s^2 / k over its samples."""
    chain: Vector
    """(N,) groups from rank 0 upward."""
    state: Vector
    """(1,) groups of the microbatch."""


def rule_of(order: Vector, needs: Vector, classes: Vector, ranks: int) -> Rule:
    """Before the first microbatch."""
    samples = len(order)
    return Rule(
        order=order,
        needs=needs,
        classes=classes,
        links=integers(samples + 1),
        following=integers(samples),
        head=integers(ranks),
        kind=integers(ranks),
        room=integers(ranks),
        work=floats(ranks),
        chain=integers(ranks),
        state=integers(1),
    )


@compiled
def left(rule: Rule, position: int) -> int:
    """The first position at or after `position` that is in no earlier microbatch."""
    links = rule.links
    while links[position] != position:
        links[position] = links[links[position]]
        position = links[position]
    return position


@compiled
def tokens_at(instance: Instance, rule: Rule, position: int, r: int) -> int:
    """Padded tokens of a sample on the r-th of the rule's sizes."""
    padded: int = pad(instance.lengths[rule.order[position]], instance.units[rule.classes[r]])
    return padded


@compiled
def with_room(instance: Instance, rule: Rule, position: int, end: int, r: int, room: int) -> int:
    """The first position from `position` up to `end` whose sample takes at most `room` tokens on the r-th size."""
    low, high = position, end
    while low < high:
        middle = (low + high) // 2
        if tokens_at(instance, rule, middle, r) <= room:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def add(instance: Instance, rule: Rule, position: int, group: int) -> float:
    """Add a sample to a group; the group's work."""
    r = rule.kind[group]
    tokens = tokens_at(instance, rule, position, r)
    rule.following[position] = rule.head[group]
    rule.head[group] = position
    rule.room[group] -= tokens
    rule.work[group] += float(tokens) * float(tokens) / instance.sizes[rule.classes[r]]
    work: float = rule.work[group]
    return work


@compiled
def open_group(instance: Instance, rule: Rule, r: int, capacity: int) -> int:
    """A group of the r-th size without samples."""
    group: int = rule.state[0]
    rule.state[0] = group + 1
    rule.chain[group] = group
    rule.kind[group], rule.head[group], rule.work[group] = r, -1, 0.0
    rule.room[group] = instance.sizes[rule.classes[r]] * capacity
    return group


@compiled
def gather(instance: Instance, rule: Rule, capacity: int) -> int:
    """One microbatch of the samples left, before empty ranks are filled; returns what was looked at."""
    samples, sizes, classes = len(rule.order), instance.sizes, rule.classes
    rule.state[0] = 0
    position, steps = left(rule, 0), 0
    largest = rule.needs[position]
    maximum = add(instance, rule, position, open_group(instance, rule, largest, capacity))
    idle = instance.ranks - sizes[classes[largest]]
    position = left(rule, position + 1)
    while position < samples:
        chosen, fresh, least = -1, -1, 0.0
        for r in range(rule.needs[position], largest + 1):
            size, tokens = sizes[classes[r]], tokens_at(instance, rule, position, r)
            work = float(tokens) * float(tokens) / size
            steps += rule.state[0]
            for group in range(rule.state[0]):
                if rule.kind[group] == r and rule.room[group] >= tokens:
                    most = max(maximum, rule.work[group] + work)
                    if (chosen < 0 and fresh < 0) or most < least:
                        chosen, fresh, least = group, -1, most
                        if least == maximum:
                            break
            if size <= idle and ((chosen < 0 and fresh < 0) or max(maximum, work) < least):
                chosen, fresh, least = -1, r, max(maximum, work)
            if (chosen >= 0 or fresh >= 0) and least == maximum:
                break
        if fresh >= 0:
            idle -= sizes[classes[fresh]]
            chosen = open_group(instance, rule, fresh, capacity)
        if chosen >= 0:
            maximum = max(maximum, add(instance, rule, position, chosen))
            position = left(rule, position + 1)
            continue
        found = samples
        steps += rule.state[0]
        for r in range(len(classes)):
            most_room = sizes[classes[r]] * capacity if sizes[classes[r]] <= idle else -1
            for group in range(rule.state[0]):
                if rule.kind[group] == r:
                    most_room = max(most_room, rule.room[group])
            if most_room > 0:
                found = with_room(instance, rule, position + 1, found, r, most_room)
        position = left(rule, found)
    return steps


@compiled
def widen(instance: Instance, rule: Rule, capacity: int) -> bool:
    """Double the smallest groups, first rank first, until no rank is empty; False where that is impossible.

    A group that padding for twice the ranks makes too full is passed over; the one that grows moves before it.
    """
    ranks, sizes, classes, chain, count = instance.ranks, instance.sizes, rule.classes, rule.chain, rule.state[0]
    used = 0
    for at in range(count):
        used += sizes[classes[rule.kind[chain[at]]]]
    while used < ranks:
        r = rule.kind[chain[count - 1]]
        if r + 1 == len(classes):
            return False
        size, grown = sizes[classes[r]], sizes[classes[r + 1]]
        used += grown - size
        if used > ranks:
            return False
        begin = count - 1
        while begin > 0 and rule.kind[chain[begin - 1]] == r:
            begin -= 1
        at, room = begin, -1
        while at < count:
            room, position = grown * capacity, rule.head[chain[at]]
            while position >= 0:
                room -= tokens_at(instance, rule, position, r + 1)
                position = rule.following[position]
            if room >= 0:
                break
            at += 1
        if room < 0:
            return False
        group = chain[at]
        while at > begin:
            chain[at] = chain[at - 1]
            at -= 1
        chain[begin] = group
        rule.kind[group] = r + 1
    return True


@compiled
def whole(instance: Instance, rule: Rule, capacity: int) -> None:
    """One group of all ranks with every sample left that still fits, longest first."""
    rule.state[0] = 0
    r, samples = len(rule.classes) - 1, len(rule.order)
    group = open_group(instance, rule, r, capacity)
    position = left(rule, 0)
    while position < samples:
        add(instance, rule, position, group)
        position = left(rule, with_room(instance, rule, position + 1, samples, r, rule.room[group]))


@compiled
def store(instance: Instance, space: Workspace, rule: Rule) -> None:
    """Make the groups of a microbatch jobs, and take their samples out."""
    rank, job = 0, space.counts[JOBS]
    for at in range(rule.state[0]):
        group = rule.chain[at]
        j = rule.classes[rule.kind[group]]
        space.job_first[job], space.job_class[job] = rank, j
        space.job_tokens[job], space.job_squares[job] = 0, 0.0
        position = rule.head[group]
        while position >= 0:
            place = rule.order[position]
            space.job_of[place] = job
            space.job_tokens[job] += pad(instance.lengths[place], instance.units[j])
            space.job_squares[job] += squares(instance.lengths[place], instance.sizes[j])
            rule.links[position] = position + 1
            position = rule.following[position]
        space.job_times[job] = job_time(instance.rates, j, space.job_tokens[job], space.job_squares[job])
        rank += instance.sizes[j]
        job += 1
    space.counts[JOBS] = job


@compiled
def renumber(space: Workspace, classes: int) -> None:
    """Number the jobs by size, the largest first: the order in which ranks execute them.

    Groups of one rule are aligned blocks, of which one lies within the other or beside it, so nobody waits.
    """
    count, number = 0, space.links
    for j in range(classes - 1, -1, -1):
        for job in range(space.counts[JOBS]):
            if space.job_class[job] == j:
                number[job] = count
                count += 1
    for place in range(len(space.job_of)):
        space.job_of[place] = number[space.job_of[place]]
    for job in range(count):
        space.tree[number[job]] = space.job_first[job]
        space.tree[count + number[job]] = space.job_class[job]
        space.tree[2 * count + number[job]] = space.job_tokens[job]
        space.job_squares[number[job]] = space.job_times[job]
    for job in range(count):
        space.job_first[job], space.job_class[job] = space.tree[job], space.tree[count + job]
        space.job_tokens[job] = space.tree[2 * count + job]
        space.job_times[job] = space.job_squares[job]


@compiled
def make_jobs(instance: Instance, space: Workspace, rule: Rule, capacity: int) -> None:
    """The rule's jobs with `capacity` tokens on a rank, on which every sample fits the largest size, numbered by size.

    Afterwards `space.load` has the seconds of each rank where the rule puts them.
    """
    samples = len(rule.order)
    for position in range(samples + 1):
        rule.links[position] = position
    space.counts[JOBS] = 0
    while left(rule, 0) < samples:
        space.counts[STEPS] += gather(instance, rule, capacity) + instance.ranks
        if not widen(instance, rule, capacity):
            whole(instance, rule, capacity)
        store(instance, space, rule)
    renumber(space, len(instance.sizes))


@compiled
def loads_of_jobs(instance: Instance, space: Workspace) -> float:
    """Seconds of each rank, into `space.load`, with the jobs where they are; returns the greatest."""
    load, greatest = space.load, 0.0
    for rank in range(instance.ranks):
        load[rank] = 0.0
    for job in range(space.counts[JOBS]):
        first = space.job_first[job]
        for rank in range(first, first + instance.sizes[space.job_class[job]]):
            load[rank] += space.job_times[job]
            greatest = max(greatest, load[rank])
    return greatest


@compiled
def level_jobs(instance: Instance, space: Workspace) -> float:
    """Place the jobs anew: of each size, largest first, the longest first to the least loaded block.

    They must be numbered by size. Afterwards `space.load` has the seconds of each rank; returns the greatest.
    """
    counts, job = space.counts, 0
    counts[BLOCKS], counts[RESERVED] = 0, len(space.job_of)
    new_block(space, 0, instance.ranks, 0.0)
    uncut = instance.ranks > instance.node
    while job < counts[JOBS]:
        j, end = space.job_class[job], job
        while end < counts[JOBS] and space.job_class[end] == j:
            end += 1
        if uncut and instance.sizes[j] <= instance.node:
            cut(space, instance.node)
            uncut = False
        place_jobs(instance, space, j, job, end - job, FILL_NONE, 0.0)
        job = end
    return loads_of_jobs(instance, space)
