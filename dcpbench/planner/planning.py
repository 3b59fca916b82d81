"""Plans without GPUs: what each scheduler would make of the same batches, and what the cost model says of it.

A *setting* is a scheduler with its capacity, CP size and smallest group. All settings plan the same batches on the
same ranks and are judged by the same cost model against the same lower bound.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from dcpbench.dcp import schedulers
from dcpbench.dcp.bounds import lower_bound
from dcpbench.dcp.costs import CostModel, Link
from dcpbench.dcp.prediction import Machine, Prediction, Timeline, predict
from dcpbench.dcp.schedulers.laminar_sizes import Menu
from dcpbench.dcp.workload import BatchPlan, Domain, PaddingPolicy, Scheduler
from dcpbench.errors import ScheduleError
from dcpbench.planner.timelimit import OutOfTime, at_most

FIXED = "dp_balanced"
"""The scheduler of fixed CP, over which speed-ups are given."""


_FEW = 64
_COMPILING = 120.0
"""Seconds that compiling may take; interrupted halfway, it would have to be done again."""


@dataclass(frozen=True)
class Setting:
    """What one row of a plan report is about. `capacity` in tokens per rank."""

    scheduler: str
    capacity: int
    cp: int
    """Fixed CP size; of no effect on a dynamic scheduler."""
    min_size: int
    """Smallest group; of no effect on fixed CP."""

    @property
    def fixed(self) -> bool:
        """Whether every microbatch has the same CP size."""
        return self.scheduler == FIXED

    @property
    def label(self) -> str:
        """The scheduler and what matters to it."""
        size = f"CP {self.cp}" if self.fixed else f"min CP {self.min_size}"
        return f"{self.scheduler}, {size}, {self.capacity:,} tokens"


@dataclass(frozen=True)
class Ground:
    """What all settings have in common: ranks, cost model, batches, padding policy."""

    ranks: int
    cost: CostModel
    batches: tuple[tuple[int, ...], ...]
    """Real lengths of each global batch."""
    padding: PaddingPolicy
    iteration_seconds: float = 0.0
    """What an iteration takes beside its microbatches; 0 where it was not measured."""
    menu: Menu = "pow2"
    """Group sizes for the scheduler that has a choice."""


@dataclass(frozen=True)
class Figures:
    """One setting over all batches. Times in milliseconds."""

    setting: Setting
    mean_ms: float
    """Predicted time of an iteration."""
    sd_ms: float | None
    """Its standard deviation over the batches; None for a single batch."""
    over_bound: float
    """Time of the microbatches over the lower bound."""
    speedup: float | None
    """Total time of fixed CP as configured over that of this setting; None where fixed CP cannot serve the batches."""
    speedup_range: tuple[float, float] | None
    """The least and the greatest of a batch."""
    idle_share: float
    """Of ranks times predicted time of the microbatches."""
    padding_share: float
    """Of the tokens in microbatches."""
    microbatches: float
    """Mean over the batches of the largest number on one rank."""
    jobs_by_size: dict[int, int]
    """CP size -> microbatches, all batches together."""
    time_by_size: dict[int, float]
    """CP size -> share of the busy rank-time."""
    peak_tokens: int
    planning_ms: float
    """Mean time to plan one batch, on this machine."""


@dataclass(frozen=True)
class Refusal:
    """A setting that has no figures, and why."""

    setting: Setting
    reason: str


@dataclass(frozen=True)
class Evaluated:
    """One setting's plans of every batch, in the model."""

    setting: Setting
    predictions: tuple[Prediction, ...]
    planning_seconds: float
    first: tuple[BatchPlan, Timeline]
    """Of the first batch, for the picture."""


def machine(
    cost: CostModel, *, node_size: int, bandwidth: tuple[float, float] | None = None, name: str | None = None
) -> CostModel:
    """The cost model on nodes of so many ranks, with other bandwidths (within, between; bytes per second)."""
    within, between = cost.within, cost.between
    if bandwidth is not None:
        within, between = Link(within.latency, bandwidth[0]), Link(between.latency, bandwidth[1])
    return replace(cost, node_size=node_size, within=within, between=between, name=name or cost.name)


def make(setting: Setting, ground: Ground) -> Scheduler:
    """The scheduler of a setting, planning by the ground's cost model if it plans by one.

    Raises:
        SpecError: there is no such scheduler.
        ScheduleError: it cannot serve these ranks, this capacity or this smallest size.
    """
    return schedulers.create(
        setting.scheduler,
        domain=Domain(ground.ranks, setting.cp),
        capacity=setting.capacity,
        min_size=setting.min_size,
        padding_policy=ground.padding,
        cost=ground.cost,
        menu=ground.menu,
    )


def evaluate(setting: Setting, ground: Ground, limit: float) -> Evaluated | Refusal:
    """Plan and predict every batch, in at most `limit` seconds of planning."""
    predictions: list[Prediction] = []
    first: tuple[BatchPlan, Timeline] | None = None
    spent = 0.0
    try:
        scheduler = make(setting, ground)
        _warm(scheduler, ground.batches[0])
        ranks = Machine(ground.ranks, ground.cost)
        for lengths in ground.batches:
            started = time.perf_counter()
            with at_most(limit - spent):
                plan = scheduler.plan(lengths)
            spent += time.perf_counter() - started
            times = ranks.execute(plan, lengths, scheduler.padding)
            predictions.append(predict(plan, lengths, scheduler.padding, times))
            first = first or (plan, times)
    except ScheduleError as error:
        return Refusal(setting, str(error))
    except OutOfTime:
        done = f"{len(predictions)} of {len(ground.batches)} batches"
        return Refusal(setting, f"skipped: it had planned {done} within the time limit of {limit:g} s (--time-limit)")
    assert first is not None
    return Evaluated(setting, tuple(predictions), spent, first)


