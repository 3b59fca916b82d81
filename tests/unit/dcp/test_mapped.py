"""Ranks that meet in mapped memory, run in every order a machine might: nothing is lost, stale or overwritten."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.dcp.attention.mapped import MappedPair
from dcpbench.dcp.groups import CpGroup

Wait = Callable[[], bool] | None
"""What a rank waits for before its next step; None: it can go on."""


class Broken(Exception):
    """A rank read what it should not have, or all wait for each other."""


@dataclass(frozen=True)
class Shared:
    """A job: its ranks, and its operations, forward ones on "sent" buffers and backward ones on "found" buffers."""

    first: int
    size: int
    operations: tuple[str, ...]


@dataclass
class Machine:
    """The memory of all ranks, as its rules are described in `mapped`; a fault may be planted in them."""

    ranks: int
    fault: str = ""
    signals: list[list[int]] = field(init=False)
    memory: dict[str, list[list[torch.Tensor]]] = field(init=False)

    def __post_init__(self) -> None:
        self.signals = [[0] * self.ranks for _ in range(self.ranks)]
        self.memory = {
            kind: [[torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)] for _ in range(2)]
            for kind in ("sent", "found")
        }

    def rank(self, rank: int, jobs: list[Shared]) -> Iterator[Wait]:
        """The steps of one rank; other ranks may do any of theirs in between."""
        pairs = {kind: MappedPair(views, rank) for kind, views in self.memory.items()}
        meetings = [0] * self.ranks
        for number, job in enumerate(jobs):
            if not job.first <= rank < job.first + job.size or job.size == 1:
                continue
            group = CpGroup(job.size, rank - job.first, None, job.first)
            for operation, kind in enumerate(job.operations):
                written = pairs[kind].next(1)
                written.fill_(-1)  # while it is being written it holds neither the old nor the new
                yield None
                written.fill_(tag(number, operation, rank))
                yield None
                yield from self.meet(rank, group, meetings)
                for member, view in zip(range(job.first, job.first + job.size), pairs[kind].views(group), strict=True):
                    if int(view) != tag(number, operation, member):
                        raise Broken(f"rank {rank} read {int(view)} of rank {member} in job {number}")
                    yield None
            if self.fault != "no meeting at the end of a job":
                yield from self.meet(rank, group, meetings)
            if self.fault != "turns counted over jobs":
                for pair in pairs.values():
                    pair.start_over()

    def meet(self, rank: int, group: CpGroup, meetings: list[int]) -> Iterator[Wait]:
        others = [member for member in range(group.first, group.first + group.size) if member != rank]
        for member in others:
            meetings[member] += 1
            self.signals[member][rank] = 1 if self.fault == "flags that waiting clears" else meetings[member]
            yield None
        mine = self.signals[rank]
        behind = 1 if self.fault == "signals of the meeting before" else 0
        for member in others:
            if self.fault == "flags that waiting clears":
                yield lambda member=member: mine[member] == 1  # type: ignore[misc]
                mine[member] = 0
            else:
                yield lambda member=member: mine[member] >= meetings[member] - behind  # type: ignore[misc]

    def run(self, jobs: list[Shared], order: random.Random) -> None:
        """All ranks to their ends; `order` says who takes the next step, and may leave some far behind."""
        steps = {rank: self.rank(rank, jobs) for rank in range(self.ranks)}
        waits: dict[int, Wait] = dict.fromkeys(steps)
        speed = [order.choice((0.01, 0.3, 1.0)) for _ in range(self.ranks)]
        while steps:
            ready = [rank for rank in steps if (wait := waits[rank]) is None or wait()]
            if not ready:
                raise Broken(f"ranks {sorted(steps)} wait for each other")
            (rank,) = order.choices(ready, [speed[rank] for rank in ready])
            for _ in range(order.choice((1, 1, 5))):
                try:
                    waits[rank] = next(steps[rank])
                except StopIteration:
                    del steps[rank]
                    break
                if waits[rank] is not None:
                    break


def tag(job: int, operation: int, rank: int) -> int:
    return (job * 100 + operation) * 100 + rank


def operations(order: random.Random) -> tuple[str, ...]:
    """One to three layers forward, perhaps again in the backward (recomputed), and backward."""
    layers = order.randint(1, 3)
    forward = ("sent",) * layers
    return (*forward, *((("sent", "found") if order.random() < 0.5 else ("found",)) * layers))


def any_jobs(ranks: int, order: random.Random) -> list[Shared]:
    """Groups of any ranks in a row, in any order."""
    jobs = []
    for _ in range(order.randint(1, 12)):
        size = order.randint(1, ranks)
        jobs.append(Shared(order.randint(0, ranks - size), size, operations(order)))
    return jobs


def laminar_jobs(ranks: int, order: random.Random) -> list[Shared]:
    """Blocks that run some jobs and then split, anywhere, until single ranks are left."""
    jobs: list[Shared] = []
    blocks = [(0, ranks)]
    while blocks:
        first, size = blocks.pop(order.randrange(len(blocks)))
        jobs += [Shared(first, size, operations(order)) for _ in range(order.randint(0, 3))]
        if size > 1:
            cut = order.randint(1, size - 1)
            blocks += [(first, cut), (first + cut, size - cut)]
    return jobs


@settings(max_examples=150, deadline=None)
@given(ranks=st.integers(2, 8), seed=st.integers(0, 2**32), laminar=st.booleans())
def test_any_ranks_in_a_row_meet_in_any_order_of_steps(ranks: int, seed: int, laminar: bool) -> None:
    order = random.Random(seed)
    jobs = (laminar_jobs if laminar else any_jobs)(ranks, order)
    machine = Machine(ranks)
    machine.run(jobs, order)
    for one in range(ranks):
        for other in range(ranks):
            # Both sides of a pair have counted the same meetings, and all signals have arrived.
            assert machine.signals[one][other] == machine.signals[other][one]


@pytest.mark.parametrize(
    "fault",
    [
        "no meeting at the end of a job",
        "turns counted over jobs",
        "signals of the meeting before",
        "flags that waiting clears",
    ],
)
def test_each_rule_is_needed(fault: str) -> None:
    found = 0
    for seed in range(300):
        order = random.Random(seed)
        ranks = order.randint(2, 6)
        jobs = any_jobs(ranks, order)
        try:
            Machine(ranks, fault).run(jobs, order)
        except Broken:
            found += 1
    assert found >= 3


def test_addresses_of_a_group_start_aligned_and_name_its_members() -> None:
    for ranks in (1, 2, 3, 5, 8):
        views = [[torch.zeros(4) for _ in range(ranks)] for _ in range(2)]
        pair = MappedPair(views, 0)
        assert pair.next(2).data_ptr() == views[1][0].data_ptr()
        for first in range(ranks):
            for size in range(1, ranks - first + 1):
                group = CpGroup(size, 0, None, first)
                addresses = pair.addresses(group)
                assert addresses.data_ptr() % 16 == 0
                assert addresses[:size].tolist() == [view.data_ptr() for view in pair.views(group)]
                assert pair.views(group)[0] is views[1][first]
