"""The search of `laminar`: which passes to try within a budget of steps, and small changes to the best one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dcpbench.dcp.schedulers.laminar_placement import SCANNED, Placement, Rules, steps_of
from dcpbench.dcp.schedulers.laminar_sizes import Batch, Menu

STEP_SECONDS = 50e-9
"""What one step of the search costs about, in Python; only the default budget rests on it."""
SHARE = 0.01
"""The default budget is about this share of the iteration, or `PASSES` passes, but never below or above `BUDGETS`."""
PASSES = 12
BUDGETS = (800_000, 10_000_000)
TARGETS = (1.0, 1.02, 1.05, 1.1, 1.17, 1.27, 1.4, 1.6, 2.0)
"""Multiples of the bound that become target times."""
POLISHED_SAMPLES = 256
"""Batches of at most so many samples keep half of their budget for changes to single samples."""
FEW, FINE, COARSE = 4096, 0.003, 0.01
"""The search ends within this share of the bound: FINE up to FEW samples x ranks, else COARSE."""

LOAD, FIT = Rules(), Rules(fit=True)


@dataclass(frozen=True)
class Candidate:
    """One pass to try. `menu` narrows the scheduler's sizes."""

    menu: Menu
    rules: Rules
    fraction: float
    floor: int
    target: float


@dataclass
class Search:
    """The best placement so far and the steps left."""

    batch: Batch
    ranks: int
    menus: Mapping[Menu, tuple[int, ...]]
    """The scheduler's own menu and what of narrower ones lies within it."""
    budget: int
    good_enough: float
    best: Placement | None = None
    sizes: list[int] = field(default_factory=list)
    candidate: Candidate | None = None
    tried: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def time(self) -> float:
        """Seconds of the best placement; infinite before the first."""
        return self.best.makespan if self.best is not None else float("inf")

    @property
    def over(self) -> bool:
        """Whether there is a plan, and no reason or no budget to look further."""
        return self.best is not None and (self.budget <= 0 or self.time <= self.good_enough)

    def place(self, sizes: list[int], candidate: Candidate) -> None:
        """Place with these sizes and keep the result if it is better."""
        placement = Placement(self.batch, self.ranks, sizes, candidate.rules, candidate.target)
        self.budget -= placement.steps
        if self.best is None or placement.rating < self.best.rating:
            self.best, self.sizes, self.candidate = placement, sizes, candidate

    def attempt(self, candidate: Candidate) -> None:
        """Choose sizes and place, unless the same was tried before or scanning blocks would exceed the budget."""
        sizes = self.batch.choose(self.menus[candidate.menu], candidate.fraction, candidate.floor, candidate.target)
        # The target matters to the placement only through rules that look at it, and only with shared groups.
        rules, shared = candidate.rules, sizes[0] > 1
        looks = shared and (rules.fit or rules.fill != "none")
        key = (tuple(sizes), rules if shared else None, candidate.target if looks else None)
        if key in self.tried:
            self.budget -= 8 * len(sizes)
            return
        if rules.fit and self.best is not None:
            grouped = sizes.index(1) if sizes[-1] == 1 else len(sizes)
            if SCANNED * grouped * self.ranks > self.budget:
                self.budget -= 8 * len(sizes)
                return
        self.tried.add(key)
        self.place(sizes, candidate)

    def portfolio(self, bound: float) -> Iterator[Candidate]:
        """What to try, in order; later ones depend on the best time so far."""
        yield from self._rising_targets(bound)
        yield from self._variants(bound)
        best = self.time
        for number in range(11):
            target = bound + (best - bound) * (number + 0.5) / 11
            for menu in self.menus:
                for rules in (LOAD, FIT):
                    yield Candidate(menu, rules, 1.0, self.batch.sizes[0], target)

    @property
    def _first(self) -> Menu:
        return "pow2" if "pow2" in self.menus else next(iter(self.menus))

    @property
    def _floors(self) -> list[int]:
        """The smallest sizes to impose: each of the first menu's above the scheduler's own."""
        return [k for k in self.menus[self._first] if k > self.batch.sizes[0]]

    def _rising_targets(self, bound: float) -> Iterator[Candidate]:
        smallest, first = self.batch.sizes[0], self._first
        others: list[tuple[Menu, Rules]] = [(menu, LOAD) for menu in self.menus if menu != first]
        others.insert(1, (first, Rules(fill="none")))
        for number, multiple in enumerate(TARGETS):
            if multiple * bound >= self.time:
                return
            yield Candidate(first, LOAD, 1.0, smallest, multiple * bound)
            rest = [Candidate(menu, rules, 1.0, smallest, multiple * bound) for menu, rules in others]
            if number == 0:
                raised = [Candidate(first, LOAD, 1.0, floor, bound) for floor in self._floors]
                # With about as many samples as ranks, wide groups matter most.
                rest = raised + rest if len(self.batch.lengths) <= 4 * self.ranks else rest + raised
            yield from rest

    def _variants(self, bound: float) -> Iterator[Candidate]:
        smallest = self.batch.sizes[0]
        for multiple in (1.02, 1.1, 1.27):
            for floor in self._floors:
                yield Candidate(self._first, FIT, 1.0, floor, multiple * bound)
            for menu in self.menus:
                for rules in (FIT, Rules(fill="single"), Rules(fill="none"), Rules(fit=True, fill="none")):
                    yield Candidate(menu, rules, 1.0, smallest, multiple * bound)
                yield Candidate(menu, LOAD, 0.7, smallest, multiple * bound)

    def polish(self) -> None:
        """Change one sample's size at a time and keep what is better; a fixed sequence of pseudo-random choices."""
        batch, sizes = self.batch, self.batch.sizes
        index = {k: at for at, k in enumerate(sizes)}
        state = 0x9E3779B97F4A7C15
        samples = len(batch.lengths)

        def draw(below: int) -> int:
            nonlocal state
            state ^= (state << 13) & 0xFFFFFFFFFFFFFFFF
            state ^= state >> 7
            state ^= (state << 17) & 0xFFFFFFFFFFFFFFFF
            return state % below

        while len(sizes) > 1 and not self.over:
            assert self.best is not None
            assert self.candidate is not None
            best = self.best
            if draw(3):
                critical = best.loads.index(best.makespan)
                own = [job for job in best.jobs if job.first <= critical < job.first + job.size]
                members = own[draw(len(own))].members
                place = members[draw(len(members))]
            else:
                place = draw(samples)
            current = index[self.sizes[place]]
            wanted = current + (-2, -1, 1, 2)[draw(4)] if draw(3) else index[self.sizes[draw(samples)]]
            wanted = min(max(wanted, 0), len(sizes) - 1)
            self.budget -= 200
            if wanted == current or batch.first_usable[sizes[wanted]] > place:
                continue
            changed = list(self.sizes)
            changed[place] = sizes[wanted]
            # Sizes must not increase along the places: neighbours in the way move along.
            if wanted > current:
                at = place - 1
                while at >= 0 and changed[at] < sizes[wanted]:
                    changed[at] = sizes[wanted]
                    at -= 1
            else:
                at = place + 1
                while at < samples and changed[at] > sizes[wanted]:
                    changed[at] = sizes[wanted]
                    at += 1
            key = (tuple(changed), "polish", self.candidate)
            if key in self.tried:
                continue
            self.tried.add(key)
            self.place(changed, self.candidate)


