"""The dynamic-CP rule: the reference vectors, and the fast planner against a literal one."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.dcp.schedulers.default_dynamic_cp import DefaultDynamicCp
from dcpbench.dcp.workload import MINIMAL, BatchPlan, Domain, PaddingRule
from dcpbench.errors import ScheduleError

ASIS = PaddingRule(fixed=1)
Ranks = list[list[int]]


def scheduler(
    ranks: int, capacity: int, smallest: int = 1, padding: PaddingRule = ASIS, multiple: int = 1
) -> DefaultDynamicCp:
    return DefaultDynamicCp(Domain(ranks, 1), capacity, smallest, padding, multiple)


# --- the rule, followed to the letter: per-rank lists, every candidate, every rank's work -----------------------------


class Literal:
    """Plans one batch by trying everything; slow. Work is float where that is exact, else a fraction."""

    def __init__(self, lengths: list[int], like: DefaultDynamicCp) -> None:
        self.N, self.L, self.V = like.domain.ranks, like.capacity, like.microbatch_multiple
        self.lengths, self.padding = lengths, like.padding
        self.sizes = [1 << e for e in range(13) if like.min_size <= 1 << e < self.N] + [self.N]
        self.exact = self.N & (self.N - 1) != 0

    def pad(self, sample: int, k: int) -> int:
        unit: int = self.padding.multiple(k)
        return (self.lengths[sample] + unit - 1) // unit * unit

    def work(self, sample: int, k: int) -> float | Fraction:
        square = self.pad(sample, k) ** 2
        return Fraction(square, k) if self.exact else square / k

    def fits(self, samples: list[int], k: int) -> bool:
        return sum(self.pad(s, k) for s in samples) <= k * self.L

    def need(self, sample: int) -> int:
        return next(k for k in self.sizes if self.fits([sample], k))

    def plan(self) -> list[Ranks]:
        left = sorted(
            range(len(self.lengths)),
            key=lambda s: (self.pad(s, self.need(s)), self.pad(s, self.N)),
            reverse=True,
        )
        microbatches = []
        while left:
            groups, leftovers = self.place(left)
            ranks = self.fill(self.spread(groups))
            if ranks is None:
                members: list[int] = []
                for s in left:
                    if self.fits([*members, s], self.N):
                        members.append(s)
                assert members
                leftovers = [s for s in left if s not in members]
                ranks = [members] * self.N
            microbatches.append(ranks)
            left = leftovers
        return self.align(microbatches)

    def place(self, left: list[int]) -> tuple[list[tuple[int, int, list[int]]], list[int]]:
        """Groups (first rank, size, samples) in creation order, and who found no place."""
        group_of: list[int | None] = [None] * self.N
        load: list[float | Fraction] = [0] * self.N
        groups: list[tuple[int, int, list[int]]] = []
        leftovers = []
        slack = Fraction(21, 20) if self.exact else 1.05
        cap = self.pad(left[0], self.need(left[0])) * self.L * slack
        for s in left:
            best: tuple[float | Fraction, int, int | None] | None = None
            for k in [k for k in self.sizes if k >= self.need(s)]:
                candidates: list[int | None] = [
                    g for g, (_, size, members) in enumerate(groups) if size == k and self.fits([*members, s], k)
                ]
                free = [r for r in range(self.N) if group_of[r] is None]
                if len(free) >= k:
                    candidates.append(None)
                for g in candidates:
                    chosen = free[:k] if g is None else [r for r in range(self.N) if group_of[r] == g]
                    peak = max(load[r] + (self.work(s, k) if r in chosen else 0) for r in range(self.N))
                    if (peak <= cap or not groups) and (best is None or peak < best[0]):
                        best = (peak, k, g)
                if not groups:
                    break  # the longest sample takes its smallest size, unconditionally
            if best is None:
                leftovers.append(s)
                continue
            _, k, g = best
            if g is None:
                g = len(groups)
                first = group_of.index(None)
                groups.append((first, k, []))
                for r in range(first, first + k):
                    group_of[r] = g
            groups[g][2].append(s)
            for r in range(self.N):
                if group_of[r] == g:
                    load[r] += self.work(s, k)
        return groups, leftovers

    def spread(self, groups: list[tuple[int, int, list[int]]]) -> Ranks:
        ranks: Ranks = [[] for _ in range(self.N)]
        for first, size, members in groups:
            for r in range(first, first + size):
                assert not ranks[r]
                ranks[r] = list(members)
        return ranks

    def cut(self, ranks: Ranks) -> list[tuple[int, list[int]]]:
        """(size, samples) of each group: a group is the ranks whose lists hold the same first sample."""
        groups: list[tuple[int, list[int]]] = []
        r = 0
        while r < len(ranks) and ranks[r]:
            size = sum(ranks[r][0] in other for other in ranks)
            groups.append((size, ranks[r]))
            r += size
        return groups

    def fill(self, ranks: Ranks) -> Ranks | None:
        ranks = [list(r) for r in ranks]
        while [] in ranks:
            groups = self.cut(ranks)
            g = min(size for size, _ in groups)
            t = min(2 * g, self.N)
            if sum(size for size, _ in groups) + t - g > self.N:
                return None
            same = [i for i, (size, _) in enumerate(groups) if size == g]
            growing = next((i for i in same if self.fits(groups[i][1], t)), None)
            if growing is None:
                return None
            grown = (t, groups.pop(growing)[1])
            groups.insert(same[0], grown)
            ranks = [list(members) for size, members in groups for _ in range(size)]
            ranks += [[] for _ in range(self.N - len(ranks))]
        return ranks

    def align(self, microbatches: list[Ranks]) -> list[Ranks]:
        at, since = len(microbatches) - 1, 0
        while len(microbatches) % self.V:
            halves = self.halves(microbatches[at])
            if halves:
                microbatches[at] = halves[1]
                microbatches.append(halves[0])
                since = 0
            else:
                since += 1
                if since == len(microbatches):
                    raise ScheduleError("no microbatch can be split")
            at = at - 1 if at else len(microbatches) - 1
        return microbatches

    def halves(self, ranks: Ranks) -> tuple[Ranks, Ranks] | None:
        groups = self.cut(ranks)
        starts = [sum(size for size, _ in groups[:i]) for i in range(len(groups))]
        cut = next((s for s in starts if s >= self.N / 2), None)
        if cut is None:
            return None
        result = []
        for part in (ranks[:cut], ranks[cut:]):
            filled = self.fill(part + [[] for _ in range(self.N - len(part))])
            if filled is None:
                order = sorted(
                    {s for r in part for s in r},
                    key=lambda s: (-self.pad(s, self.need(s)), -self.pad(s, self.N), s),
                )
                if not self.fits(order, self.N):
                    return None
                filled = [order] * self.N
            result.append(filled)
        return result[0], result[1]


def outcome(lengths: list[int], made: DefaultDynamicCp) -> list[Ranks] | str:
    try:
        return made.plan(lengths).rank_lists()
    except ScheduleError as error:
        if "further towards a multiple" in str(error):
            return "not divisible"
        raise


def literal_outcome(lengths: list[int], made: DefaultDynamicCp) -> list[Ranks] | str:
    try:
        return Literal(lengths, made).plan()
    except ScheduleError:
        return "not divisible"


# --- vectors ----------------------------------------------------------------------------------------------------------

VECTORS = {
    "A": ([6144, 2048], 2, 4096, 1, 1, [[[0, 1]] * 2]),
    "B": (
        [8192, 1504, 1408, 1312, 896, 800, 704, 608],
        4,
        2048,
        1,
        1,
        [[[0]] * 4, [[1], [2, 7], [3, 6], [4, 5]]],
    ),
    "C": (
        [8192, 1504, 1408, 1312, 896, 800, 704, 608],
        8,
        2048,
        1,
        1,
        [[[0]] * 4 + [[1], [2, 7], [3, 6], [4, 5]]],
    ),
    "D": ([2064, 2048, 1504, 1504], 4, 2048, 1, 1, [[[0, 3]] * 2 + [[1, 2]] * 2]),
    "E": ([304, 208, 112], 8, 2048, 1, 1, [[[0]] * 4 + [[1, 2]] * 4]),
    "F": ([112] * 5, 8, 2048, 1, 1, [[[0], [0], [1], [1], [2], [2], [3], [4]]]),
    "G": (
        [3008] + [512] * 20,
        4,
        2048,
        1,
        1,
        [
            [[0, 9, 10], [0, 9, 10], [1, 2, 3, 4], [5, 6, 7, 8]],
            [[11, 15, 19], [12, 16, 20], [13, 17], [14, 18]],
        ],
    ),
    "H": ([300, 200, 100, 50], 4, 2048, 2, 1, [[[0]] * 2 + [[1, 2, 3]] * 2]),
    "I": ([4096, 4096, 1024, 512], 4, 2048, 1, 2, [[[0], [0], [1], [1]], [[2], [2], [3], [3]]]),
    "J": ([50, 50], 14, 100, 1, 1, [[[0, 1]] * 14]),
}


@pytest.mark.parametrize("name", VECTORS)
def test_reference_vector(name: str) -> None:
    lengths, ranks, capacity, smallest, multiple, expected = VECTORS[name]
    made = scheduler(ranks, capacity, smallest, multiple=multiple)
    assert made.plan(lengths).rank_lists() == expected
    assert literal_outcome(lengths, made) == expected


def test_split_puts_the_tail_in_place_and_the_head_at_the_end() -> None:
    assert scheduler(4, 100, multiple=2).plan([100] * 4).rank_lists() == [[[2], [2], [3], [3]], [[0], [0], [1], [1]]]


def test_unsplittable_batch_is_refused_with_numbers() -> None:
    with pytest.raises(ScheduleError, match=r"2 samples in 2 microbatches.*multiple of 4.*larger global batch"):
        scheduler(2, 50, multiple=4).plan([50, 50])


def test_sample_that_needs_more_than_the_largest_power_of_two_takes_the_whole_domain() -> None:
    assert scheduler(6, 1000).plan([5500, 900]).rank_lists() == [[[0]] * 6, [[1]] * 6]
    assert scheduler(6, 1000).plan([5500, 400]).rank_lists() == [[[0, 1]] * 6]


def test_group_too_full_to_grow_gives_the_microbatch_to_the_whole_domain() -> None:
    # [2] takes rank 0 and [0, 1] rank 1; on two ranks the two samples would be 8 padded tokens, and 4 is the most.
    made = scheduler(4, 2, padding=MINIMAL)
    assert made.plan([1, 1, 2]).rank_lists() == [[[2]] * 4, [[0], [0], [1], [1]]]


def test_group_that_grows_in_place_of_a_fuller_one_moves_before_it() -> None:
    made = scheduler(8, 2, padding=MINIMAL)
    assert made.plan([2, 2, 1, 1, 1, 1, 1]).rank_lists() == [[[0], [0], [1], [1], [6], [6], [2, 3], [4, 5]]]


# --- fast against literal ---------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], DefaultDynamicCp]:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]))
    smallest = draw(st.sampled_from([k for k in (1, 2, 4, 8, 16) if ranks % k == 0] + [ranks]))
    capacity = draw(st.sampled_from([2, 3, 7, 16, 33, 100, 1024]))
    policy = draw(st.sampled_from(["asis", "minimal", "megatron", "doubled"]))
    multiple = draw(st.sampled_from([1, 1, 2, 3, 4]))
    padding = {"asis": ASIS, "minimal": MINIMAL, "doubled": PaddingRule(factor=2)}.get(policy)
    try:
        if padding is None:
            made = DefaultDynamicCp.create(
                domain=Domain(ranks, 1), capacity=capacity, min_size=smallest, padding_policy="megatron"
            )
            padding = made.padding
        made = scheduler(ranks, capacity, smallest, padding, multiple)
    except ScheduleError:  # capacity below one padding unit
        made = scheduler(ranks, capacity * 64, smallest, padding or MINIMAL, multiple)
    longest = made.longest_sample()
    length = st.one_of(st.integers(1, longest), st.integers(1, min(longest, capacity)), st.integers(1, min(longest, 4)))
    return draw(st.lists(length, min_size=1, max_size=40)), made


@given(cases())
@settings(max_examples=300, deadline=None)
def test_fast_planner_equals_the_literal_rule(case: tuple[list[int], DefaultDynamicCp]) -> None:
    lengths, made = case
    assert outcome(lengths, made) == literal_outcome(lengths, made)


def draw_batch(rng: random.Random, ranks: int, capacity: int, longest: int, most: int) -> list[int]:
    count = rng.randint(1, most)
    shape = rng.choice(["lognormal", "uniform", "equal", "tiny", "spike"])
    if shape == "lognormal":
        lengths = [int(rng.lognormvariate(0, 1.5) * capacity / 2) for _ in range(count)]
    elif shape == "uniform":
        lengths = [rng.randint(1, 2 * capacity) for _ in range(count)]
    elif shape == "equal":
        lengths = [rng.randint(1, capacity)] * count
    elif shape == "tiny":
        lengths = [rng.randint(1, 3) for _ in range(count)]
    else:
        lengths = [longest] + [rng.randint(1, max(1, capacity // 8)) for _ in range(count)]
    rng.shuffle(lengths)
    return [min(max(length, 1), longest) for length in lengths]


@pytest.mark.parametrize(
    ("ranks", "batches"),
    [(1, 300), (2, 600), (4, 600), (8, 500), (16, 300), (32, 100), (64, 20), (3, 400), (6, 400), (10, 200), (14, 100)],
)
def test_fast_planner_equals_the_literal_rule_on_a_sweep(ranks: int, batches: int) -> None:
    rng = random.Random(ranks)
    for _ in range(batches):
        made = scheduler(
            ranks,
            rng.choice([16, 64, 1000, 2048]),
            rng.choice([k for k in (1, 1, 2, 4) if ranks % k == 0]),
            rng.choice([ASIS, MINIMAL, PaddingRule(fixed=2 * ranks)]),
        )
        lengths = draw_batch(rng, ranks, made.capacity, made.longest_sample(), rng.choice([ranks, 6 * ranks + 8]))
        assert outcome(lengths, made) == literal_outcome(lengths, made), (lengths, made)


# --- what every plan guarantees ---------------------------------------------------------------------------------------


def assert_guarantees(plan: BatchPlan, lengths: list[int], made: DefaultDynamicCp) -> None:
    """Stated again here, without the planner's own check."""
    ranks = made.domain.ranks
    assert sorted(s for job in plan.jobs for s in job.samples) == list(range(len(lengths)))
    known = set(made.groups())
    position, size_before, microbatches = 0, ranks, 0
    for job in plan.jobs:
        assert job.first_rank == position, "each microbatch covers the ranks from left to right without a gap"
        assert job.size <= (size_before if position else ranks), "sizes never increase from rank 0 upward"
        if job.size != ranks:
            assert job.size & (job.size - 1) == 0
            assert job.first_rank % job.size == 0
        assert (job.first_rank, job.size) in known
        assert job.size >= made.min_size
        assert sum(made.padding.pad(lengths[s], job.size) for s in job.samples) <= made.capacity * job.size
        padded = [made.padding.pad(lengths[s], job.size) for s in job.samples]
        assert padded == sorted(padded, reverse=True)
        size_before = job.size
        position = (position + job.size) % ranks
        microbatches += position == 0
    assert position == 0
    assert {len(own) for own in plan.jobs_by_rank} == {microbatches}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 100])
