"""How long planning one global batch takes, and how long the plans would run for, by the cost model.

`--table times`: planning time beside the figures of Megatron-LM's own planner. Lengths: lognormal with mean 1024
and sigma 1.5, clipped to 128..8192; capacity 2048; baseline CP 4. The reference figures are single-core pure
Python on another machine, for the same rule (N 512: with minimal padding).

`--table makespans`: predicted makespan over the lower bound for five families of lengths, with the assumed
coefficients of a 1B model on nodes of 8 H200: `laminar` with all sizes and with powers of two, and `default_dynamic_cp`
as configured and at the best of C, C/2, C/4, C/8; planning times in ms, one plan
each. Nothing in it is measured on a GPU.

    python benchmarks/scheduling.py [--table times|makespans] [--padding minimal|megatron] [--repeats 5] [--ranks 64]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time

from dcpbench.dcp.costs import H200_1B, lower_bound
from dcpbench.dcp.schedulers import create
from dcpbench.dcp.schedulers.default_dynamic_cp import DefaultDynamicCp
from dcpbench.dcp.schedulers.laminar import Laminar
from dcpbench.dcp.schedulers.laminar_sizes import menu_sizes
from dcpbench.dcp.simulation import simulate
from dcpbench.dcp.workload import Domain, Scheduler
from dcpbench.errors import ScheduleError

CAPACITY = 2048
CASES: list[tuple[int, int, float | None]] = [
    (8, 64, None),
    (8, 2048, 0.8),
    (64, 4096, 3.1),
    (256, 4096, 9.2),
    (512, 4096, 29.6),
    (4096, 65536, None),
]
"""Ranks, samples, seconds the reference's planner takes."""
FAMILIES = {"mock": 2048, "reason": 16384, "code": 16384, "uniform": 8192, "giant": 16384}
"""Family of lengths, and tokens per rank; more where the longest sample would not fit all ranks."""
CELLS = [(2, 16), (2, 256), (8, 16), (8, 64), (8, 512), (8, 4096), (64, 64), (64, 512), (64, 4096), (512, 512),
         (512, 4096), (4096, 4096), (4096, 65536)]  # fmt: skip
"""Ranks and samples."""


def draw_lengths(samples: int, family: str = "mock") -> list[int]:
    rng = random.Random(0)

    def one() -> int:
        if family == "mock":
            return clipped(rng.lognormvariate(math.log(1024) - 1.5**2 / 2, 1.5), 128, 8192)
        if family == "reason":  # reasoning traces: two modes
            mode = (math.log(6000), 0.8) if rng.random() < 0.7 else (math.log(24000), 0.7)
            return clipped(rng.lognormvariate(*mode), 256, 131072)
        if family == "code":  # a body and a heavy tail
            tail = rng.random() < 0.03
            return clipped(
                8000 * rng.paretovariate(1.0) if tail else rng.lognormvariate(math.log(940), 1.0), 64, 131072
            )
        return rng.randint(128, 16384 if family == "uniform" else 2048)

    lengths = [one() for _ in range(samples)]
    if family == "giant":
        lengths[0] = 131072
    return lengths


def clipped(value: float, least: int, most: int) -> int:
    return min(max(int(value), least), most)


