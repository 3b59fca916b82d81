"""Which microbatches a calibration times: each term of the cost model alone, then samples as the data have them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dcpbench.dcp.kernel_choice import LONG_WORK
from dcpbench.dcp.timings import Point
from dcpbench.dcp.workload import PaddingRule, usable_length

SHORT = 128
"""Length of the samples that make attention negligible: one tile of its kernels."""
MIXED = 6
"""Mixed microbatches for each group size that take part in the fit, and again as many that judge it."""
LEAST, MOST = 0.08, 1.0
"""Share of the capacity that random mixed microbatches fill."""

Job = tuple[int, tuple[int, ...]]
"""A microbatch of a plan: its CP size, and the real lengths of its samples."""


def choose(
    lengths: Sequence[int],
    sizes: Sequence[int],
    capacity: int,
    padding: PaddingRule,
    jobs: Sequence[Job] = (),
    seed: int = 0,
) -> tuple[Point, ...]:
    """The points for one domain, in an order in which slow drift of the machine hits all kinds alike.

    One rank: 8 amounts of tokens in samples of 128, from 256 (or less) to the capacity; samples of 512, 2048, 8192, ...
    tokens that fill half of the capacity; single samples that fill all of it, half of the longest, and the longest that
    both attention kernels could get. Groups of k: single samples of 256, 1024, 4096, ... tokens a rank, and an eighth,
    half and all of the capacity in samples of 1024. All sizes: 2 x `MIXED` microbatches as plans of the data have them,
    spread over their numbers of tokens; where plans have fewer, random draws from the data.

    Args:
        lengths: what the data hold; mixed points draw from them, and no single sample is longer than the longest.
        sizes: group sizes to time.
        capacity: tokens per rank.
        padding: the rule that the worker will pad with.
        jobs: the microbatches of plans of the data.
        seed: of the draws and the order.
    """
    random = np.random.default_rng(seed)
    data = np.asarray(lengths, np.int64)
    points: list[Point] = []
    for size in sizes:
        limit = usable_length(size * capacity, size, padding)
        longest = min(int(data.max()), limit)
        points += _one_rank(longest, limit, padding) if size == 1 else _group(size, longest, limit, padding)
        own = sorted({each for k, each in jobs if k == size}, key=lambda each: (sum(each), each))
        mixed = _planned(own, size)
        points += mixed
        drawn = _mixed(random, data[data <= limit], size, limit, padding)
        points += [drawn[index] for index in _spread(len(drawn), 2 * MIXED - len(mixed))]
    unique = list({(point.size, point.lengths): point for point in reversed(points)}.values())[::-1]
    return tuple(unique[index] for index in random.permutation(len(unique)))


def _planned(jobs: Sequence[tuple[int, ...]], size: int) -> list[Point]:
    """Up to 2 x `MIXED` of the microbatches, evenly from the smallest to the largest; every other one is held out."""
    return [
        Point(kind="mixed", size=size, lengths=jobs[index], held_out=number % 2 == 1)
        for number, index in enumerate(_spread(len(jobs), 2 * MIXED))
    ]


def _spread(size: int, count: int) -> list[int]:
    """Up to `count` positions of a list of `size`, evenly from the first to the last."""
    found: list[int] = np.linspace(0, size - 1, min(size, count)).round().astype(int).tolist()
    return found if size else []


def _filled(length: int, tokens: int, size: int, padding: PaddingRule) -> tuple[int, ...]:
    """As many samples of `length` as fit `tokens`, at least one."""
    return (length,) * max(1, tokens // padding.pad(length, size))


def _one_rank(longest: int, limit: int, padding: PaddingRule) -> list[Point]:
    short = min(SHORT, longest)
    amounts = np.geomspace(min(256, max(short, limit // 8)), limit, 8)
    points = [Point(kind="linear", size=1, lengths=_filled(short, int(n), 1, padding)) for n in amounts]
    length = 4 * SHORT
    while length < min(longest, limit // 2):
        points.append(Point(kind="attention", size=1, lengths=_filled(length, limit // 2, 1, padding)))
        length *= 4
    points.append(Point(kind="attention", size=1, lengths=_filled(longest, limit, 1, padding)))
    points.append(Point(kind="attention", size=1, lengths=(max(1, longest // 2),)))
    # One sample with the most work that the kernel for short key ranges gets, whose attention is dear.
    points.append(Point(kind="attention", size=1, lengths=(min(longest, int(0.97 * math.sqrt(2 * LONG_WORK))),)))
    return points


def _group(size: int, longest: int, limit: int, padding: PaddingRule) -> list[Point]:
    points = []
    length = 2 * SHORT * size
    while length < longest:
        points.append(Point(kind="shared", size=size, lengths=(length,)))
        length *= 4
    points.append(Point(kind="shared", size=size, lengths=(longest,)))
    medium = min(1024, longest)
    points += [
        Point(kind="shared", size=size, lengths=_filled(medium, tokens, size, padding))
        for tokens in (limit // 8, limit // 2, limit)
    ]
    return points


def _mixed(
    random: np.random.Generator, data: NDArray[np.int64], size: int, limit: int, padding: PaddingRule
) -> list[Point]:
    points: list[Point] = []
    if not data.size:
        return points
    for number in range(2 * MIXED):
        # Stratified, so that both halves hold nearly empty and nearly full microbatches.
        share = LEAST + (MOST - LEAST) * (number // 2 + float(random.random())) / MIXED
        drawn: list[int] = []
        room = int(share * limit)
        for length in random.permutation(data)[: 4 * limit // SHORT].tolist():
            padded = padding.pad(length, size)
            if padded <= room or (not drawn and padded <= limit):
                drawn.append(length)
                room -= padded
            if room < SHORT:
                break
        if drawn:
            points.append(Point(kind="mixed", size=size, lengths=tuple(drawn), held_out=number % 2 == 1))
    return points