def bound_of(batch: Batch, ranks: int) -> float:
    """A target to start from: least work spread evenly, or the fastest time of the longest sample."""
    cost = batch.cost
    sizes = batch.sizes
    at, work = len(sizes) - 1, 0.0
    for place, length in enumerate(batch.lengths):
        while at and batch.first_usable[sizes[at - 1]] <= place:
            at -= 1
        k = sizes[at]
        work += cost.token * batch.padding.pad(length, k) + cost.square * length * length
    work += cost.base * max(ranks, sum(batch.lengths) / batch.capacity)
    return max(work / ranks, min(batch.solo(0, k) for k in batch.least_fitting(0)))


def search(batch: Batch, ranks: int, menus: Mapping[Menu, tuple[int, ...]], budget: int | None) -> Placement:
    """The best placement found within `budget` steps, by default about 1 % of the iteration's time."""
    bound, samples = bound_of(batch, ranks), len(batch.lengths)
    if budget is None:
        low, high = BUDGETS
        wanted = max(round(SHARE * bound / STEP_SECONDS), PASSES * steps_of(samples, ranks))
        budget = min(max(wanted, low), high)
    tolerance = FINE if samples * ranks <= FEW else COARSE
    polish = budget // 2 if samples <= POLISHED_SAMPLES else 0
    found = Search(batch, ranks, menus, budget - polish, (1 + tolerance) * bound)
    for candidate in found.portfolio(bound):
        if found.over:
            break
        found.attempt(candidate)
    found.budget += polish
    if polish:
        found.polish()
    assert found.best is not None
    return found.best
