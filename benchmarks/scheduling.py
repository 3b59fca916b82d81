"""How long planning one global batch takes, beside the figures of Megatron-LM's own planner.

Lengths: lognormal with mean 1024 and sigma 1.5, clipped to 128..8192; capacity 2048; baseline CP 4. The
reference figures are single-core pure Python on another machine, for the same rule (N 512: with minimal padding).

    python benchmarks/scheduling.py [--padding minimal|megatron] [--repeats 5]
"""

from __future__ import annotations

import argparse
import math
import random
import time

from dcpbench.dcp.schedulers import create
from dcpbench.dcp.workload import Domain, Scheduler

CAPACITY = 2048
CASES: list[tuple[int, int, float | None]] = [
    (8, 2048, 0.8),
    (64, 4096, 3.1),
    (256, 4096, 9.2),
    (512, 4096, 29.6),
    (4096, 65536, None),
]
"""Ranks, samples, seconds the reference's planner takes."""


def draw_lengths(samples: int) -> list[int]:
    rng = random.Random(0)
    mu = math.log(1024) - 1.5**2 / 2
    return [min(max(int(rng.lognormvariate(mu, 1.5)), 128), 8192) for _ in range(samples)]


def seconds(scheduler: Scheduler, lengths: list[int], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        scheduler.plan(lengths)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Planning time of each scheduler, one core.")
    parser.add_argument("--padding", choices=["minimal", "megatron"], default="minimal")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest of so many plans counts")
    options = parser.parse_args()
    print(f"padding {options.padding}, capacity {CAPACITY}, fastest of {options.repeats}")
    print(f"{'N':>6}{'samples':>9}{'dp_balanced ms':>16}{'default_dynamic_cp ms':>23}{'reference ms':>14}{'ratio':>8}")
    for ranks, samples, reference in CASES:
        lengths = draw_lengths(samples)
        baseline, dynamic = (
            seconds(
                create(name, domain=Domain(ranks, 4), capacity=CAPACITY, padding_policy=options.padding),
                lengths,
                options.repeats,
            )
            for name in ("dp_balanced", "default_dynamic_cp")
        )
        compared = f"{reference * 1e3:>14.0f}{reference / dynamic:>7.0f}x" if reference else f"{'-':>14}{'-':>8}"
        print(f"{ranks:>6}{samples:>9}{baseline * 1e3:>16.2f}{dynamic * 1e3:>23.2f}{compared}")


if __name__ == "__main__":
    main()