def seconds(scheduler: Scheduler, lengths: list[int], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        scheduler.plan(lengths)
        times.append(time.perf_counter() - start)
    return min(times)


def makespan(scheduler: Scheduler, lengths: list[int]) -> tuple[float, float]:
    """Predicted seconds of the plan, and seconds that planning took."""
    start = time.perf_counter()
    plan = scheduler.plan(lengths)
    took = time.perf_counter() - start
    return simulate(plan, lengths, scheduler.padding, H200_1B).makespan, took


def swept(domain: Domain, lengths: list[int], capacity: int) -> float:
    """The dynamic rule at the best of four capacities."""
    found = []
    for divisor in (1, 2, 4, 8):
        try:
            found.append(makespan(DefaultDynamicCp(domain, capacity // divisor), lengths)[0])
        except ScheduleError:  # the longest sample no longer fits
            break
    return min(found)


def planning_times(padding: str, repeats: int) -> None:
    names = ("dp_balanced", "default_dynamic_cp", "laminar")
    print(f"padding {padding}, capacity {CAPACITY}, fastest of {repeats}")
    print(f"{'N':>6}{'samples':>9}" + "".join(f"{name + ' ms':>23}" for name in names) + f"{'reference ms':>14}")
    for ranks, samples, reference in CASES:
        lengths = draw_lengths(samples)
        print(f"{ranks:>6}{samples:>9}", end="")
        for name in names:
            made = create(name, domain=Domain(ranks, 4), capacity=CAPACITY, padding_policy=padding)  # type: ignore[arg-type]
            print(f"{seconds(made, lengths, repeats) * 1e3:>23.2f}", end="", flush=True)
        print(f"{reference * 1e3:>14.0f}" if reference else f"{'-':>14}")


def makespans(only: int | None) -> None:
    columns = ("bound ms", "any", "pow2", "dynamic", "swept", "any ms", "pow2 ms", "dynamic ms")
    print(f"{'lengths':<8}{'N':>6}{'S':>7}" + "".join(f"{name:>11}" for name in columns))
    rows: list[tuple[int, int, float, float, float, float]] = []
    for family, usual in FAMILIES.items():
        for ranks, samples in CELLS:
            if only is not None and ranks != only:
                continue
            lengths = draw_lengths(samples, family)
            capacity = usual
            while max(lengths) > ranks * capacity:
                capacity *= 2
            domain = Domain(ranks, 1)
            bound = lower_bound(lengths, ranks, capacity, menu_sizes("any", ranks, H200_1B.node_size), H200_1B)
            every, every_took = makespan(Laminar(domain, capacity, menu="any"), lengths)
            powers, powers_took = makespan(Laminar(domain, capacity), lengths)
            dynamic, dynamic_took = makespan(DefaultDynamicCp(domain, capacity), lengths)
            best = swept(domain, lengths, capacity) if samples <= 4096 else math.nan
            rows.append((ranks, samples, every / bound, powers / bound, dynamic / bound, best / bound))
            print(f"{family:<8}{ranks:>6}{samples:>7}{bound * 1e3:>11.0f}", end="")
            print("".join(f"{value:>11.3f}" for value in rows[-1][2:]), end="")
            print("".join(f"{took * 1e3:>11.1f}" for took in (every_took, powers_took, dynamic_took)), flush=True)
    if rows:
        summary(rows)


def summary(rows: list[tuple[int, int, float, float, float, float]]) -> None:
    for column, name in ((2, "any"), (3, "pow2")):
        many = [row[column] for row in rows if row[1] >= 8 * row[0]]
        few = [row[column] for row in rows if row[1] < 8 * row[0]]
        print(
            f"{name}: over the bound, S >= 8N: greatest {max(many):.3f}, median {statistics.median(many):.3f};", end=" "
        )
        print(f"S < 8N: greatest {max(few):.3f}, median {statistics.median(few):.3f}" if few else "")
        for other, opponent in ((4, "default_dynamic_cp"), (5, "the same at its best capacity")):
            ratios = [row[other] / row[column] for row in rows if not math.isnan(row[other])]
            print(
                f"  {opponent} over {name}: least {min(ratios):.3f}, geometric mean {geometric(ratios):.3f}", end="; "
            )
            print(f"below 0.99 in {sum(ratio < 0.99 for ratio in ratios)} of {len(ratios)} cells")


def geometric(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Planning time and predicted makespan of each scheduler, one core.")
    parser.add_argument("--table", choices=["times", "makespans"], default="times")
    parser.add_argument("--padding", choices=["minimal", "megatron"], default="minimal", help="for --table times")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest of so many plans counts")
    parser.add_argument("--ranks", type=int, help="only cells with so many ranks, for --table makespans")
    options = parser.parse_args()
    if options.table == "times":
        planning_times(options.padding, options.repeats)
    else:
        makespans(options.ranks)


if __name__ == "__main__":
    main()
