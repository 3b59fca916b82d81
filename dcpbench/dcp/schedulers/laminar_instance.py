"""What the loops of `laminar` work on: one batch, the state of a pass, the best plan, and the heap of blocks.

A *place* is a position among the samples, longest first. A *class* is the samples of one group size, named by
the index of that size among the instance's. Sizes never increase along the places, so `ends[j]`, the number of places
whose size has index j or more, says all of them: class j is the places from `ends[j + 1]` up to `ends[j]`.
"""

from __future__ import annotations

from typing import NamedTuple

from dcpbench.dcp.compilation import Vector, compiled

TILE = 128
"""As `dcp.costs.TILE`, for compiled code."""
REMEMBERED = 32
"""Microbatches of one rank that further samples of one rank may still join: those with most room."""
STEPS_RANK, STEPS_SAMPLE, STEPS_SHARED, STEPS_TIME, STEPS_SCAN = 20, 40, 60, 15, 1
"""What counts against the search budget: each rank, each sample and each sample on several ranks of a pass, each
job time computed elsewhere, each block that rule `fit` looks at. One step is about 7 ns compiled."""

RATES = 10
"""Coefficients of one size in `Instance.rates`."""
RESERVE = 1.0
"""The shortest samples of one rank are kept to level the ranks in the end: as many as take, on all ranks, this share of
the time of the longest sample of one rank."""
JOBS, BLOCKS, STEPS, RESERVED = 0, 1, 2, 3
"""Places in `Workspace.counts`."""


class Instance(NamedTuple):
    """One global batch on one domain, in the order of places. S samples, K sizes; times in seconds."""

    ranks: int
    node: int
    capacity: int
    lengths: Vector
    """(S,) real tokens, never increasing."""
    single_tokens: Vector
    """(S,) padded tokens on one rank."""
    single_times: Vector
    """(S,) seconds on one rank without the base."""
    sizes: Vector
    """(K,) ranks of a group, ascending."""
    units: Vector
    """(K,) tokens are padded to a multiple of."""
    usable: Vector
    """(K,) the first place whose sample fits memory."""
    rates: Vector
    """(RATES K,) coefficients of job times, those of one size in a row: see `device_time`."""


class Workspace(NamedTuple):
    """What a pass fills: S samples, N ranks, K sizes."""

    counts: Vector
    """(4,) jobs, blocks, steps, first place kept from topping up."""
    ends: Vector
    """(K + 1,) the sizes."""
    links: Vector
    """(S + 1,) for a placed sample a later place, else the place itself."""
    job_of: Vector
    """(S,) job of each place."""
    job_first: Vector
    """(S,) first rank of each job."""
    job_class: Vector
    """(S,) index of each job's size."""
    job_tokens: Vector
    """(S,) padded tokens of jobs of several ranks."""
    job_squares: Vector
    """(S,) their squares; of jobs of one rank, seconds without the base."""
    job_times: Vector
    """(S,) seconds of packed jobs before they are topped up, and of jobs that are changed."""
    job_most: Vector
    """(S,) of jobs that are changed, the greatest load of their ranks."""
    first: Vector
    """(N,) first rank of each block."""
    width: Vector
    """(N,) its ranks."""
    open: Vector
    """(N,) its open job, -1 without."""
    load: Vector
    """(N,) seconds of its jobs; after a pass blocks are single ranks."""
    before: Vector
    """(N,) the same without the open job."""
    heap: Vector
    """(N,) blocks, least load on top."""
    keys: Vector
    """(N,) their loads."""
    remembered: Vector
    """(N,) open microbatches of each rank."""
    room: Vector
    """(N * REMEMBERED,) their free tokens, ascending."""
    number: Vector
    """(N * REMEMBERED,) their jobs."""
    tree: Vector
    """(4 S,) room below each node of a tree over microbatches; then their order."""


