"""How long planning a batch takes, how long its plans would run for by the cost model, and whether they are valid.

`--table times`: planning time beside the figures of Megatron-LM's own planner. Lengths: lognormal with mean 1024
and sigma 1.5, clipped to 128..8192; capacity 2048; baseline CP 4. The reference figures are single-core pure
Python on another machine, for the same rule (N 512: with minimal padding).

`--table makespans`: predicted makespan over the lower bound for five families of lengths, with the assumed
coefficients of a 1B model on nodes of 8 H200: `laminar` with all sizes and with powers of two, and `default_dynamic_cp`
as configured and at the best of C, C/2, C/4, C/8; planning times in ms. Nothing in it is measured on a GPU. The bound
is that of all sizes; `p2/own` is the plan with powers of two over what their own bound says can be reached with them.

`--table random`: 10,000 random instances with any number of ranks from 1 to 128 and little memory; every plan is
checked for all invariants, planned twice, simulated, and compared with `default_dynamic_cp` as configured and at the
best of C, C/2, C/4, C/8.

Times are of the processor, so that other work on the machine disturbs them little; the first plan, which loads or
compiles, does not count. NUMBA_DISABLE_JIT=1 shows what planning takes without numba.

    python benchmarks/scheduling.py [--table times|makespans|random] [--padding minimal|megatron] [--ranks 64]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from dataclasses import replace

from dcpbench.dcp.bounds import lower_bound
from dcpbench.dcp.compilation import COMPILED
from dcpbench.dcp.costs import H200_1B
from dcpbench.dcp.schedulers import create
from dcpbench.dcp.schedulers.default_dynamic_cp import DefaultDynamicCp
from dcpbench.dcp.schedulers.laminar import Laminar
from dcpbench.dcp.schedulers.laminar_sizes import MENUS, Menu, menu_sizes
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
         (512, 4096), (512, 32768), (4096, 4096), (4096, 65536)]  # fmt: skip
"""Ranks and samples."""

BOUNDED: tuple[Menu, ...] = ("any", "pow2")
Row = tuple[int, int, float, float, float, float, float]
"""Ranks and samples of a cell; over the bound `any` and `pow2`, `pow2` over its own, the rule, and the rule swept."""


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
    scheduler.plan(lengths)
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        scheduler.plan(lengths)
        times.append(time.thread_time() - start)
    return min(times)


def makespan(scheduler: Scheduler, lengths: list[int], repeats: int = 1) -> tuple[float, float]:
    """Predicted seconds of the plan, and seconds that planning took: the least of `repeats`."""
    took = math.inf
    for _ in range(repeats):
        start = time.thread_time()
        plan = scheduler.plan(lengths)
        took = min(took, time.thread_time() - start)
    return simulate(plan, lengths, scheduler.padding, H200_1B).makespan, took


def swept(domain: Domain, lengths: list[int], capacity: int) -> float:
    """The dynamic rule at the best of C/2, C/4, C/8; infinite where the longest sample fits none."""
    found = [math.inf]
    for divisor in (2, 4, 8):
        try:
            found.append(makespan(DefaultDynamicCp(domain, capacity // divisor), lengths)[0])
        except ScheduleError:  # the longest sample no longer fits
            break
    return min(found)


def planning_times(padding: str, repeats: int) -> None:
    names = ("dp_balanced", "default_dynamic_cp", "laminar")
    loops = "compiled" if COMPILED else "plain Python"
    print(f"padding {padding}, capacity {CAPACITY}, fastest of {repeats}, loops of laminar: {loops}")
    print(f"{'N':>6}{'samples':>9}" + "".join(f"{name + ' ms':>23}" for name in names) + f"{'reference ms':>14}")
    for ranks, samples, reference in CASES:
        lengths = draw_lengths(samples)
        print(f"{ranks:>6}{samples:>9}", end="")
        for name in names:
            made = create(name, domain=Domain(ranks, 4), capacity=CAPACITY, padding_policy=padding)  # type: ignore[arg-type]
            print(f"{seconds(made, lengths, repeats) * 1e3:>23.2f}", end="", flush=True)
        print(f"{reference * 1e3:>14.0f}" if reference else f"{'-':>14}")


def makespans(only: int | None) -> None:
    columns = ("bound ms", "any", "pow2", "p2/own", "dynamic", "swept", "any ms", "pow2 ms", "dynamic ms")
    print(f"{'lengths':<8}{'N':>6}{'S':>7}" + "".join(f"{name:>11}" for name in columns))
    Laminar(Domain(8, 1), CAPACITY).plan(draw_lengths(64))  # loads or compiles
    rows: list[Row] = []
    for family, usual in FAMILIES.items():
        for ranks, samples in CELLS:
            if only is not None and ranks != only:
                continue
            lengths = draw_lengths(samples, family)
            capacity = usual
            while max(lengths) > ranks * capacity:
                capacity *= 2
            domain = Domain(ranks, 1)
            bound, own = (
                lower_bound(lengths, ranks, capacity, menu_sizes(menu, ranks, H200_1B.node_size), H200_1B)
                for menu in BOUNDED
            )
            own = max(bound, own)  # what holds for all sizes holds for powers of two
            every, every_took = makespan(Laminar(domain, capacity, menu="any"), lengths, 3)
            powers, powers_took = makespan(Laminar(domain, capacity), lengths, 3)
            dynamic, dynamic_took = makespan(DefaultDynamicCp(domain, capacity), lengths)
            best = min(dynamic, swept(domain, lengths, capacity))
            rows.append((ranks, samples, every / bound, powers / bound, powers / own, dynamic / bound, best / bound))
            print(f"{family:<8}{ranks:>6}{samples:>7}{bound * 1e3:>11.0f}", end="")
            print("".join(f"{value:>11.3f}" for value in rows[-1][2:]), end="")
            print("".join(f"{took * 1e3:>11.2f}" for took in (every_took, powers_took, dynamic_took)), flush=True)
    if rows:
        summary(rows)


def random_instances(count: int) -> None:
    """Plan and check; prints how many plans there were of each kind and the first instances that failed."""
    rng = random.Random(0)
    failed: list[str] = []
    planned = dict.fromkeys(MENUS, 0)
    worse: list[float] = []
    worse_swept: list[float] = []
    for number in range(count):
        ranks = rng.randint(1, 128)
        menu: Menu = MENUS[number % len(MENUS)]
        node = rng.choice([8, 8, 4, 1]) if menu == "pow2" else rng.choice([8, 8, 6, 4, 1])
        floor, floor_shared = rng.choice([(0.0, 0.0), (0.01, 0.01), (0.01, 0.02)])
        cost = replace(H200_1B, node_size=node, floor=floor, floor_shared=floor_shared)
        lengths = random_lengths(rng, rng.randint(1, 4 * ranks + 40))
        needed = max(lengths) + 2 * ranks  # with padding for the whole domain
        capacity = max(2, math.ceil(needed / ranks * rng.uniform(1.0, 3.3)))
        made = Laminar(Domain(ranks, 1), capacity, menu=menu, cost=cost)
        try:
            plan = made.plan(lengths)  # which checks all invariants and the predicted time
            done = simulate(plan, lengths, made.padding, cost)
            if done.waited > 1e-9 * done.makespan:
                raise ScheduleError("a rank waits")
            if made.plan(list(lengths)) != plan:
                raise ScheduleError("two plans of one batch")
            bound = lower_bound(lengths, ranks, capacity, made.group_sizes(), cost)
            if done.makespan < bound * (1 - 1e-9):
                raise ScheduleError(f"shorter than the bound, {done.makespan} < {bound}")
        except ScheduleError as error:
            failed.append(f"instance {number}: N {ranks}, S {len(lengths)}, C {capacity}, {menu}: {error}")
            continue
        planned[menu] += 1
        if node & (node - 1):
            continue  # groups of powers of two cross such nodes, which the cost model does not know of
        found: list[float] = []
        for divisor in (1, 2, 4, 8):
            try:
                other = DefaultDynamicCp(Domain(ranks, 1), capacity // divisor).plan(lengths)
            except ScheduleError:  # the rule cannot serve every such instance
                break
            found.append(done.makespan / simulate(other, lengths, made.padding, cost).makespan)
        worse.extend(found[:1])
        worse_swept.extend([max(found)] if found else [])
    print(f"{sum(planned.values())} of {count} planned and valid: {planned}; {len(failed)} failed")
    for name, ratios in (("default_dynamic_cp", worse), ("the same at its best capacity", worse_swept)):
        print(
            f"over {name} in the {len(ratios)} that it can plan: median {statistics.median(ratios):.3f}, "
            f"greatest {max(ratios):.6f}, above 1.01 in {sum(ratio > 1.01 for ratio in ratios)}, "
            f"above 1.000001 in {sum(ratio > 1.000001 for ratio in ratios)}"
        )
    for line in failed[:20]:
        print(line)


def random_lengths(rng: random.Random, samples: int) -> list[int]:
    kind = rng.randrange(4)
    longest = rng.choice([9, 300, 4096, 131072])
    if kind == 0:
        return [rng.randint(1, longest) for _ in range(samples)]
    if kind == 1:
        return [clipped(rng.lognormvariate(math.log(longest) - 3, 1.5), 1, longest) for _ in range(samples)]
    if kind == 2:
        return [rng.randint(1, longest)] * samples
    return [longest, *(rng.randint(1, min(9, longest)) for _ in range(samples - 1))]


def summary(rows: list[Row]) -> None:
    for column, name in ((2, "any"), (3, "pow2"), (4, "pow2, its own bound")):
        many = [row[column] for row in rows if row[1] >= 8 * row[0]]
        few = [row[column] for row in rows if row[1] < 8 * row[0]]
        print(
            f"{name}: over the bound, S >= 8N: greatest {max(many):.3f}, median {statistics.median(many):.3f};", end=" "
        )
        print(f"S < 8N: greatest {max(few):.3f}, median {statistics.median(few):.3f}" if few else "")
        if column == 4:
            continue
        for other, opponent in ((5, "default_dynamic_cp"), (6, "the same at its best capacity")):
            ratios = [row[other] / row[column] for row in rows if not math.isnan(row[other])]
            print(
                f"  {opponent} over {name}: least {min(ratios):.3f}, geometric mean {geometric(ratios):.3f}", end="; "
            )
            print(f"below 0.99 in {sum(ratio < 0.99 for ratio in ratios)} of {len(ratios)} cells")


def geometric(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Planning time and predicted makespan of each scheduler, one core.")
    parser.add_argument("--table", choices=["times", "makespans", "random"], default="times")
    parser.add_argument("--padding", choices=["minimal", "megatron"], default="minimal", help="for --table times")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest of so many plans counts")
    parser.add_argument("--ranks", type=int, help="only cells with so many ranks, for --table makespans")
    parser.add_argument("--instances", type=int, default=10_000, help="for --table random")
    options = parser.parse_args()
    if options.table == "times":
        planning_times(options.padding, options.repeats)
    elif options.table == "makespans":
        makespans(options.ranks)
    else:
        random_instances(options.instances)


if __name__ == "__main__":
    main()