def test_every_plan_keeps_the_guarantees(ranks: int) -> None:
    rng = random.Random(1000 + ranks)
    for number in range(120):
        smallest = rng.choice([k for k in (1, 1, 2, 4, 8, ranks) if ranks % k == 0])
        made = DefaultDynamicCp.create(
            domain=Domain(ranks, 1),
            capacity=rng.choice([17, 64, 256, 2048]) * (1 if number % 2 else 64),
            min_size=smallest,
            padding_policy="minimal" if number % 2 else "megatron",
        )
        lengths = draw_batch(rng, ranks, made.capacity, made.longest_sample(), 3 * ranks + 8)
        assert_guarantees(made.plan(lengths), lengths, made)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_equal_input_gives_an_equal_plan(case: tuple[list[int], DefaultDynamicCp]) -> None:
    lengths, made = case
    if outcome(lengths, made) == "not divisible":
        return
    again = scheduler(made.domain.ranks, made.capacity, made.min_size, made.padding, made.microbatch_multiple)
    assert made.plan(lengths).digest() == again.plan(tuple(lengths)).digest()
    assert made.plan(lengths) == again.plan(lengths)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "smallest", "reason"),
    [
        (6, 4, "6 ranks cannot be divided into groups of 4; possible values are 1, 2, 6"),
        (8, 3, "power of two or the whole domain; possible values are 1, 2, 4, 8"),
        (8, 0, "power of two"),
        (8, -2, "power of two"),
        (4, 8, "the domain has only 4 ranks"),
    ],
)
@pytest.mark.parametrize("policy", ["minimal", "megatron"])
def test_smallest_size_that_cannot_be_used(ranks: int, smallest: int, reason: str, policy: str) -> None:
    with pytest.raises(ScheduleError, match=f"min_dynamic_context_parallel_size {smallest} .*{reason}"):
        DefaultDynamicCp.create(domain=Domain(ranks, 1), capacity=64, min_size=smallest, padding_policy=policy)  # type: ignore[arg-type]