class Best(NamedTuple):
    """The shortest plan so far; vectors as in `Workspace`."""

    jobs: Vector
    """(1,) their number."""
    ends: Vector
    job_of: Vector
    job_first: Vector
    job_class: Vector
    load: Vector


@compiled
def pad(length: int, unit: int) -> int:
    """`length` rounded up to a multiple of `unit`."""
    return (length + unit - 1) // unit * unit


@compiled
def squares(length: int, size: int) -> float:
    """What a sample adds to q on `size` ranks, as `costs.squares_of`."""
    rounded = float(pad(length, TILE * (2 * size if size > 1 else 1)))
    return (float(length) * float(length) + rounded * rounded) / 2.0


@compiled
def device_time(rates: Vector, j: int, tokens: int, squares: float) -> float:
    """Seconds of the device in a job on the j-th size.

    Rates of a size: the base; seconds per token (adding up partial outputs included) and per square; ring hops of all
    layers in one direction; seconds of a hop, without data and per token forward and backward, and those that
    attention hides per square forward and backward; last the least seconds of any job.
    """
    at = j * RATES
    total: float = rates[at] + rates[at + 1] * tokens + rates[at + 2] * squares
    hops = rates[at + 3]
    if hops > 0.0:
        forward = rates[at + 4] + rates[at + 5] * tokens - rates[at + 7] * squares
        backward = rates[at + 4] + rates[at + 6] * tokens - rates[at + 8] * squares
        if forward > 0.0:
            total += hops * forward
        if backward > 0.0:
            total += hops * backward
    return total


@compiled
def job_time(rates: Vector, j: int, tokens: int, squares: float) -> float:
    """Seconds of a job on the j-th size, as `CostModel.time`."""
    floor: float = rates[j * RATES + 9]
    return max(floor, device_time(rates, j, tokens, squares))


@compiled
def solo(instance: Instance, place: int, j: int) -> float:
    """Seconds of a job that holds this sample only."""
    length = instance.lengths[place]
    return job_time(instance.rates, j, pad(length, instance.units[j]), squares(length, instance.sizes[j]))


@compiled
def choose(instance: Instance, space: Workspace, allowed: Vector, floor: int, fraction: float, target: float) -> None:
    """Sizes for a target, into `space.ends`; rank work is least on the smallest size.

    Each place gets the smallest allowed size from `floor` up on which it fits memory and alone takes at most
    `fraction` x `target`; if there is none, the smallest within `target`; else the fastest. Solo times never rise
    along the places, so what a size can serve is a tail of them, found by binary search.
    `allowed[j]` says whether size j may be used; the largest always may.
    """
    ends, samples, count = space.ends, len(instance.lengths), len(instance.sizes)
    for j in range(count):
        ends[j] = -1
    ends[count] = 0
    until, smallest = samples, floor
    for step in range(2):
        limit = fraction * target if step == 0 else target
        if step == 1 and fraction == 1.0:
            break
        for j in range(floor, count):
            if until == 0:
                break
            if allowed[j] == 0 or j < smallest:
                continue
            low, high = instance.usable[j], until
            while low < high:
                middle = (low + high) // 2
                space.counts[STEPS] += STEPS_TIME
                if solo(instance, middle, j) <= limit:
                    high = middle
                else:
                    low = middle + 1
            if low < until:
                if ends[j] < 0:
                    ends[j] = until
                until, smallest = low, j
    for place in range(until - 1, -1, -1):
        fastest, quickest = -1, 0.0
        for j in range(smallest, count):
            if allowed[j] != 0 and instance.usable[j] <= place:
                space.counts[STEPS] += STEPS_TIME
                time = solo(instance, place, j)
                if fastest < 0 or time < quickest:
                    fastest, quickest = j, time
        smallest = fastest
        if ends[smallest] < 0:
            ends[smallest] = place + 1
    for j in range(count - 1, -1, -1):
        if ends[j] < 0:
            ends[j] = ends[j + 1]
