"""Groups of any ranks in a row, without a process group unless one is asked for."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dcpbench.dcp import collectives
from dcpbench.dcp.groups import RuntimeGroups

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=1)


@pytest.fixture
def rank_2_of_6(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """This process in the place of one of six ranks; the list gets every process group that is made."""
    made: list[object] = []
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 6)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout: made.append(ranks) or tuple(ranks))
    monkeypatch.setattr(collectives, "all_gather", lambda *tensors, group: None)
    monkeypatch.setattr(collectives, "reduce_scatter", lambda *tensors, group: None)
    return made


def test_every_group_with_this_rank_exists_and_none_costs_a_communicator(rank_2_of_6: list[object]) -> None:
    groups = RuntimeGroups((1, 3, 5), CPU, TIMEOUT)
    assert groups.largest == 5
    for first, size, rank in ((2, 1, 0), (0, 3, 2), (1, 3, 1), (2, 3, 0), (1, 5, 1), (0, 5, 2)):
        group = groups.of(first, size)
        assert (group.first, group.size, group.rank, group.group) == (first, size, rank, None)
        assert group.alone == (size == 1)
        assert groups.of(first, size) is group
    assert rank_2_of_6 == []
    assert groups.communicators == ()


@pytest.mark.parametrize(("first", "size"), [(3, 2), (0, 2), (-1, 5), (2, 5), (2, 0)])
def test_a_group_without_this_rank_or_outside_the_domain_is_refused(
    rank_2_of_6: list[object], first: int, size: int
) -> None:
    with pytest.raises(ValueError, match=f"rank 2 of 6 is in no group of {size} ranks from {first}"):
        RuntimeGroups((1, 3), CPU, TIMEOUT).of(first, size)


def test_sizes_and_blocks_must_fit_the_domain(rank_2_of_6: list[object]) -> None:
    for sizes in ((), (0, 2), (7,)):
        with pytest.raises(ValueError, match="do not fit a domain of 6"):
            RuntimeGroups(sizes, CPU, TIMEOUT)
    with pytest.raises(ValueError, match="block of 3 ranks from 4 lies outside the domain of 6"):
        RuntimeGroups((3,), CPU, TIMEOUT, blocks=[(4, 3)])


def test_process_groups_are_made_in_order_where_blocks_ask_for_them(rank_2_of_6: list[object]) -> None:
    groups = RuntimeGroups((1, 2, 3), CPU, TIMEOUT, blocks=[(2, 1), (0, 2), (2, 2), (4, 2), (0, 3), (1, 3)])
    assert rank_2_of_6 == [[0, 1], [2, 3], [4, 5], [0, 1, 2], [1, 2, 3]]
    assert [(group.first, group.size, group.rank) for group in groups.communicators] == [
        (2, 2, 0),
        (0, 3, 2),
        (1, 3, 1),
    ]
    assert groups.of(0, 3).group == (0, 1, 2)
    assert groups.of(2, 3).group is None


def test_a_rank_connects_to_the_neighbours_of_every_ring(
    rank_2_of_6: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[set[int], set[int]]] = []
    monkeypatch.setattr(
        collectives,
        "exchange",
        lambda sends, receives: calls.append(({peer for _, peer in sends}, {peer for _, peer in receives})),
    )
    for sizes in ((1,), (1, 6)):
        groups = RuntimeGroups(sizes, CPU, TIMEOUT)
        groups.connect()
        assert calls == []
        assert groups.on_parent == (6 in sizes)
    groups = RuntimeGroups((1, 2, 3, 4, 5), CPU, TIMEOUT)
    groups.connect()
    assert groups.on_parent
    assert calls == [({0, 1, 3, 4}, {0, 1, 3, 4})]
    for size in range(2, 6):
        for first in range(max(0, 3 - size), min(2, 6 - size) + 1):
            order = collectives.ring(size)
            place = order.index(2 - first)
            assert {first + order[place - 1], first + order[(place + 1) % size]} <= {0, 1, 3, 4}


@pytest.mark.parametrize("size", range(1, 65))
def test_neighbours_in_a_ring_are_near(size: int) -> None:
    order = collectives.ring(size)
    assert sorted(order) == list(range(size))
    assert all(abs(order[place] - order[place - 1]) <= collectives.LONGEST_HOP for place in range(size))