def test_whole_domain_as_smallest_size_need_not_be_a_power_of_two() -> None:
    made = scheduler(6, 100, 6)
    assert made.group_sizes() == (6,)
    assert made.groups() == [(0, 6)]
    assert made.plan([10, 500, 90]).rank_lists() == [[[1, 2, 0]] * 6]


@pytest.mark.parametrize(
    ("ranks", "smallest", "unit"),
    [(1, 1, 1), (2, 1, 4), (8, 1, 16), (8, 4, 16), (6, 1, 24), (6, 6, 12), (12, 4, 48), (3, 1, 12)],
)
def test_megatron_padding_serves_every_group(ranks: int, smallest: int, unit: int) -> None:
    made = DefaultDynamicCp.create(domain=Domain(ranks, 1), capacity=2048, min_size=smallest, padding_policy="megatron")
    assert made.padding == PaddingRule(fixed=unit)
    for k in made.group_sizes():
        assert made.padding.multiple(k) % (2 * k if k > 1 else 1) == 0


def test_groups_are_the_aligned_blocks_in_one_order() -> None:
    assert scheduler(6, 8).groups() == [
        *((r, 1) for r in range(6)),
        *((r, 2) for r in (0, 2, 4)),
        (0, 4),
        (0, 6),
    ]
    assert len(scheduler(64, 8).groups()) == 2 * 64 - 1


def test_capacity_below_one_padding_unit() -> None:
    with pytest.raises(ScheduleError, match=r"max_seqlen_per_dp_cp_rank 1 is too small.*at least 2"):
        scheduler(4, 1, padding=MINIMAL)


def test_microbatch_multiple_must_be_positive() -> None:
    with pytest.raises(ScheduleError, match="microbatch_multiple is 0"):
        scheduler(4, 8, multiple=0)