def _warm(scheduler: Scheduler, lengths: Sequence[int]) -> None:
    """Plan a few samples, so that what a scheduler compiles on its first plan does not count as planning."""
    with suppress(ScheduleError), at_most(_COMPILING):
        scheduler.plan(lengths[:_FEW])


def bounds(ground: Ground, settings: Iterable[Setting]) -> tuple[float, ...]:
    """Seconds that no plan of each batch can beat, at the greatest capacity and with every size that makes sense.

    Those are all sizes within a node, whole nodes, all ranks, and whatever else a setting may use.
    """
    asked = list(settings)
    ranks, node = ground.ranks, ground.cost.node_size
    sizes = {*range(1, min(ranks, node) + 1), *range(node, ranks + 1, node), ranks}
    for setting in asked:
        try:
            sizes.update(make(setting, ground).group_sizes())
        except ScheduleError:
            continue  # its refusal is reported where it is evaluated
    capacity = max(setting.capacity for setting in asked)
    return tuple(lower_bound(batch, ground.ranks, capacity, sorted(sizes), ground.cost) for batch in ground.batches)


def figures(found: Evaluated, ground: Ground, limits: Sequence[float], reference: Evaluated | None) -> Figures:
    """Sums, means and ratios over the batches; `limits` are their lower bounds, `reference` fixed CP as configured."""
    rest = ground.iteration_seconds
    own = [1e3 * (one.makespan + rest) for one in found.predictions]
    makespans = sum(one.makespan for one in found.predictions)
    jobs: dict[int, int] = {}
    busy: dict[int, float] = {}
    for one in found.predictions:
        for size, count in one.jobs_by_size.items():
            jobs[size] = jobs.get(size, 0) + count
            busy[size] = busy.get(size, 0.0) + one.busy_by_size[size]
    all_busy, tokens = sum(busy.values()), sum(one.tokens for one in found.predictions)
    fixed = None if reference is None else [1e3 * (one.makespan + rest) for one in reference.predictions]
    ratios = None if fixed is None else [usual / mine for usual, mine in zip(fixed, own, strict=True)]
    return Figures(
        setting=found.setting,
        mean_ms=statistics.fmean(own),
        sd_ms=statistics.stdev(own) if len(own) > 1 else None,
        over_bound=makespans / sum(limits),
        speedup=None if fixed is None else sum(fixed) / sum(own),
        speedup_range=None if ratios is None else (min(ratios), max(ratios)),
        idle_share=max(0.0, 1.0 - all_busy / sum(one.rank_seconds for one in found.predictions)),
        padding_share=sum(one.padding_tokens for one in found.predictions) / tokens,
        microbatches=statistics.fmean(one.microbatches for one in found.predictions),
        jobs_by_size=dict(sorted(jobs.items())),
        time_by_size={size: seconds / all_busy for size, seconds in sorted(busy.items())},
        peak_tokens=max(one.peak_tokens for one in found.predictions),
        planning_ms=1e3 * found.planning_seconds / len(own),
    )


@dataclass(frozen=True)
class Comparison:
    """All settings that were asked for, on one ground."""

    ground: Ground
    limits: tuple[float, ...]
    """Lower bound of each batch in seconds, without what an iteration takes beside its microbatches."""
    configured: Figures | None
    """Fixed CP as configured; None where it cannot serve the batches."""
    rows: tuple[Figures, ...]
    """In the order asked for."""
    refusals: tuple[Refusal, ...]
    pictured: tuple[Evaluated, ...]
    """Settings whose first batch is kept for the picture."""

    @property
    def bound_ms(self) -> float:
        """Mean lower bound of the batches."""
        return 1e3 * statistics.fmean(self.limits)


def compare(
    settings: Sequence[Setting],
    reference: Setting,
    ground: Ground,
    *,
    limit: float,
    keep: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Evaluate every setting, and the reference whether it is among them or not.

    Args:
        settings: what to compare.
        reference: fixed CP as configured.
        ground: batches, ranks and cost model.
        limit: seconds that each setting may take to plan all batches.
        keep: whether to keep the first batch of every setting for the picture.
        tell: called with what is being done.
    """
    tell("lower bound")
    limits = bounds(ground, [*settings, reference])
    found: dict[Setting, Evaluated | Refusal] = {}
    rows: list[Figures] = []
    pictured: list[Evaluated] = []
    tell(reference.label)
    found[reference] = base = evaluate(reference, ground, limit)
    fixed = base if isinstance(base, Evaluated) else None
    for setting in dict.fromkeys(settings):
        if setting not in found:
            tell(setting.label)
            found[setting] = evaluate(setting, ground, limit)
        one = found[setting]
        if isinstance(one, Evaluated):
            rows.append(figures(one, ground, limits, fixed))
            pictured.extend([one] if keep else [])
            if not keep and setting != reference:
                del found[setting]  # thousands of ranks times many settings would fill the memory
    return Comparison(
        ground=ground,
        limits=limits,
        configured=figures(fixed, ground, limits, fixed) if fixed else None,
        rows=tuple(rows),
        refusals=tuple(one for one in found.values() if isinstance(one, Refusal)),
        pictured=tuple(pictured),
    )
