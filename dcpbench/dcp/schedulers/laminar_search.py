"""The search of `laminar`: which passes to try within a budget of steps, before the best one is polished."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dcpbench.dcp.compilation import Vector, floats, integers, vector
from dcpbench.dcp.schedulers.default_dynamic_cp import sizes_of
from dcpbench.dcp.schedulers.laminar_batch import Batch
from dcpbench.dcp.schedulers.laminar_blocks import FILL_ALL, FILL_EVERY, FILL_NONE, FILL_SINGLE
from dcpbench.dcp.schedulers.laminar_cover import cover
from dcpbench.dcp.schedulers.laminar_dynamic import level_jobs, loads_of_jobs, make_jobs, rule_of
from dcpbench.dcp.schedulers.laminar_exchange import exchange
from dcpbench.dcp.schedulers.laminar_instance import (
    REMEMBERED,
    STEPS,
    STEPS_RANK,
    STEPS_SAMPLE,
    STEPS_SCAN,
    STEPS_SHARED,
    Best,
    Workspace,
    choose,
)
from dcpbench.dcp.schedulers.laminar_packing import PACK_ALL, PACK_NONE, PACK_SINGLE
from dcpbench.dcp.schedulers.laminar_placement import place_all
from dcpbench.dcp.schedulers.laminar_polish import keep, polish, squared

STEP_SECONDS = 7e-9
"""What one step of the search costs about, compiled; only the default budget rests on it."""
SHARE = 0.0035
"""The default budget is about this share of the iteration, or `PASSES` passes, `PASSES_FEW` with few samples per rank,
but for those not more than `PASSES_MOST` steps; never below or above `BUDGETS`."""
PASSES, PASSES_FEW, PASSES_MOST = 22, 26, 1_800_000
BUDGETS = (60_000, 7_000_000)
STEPS_CANDIDATE = 1_000
"""What counts for each candidate, placed or not, beside what `laminar_instance` counts."""
TARGETS = (1.02, 1.05, 1.1, 1.17, 1.27, 1.4, 1.6, 2.0)
"""Multiples of the bound that become target times."""
FEW_PER_RANK = 4
"""With at most so many samples per rank, most of them share ranks, and wide groups matter most."""
POLISHED_SAMPLES = 32
"""Batches of at most so many samples keep a third of their budget for changes to single samples."""
DEAR = 0.3
"""Share of a full microbatch from which on its fixed cost makes packing come before levelling."""
EXCHANGED = 8
"""Exchanges of samples, made with few samples per rank, take this part of the budget, which is added to it."""
CAPACITIES = (1, 2, 4, 8)
"""Divisors of the capacity at which the dynamic-CP rule is tried."""
STEPS_RULE = 40
"""What counts for a sample in the rule, beside the groups that it looks at."""
RULE_LEAST = 400_000
"""Steps that the rule may always take; half the budget if that is more and the search ended far from the bound."""
TINY = 1e-6
"""Within this share of the bound nothing else is tried."""
COVERS, COVER_TARGETS, COVER_PRECISION = 5, (1.04, 1.08, 1.12), 0.005
"""With few samples per rank, targets tried in search of the least for which blocks filled one after the other suffice:
the first multiples of the bound until one does, then halves of the interval left, until that is this share of the
bound."""
COVER_STEPS = 25
"""What the first of them is expected to take, for each sample and each halving of their number."""
COVERED_SHARE, STEPS_BESIDE = 0.04, 100_000
"""If the first of those targets suffices the search ends within this share of the iteration, less what planning takes
beside it."""
BISECTIONS = 4
"""Targets tried in search of the least that rule fit can keep."""
FEW, FINE, COARSE = 4096, 0.003, 0.01
"""The search ends within this share of the bound: FINE up to FEW samples x ranks, else COARSE."""


@dataclass(frozen=True)
class Candidate:
    """One pass to try: sizes for a target, and the rules of `laminar_placement`."""

    menu: str
    """Narrows the scheduler's sizes."""
    target: float
    fit: int = 0
    fill: int = FILL_ALL
    pack: int = PACK_NONE
    """Which samples are packed before they are levelled."""
    floor: int = 0
    """Index of the smallest size."""
    fraction: float = 1.0
    """Of the target, what a sample alone may take."""


class Search:
    """The best plan so far, in `best`, and the steps left."""

    def __init__(self, batch: Batch, menus: Mapping[str, tuple[int, ...]], budget: int | None) -> None:
        """`menus` are the scheduler's own and what of narrower ones lies within it."""
        samples, sizes = len(batch.lengths), len(batch.sizes)
        self.batch, self.instance, self.menus = batch, batch.instance, menus
        self.bound = batch.bound()
        self.enough = (1 + (FINE if samples * batch.ranks <= FEW else COARSE)) * self.bound
        self.budget = self.default_budget() if budget is None else budget
        self.space = _workspace(samples, batch.ranks, sizes)
        self.best = _best(samples, batch.ranks, sizes)
        self._cover: Best | None = None
        self.time = float("inf")
        """Seconds of the best plan; infinite before the first."""
        self._covered = float("inf")
        """The same of plans that fill one block after the other, the best of which is kept in `_cover`."""
        self._spread = 0.0
        self._candidate: Candidate | None = None
        self.allowed: dict[str, Vector] = {}
        self._tried: dict[tuple[object, ...], float] = {}
        """Seconds of what was tried."""
        self._last = self.budget
        """Steps at which the portfolio ends."""
        self._pass = 0
        """Steps of the last pass."""
        for menu, own in menus.items():
            among = set(own)
            self.allowed[menu] = vector(np.array([k in among for k in batch.sizes], np.int64))

    def default_budget(self) -> int:
        """About 1 % of the iteration, but enough for some passes."""
        low, high = BUDGETS
        ranks, samples = self.batch.ranks, len(self.batch.lengths)
        steps = STEPS_RANK * ranks + (STEPS_SAMPLE + (STEPS_SHARED if self._few else 0)) * samples
        passes = min((PASSES_FEW if self._few else PASSES) * steps, PASSES_MOST)
        return min(max(round(SHARE * self.bound / STEP_SECONDS), passes, low), high)

    def run(self) -> None:
        """Try candidates, then improve the best; afterwards `best` and `time` are the result."""
        polished = self._polished
        self._last = self.budget - self.budget // 3 if polished else self.budget
        for _ in self._portfolio():
            if self._spent + self._pass > self._last or self._least <= self.enough:
                break
        assert self._candidate is not None
        left = self.budget - self._spent
        if polished and left > 0 and self._least > self.enough:
            best = self._candidate
            self.time = polish(
                self.instance, self.space, self.best, best.fit, best.fill, best.pack, best.target, self.enough, left
            )
        if self._cover is not None and self._covered < self.time:
            self.best, self.time = self._cover, self._covered
        if self.time > (1 + TINY) * self.bound:
            self._by_the_rule()
        level = self.time == self._covered and self._suffices  # all blocks are about as full as can be
        if self._few and not level and self.time > self.enough:
            steps = self.budget // EXCHANGED
            self.time = exchange(self.instance, self.space, self.best, self.enough, steps)

    def _by_the_rule(self) -> None:
        """Try what `default_dynamic_cp` would run, at as many capacities as take no more steps than are allowed.

        Its groups may be used where they are: all of the menu, and of the smallest size that the rule accepts.
        """
        batch, ranks = self.batch, self.batch.ranks
        smallest, node, samples = batch.sizes[0], batch.cost.node_size, len(batch.lengths)
        sizes = sizes_of(ranks, smallest)
        power = smallest & (smallest - 1) == 0 and ranks % smallest == 0
        if not set(sizes) <= set(batch.sizes) or not (power or smallest == ranks):
            return
        allowed = RULE_LEAST if self.time <= self.enough else max(RULE_LEAST, self.budget // 2)
        aligned = ranks <= node or node & (node - 1) == 0
        classes = vector(np.array([batch.sizes.index(k) for k in sizes], np.int64))
        for divisor in CAPACITIES[: allowed // (samples * (min(ranks, samples) + STEPS_RULE))]:
            capacity = batch.capacity // divisor
            found = batch.padded_order(sizes, capacity)
            if found is None:
                break
            order, needs = map(vector, found)
            make_jobs(self.instance, self.space, rule_of(order, needs, classes, ranks), capacity)
            if aligned:
                self._keep_shorter(loads_of_jobs(self.instance, self.space))
            self._keep_shorter(level_jobs(self.instance, self.space))

    def _keep_shorter(self, time: float) -> None:
        if time < self.time:
            self.time = time
            keep(self.space, self.best)

    @property
    def _polished(self) -> bool:
        """Whether a part of the budget is kept for changes to single samples."""
        return len(self.batch.lengths) <= POLISHED_SAMPLES and len(self.batch.sizes) > 1

    @property
    def _suffices(self) -> bool:
        """Whether blocks filled one after the other keep the first target."""
        return self._covered <= COVER_TARGETS[0] * self.bound

    @property
    def _least(self) -> float:
        return min(self.time, self._covered)

    @property
    def _spent(self) -> int:
        return int(self.space.counts[STEPS])

    def _attempt(self, candidate: Candidate) -> float:
        """Choose sizes and place; seconds of that plan.

        What was tried before is not repeated, and what would scan more blocks than the budget allows is infinite.
        """
        instance, space, c = self.instance, self.space, candidate
        began = self._spent
        space.counts[STEPS] += STEPS_CANDIDATE
        choose(instance, space, self.allowed[c.menu], c.floor, c.fraction, c.target)
        # The target matters to the placement only through rules that look at it, and only with shared groups.
        single = self.batch.sizes[0] == 1
        shared = int(space.ends[1]) if single else len(self.batch.lengths)
        looks = shared and (c.fit or c.fill != FILL_NONE)
        key = (tuple(space.ends), c.pack, (c.fit, c.fill) if shared else None, c.target if looks else None)
        if key in self._tried:
            return self._tried[key]
        if c.fit and self._spent + STEPS_SCAN * shared * instance.ranks // 2 > self._last:
            return float("inf")
        time = self._tried[key] = place_all(instance, space, c.fit, c.fill, c.pack, c.target)
        self._pass = self._spent - began
        if time <= self.time:
            spread = squared(space.load)
            if time < self.time or spread < self._spread:
                self.time, self._spread, self._candidate = time, spread, candidate
                keep(space, self.best)
        return time

    def _portfolio(self) -> Iterator[None]:
        """Try one candidate after the other; what comes later depends on the best time so far."""
        first, own = self._first, next(iter(self.menus))
        smallest = Candidate(first, self.bound)
        self._attempt(smallest)
        yield
        if self._few:  # with about as many samples as ranks, how full each gets and wide groups matter most
            self._cover_blocks()
            yield
        if self._dear:
            yield from self._few_microbatches()
        if self._few:
            yield from self._floors(smallest)
        for candidate in self._others(self.bound):
            self._attempt(candidate)
            yield
        if not self._few:
            yield from self._floors(smallest)
        assert self._candidate is not None
        for floor in range(self._candidate.floor, -1, -1):
            for menu in dict.fromkeys((first, own)):
                if self.batch.sizes[floor] in self.menus[first]:
                    yield from self._bisected(Candidate(menu, self.bound, fit=1, floor=floor))
        for candidate in self._packed(self.bound):
            self._attempt(candidate)
            yield
        for multiple in TARGETS:
            if multiple * self.bound < self.time:
                for candidate in (
                    replace(smallest, target=multiple * self.bound),
                    *self._others(multiple * self.bound),
                ):
                    self._attempt(candidate)
                    yield
        yield from self._variants()
        best = self.time
        for number in range(11):
            target = self.bound + (best - self.bound) * (number + 0.5) / 11
            for menu in self.menus:
                for fit in (0, 1):
                    self._attempt(Candidate(menu, target, fit))
                    yield

    def _few_microbatches(self) -> Iterator[None]:
        """Samples of every size packed, for several smallest sizes, and topped up as far as the best plan's time."""
        packed = Candidate(self._first, self.bound, fill=FILL_EVERY, pack=PACK_ALL)
        for menu in self.menus:
            self._attempt(replace(packed, menu=menu))
            yield
        yield from self._floors(packed)
        assert self._candidate is not None
        for menu in self.menus:
            for floor in sorted({0, self._candidate.floor}):
                self._attempt(replace(packed, menu=menu, target=self.time, floor=floor))
                yield

    def _floors(self, candidate: Candidate) -> Iterator[None]:
        """Impose ever larger smallest sizes than the best plan has, until two in a row do not help, and the largest."""
        sizes, worse, samples = self.menus[self._first], 0, len(self.batch.lengths)
        used = max(j for j in range(len(self.batch.sizes)) if self.best.ends[j] == samples)
        for floor, k in enumerate(self.batch.sizes):
            if floor > used and k in sizes and (worse < 2 or k == sizes[-1]):
                best = self.time
                worse = worse + 1 if self._attempt(replace(candidate, floor=floor)) >= best else 0
                yield

    def _cover_blocks(self) -> None:
        """Search the least target for which ranks suffice if blocks are filled one after the other: `laminar_cover`.

        What this takes is added to the budget; but if the first target suffices planning takes at most about
        `COVERED_SHARE` of the iteration, unless single samples are changed.
        """
        low, high, aligned = self.bound, float("inf"), next(iter(self.menus)) == "pow2"
        samples, began = len(self.batch.lengths), self._spent
        steps = COVER_STEPS * samples * samples.bit_length()
        for number in range(COVERS):
            if high < float("inf"):
                target = (low + high) / 2
            elif number < len(COVER_TARGETS):
                target = COVER_TARGETS[number] * self.bound
            else:
                break
            if target >= self.time or high - low < COVER_PRECISION * self.bound or self._spent + steps > self._last:
                break
            before = self._spent
            time = cover(self.instance, self.space, target, aligned)
            steps = self._spent - before
            if time < self._covered:
                self._covered = time
                if self._cover is None:
                    self._cover = _best(samples, self.batch.ranks, len(self.batch.sizes))
                keep(self.space, self._cover)
            if time <= target:
                high = time
            else:
                low = target
        spent = self._spent - began
        self.budget += spent
        self._last += spent
        if self._suffices and not self._polished:
            self._last = min(self._last, round(COVERED_SHARE * self.bound / STEP_SECONDS) - STEPS_BESIDE)

    def _bisected(self, candidate: Candidate) -> Iterator[None]:
        """Halve the interval in which the least target lies that rule fit can keep."""
        low, high = self.bound, self.time
        for _ in range(BISECTIONS):
            target = (low + high) / 2
            time = self._attempt(replace(candidate, target=target))
            yield
            if time <= target:
                high = time
            else:
                low = target

    def _others(self, target: float) -> list[Candidate]:
        """Further menus and rules for a target."""
        others = [Candidate(menu, target) for menu in self.menus if menu != self._first]
        others.insert(1, Candidate(self._first, target, fill=FILL_NONE))
        others.append(Candidate(self._first, target, fill=FILL_EVERY))
        return self._packed(target) + others if self._dear else others

    def _packed(self, target: float) -> list[Candidate]:
        """Samples of one rank packed before they are levelled."""
        return [
            Candidate(menu, target, pack=PACK_SINGLE) for menu in dict.fromkeys((self._first, next(iter(self.menus))))
        ]

    def _variants(self) -> Iterator[None]:
        for multiple in (1.02, 1.1, 1.27):
            target = multiple * self.bound
            for menu in self.menus:
                for candidate in (
                    Candidate(menu, target, fit=1),
                    Candidate(menu, target, fill=FILL_SINGLE),
                    Candidate(menu, target, fill=FILL_NONE),
                    Candidate(menu, target, fit=1, fill=FILL_NONE),
                    Candidate(menu, target, fraction=0.7),
                ):
                    self._attempt(candidate)
                    yield

    @property
    def _few(self) -> bool:
        """Whether most samples share ranks."""
        return len(self.batch.lengths) <= FEW_PER_RANK * self.batch.ranks

    @property
    def _dear(self) -> bool:
        """Whether what a microbatch costs whatever is in it weighs more than how even the ranks are."""
        cost = self.batch.cost
        fixed = max(cost.base, cost.floor)
        return fixed > DEAR * (cost.base + cost.token * self.batch.capacity)

    @property
    def _first(self) -> str:
        return "pow2" if "pow2" in self.menus else next(iter(self.menus))


def _best(samples: int, ranks: int, sizes: int) -> Best:
    return Best(
        jobs=integers(1),
        ends=integers(sizes + 1),
        job_of=integers(samples),
        job_first=integers(samples),
        job_class=integers(samples),
        load=floats(ranks),
    )


def _workspace(samples: int, ranks: int, sizes: int) -> Workspace:
    return Workspace(
        counts=integers(4),
        ends=integers(sizes + 1),
        links=integers(samples + 1),
        job_of=integers(samples),
        job_first=integers(samples),
        job_class=integers(samples),
        job_tokens=integers(samples),
        job_squares=floats(samples),
        job_times=floats(samples),
        job_most=floats(samples),
        first=integers(ranks),
        width=integers(ranks),
        open=integers(ranks),
        load=floats(ranks),
        before=floats(ranks),
        heap=integers(ranks),
        keys=floats(ranks),
        remembered=integers(ranks),
        room=integers(ranks * REMEMBERED),
        number=integers(ranks * REMEMBERED),
        tree=integers(4 * samples),
    )
