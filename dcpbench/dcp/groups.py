"""The CP groups that microbatches run on: any ranks in a row, all on one parent communicator.

A group needs no communicator of its own: its members reach each other through memory that the whole
domain has mapped, or by sends and receives of the domain's communicator. Only Transformer Engine wants
a process group for each block; those are made once, in one order, and used before iteration 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dcpbench.dcp import collectives


@dataclass(frozen=True)
class CpGroup:
    """The CP group of one job, seen from one of its ranks: `size` ranks of the domain from `first` on.

    `group` is the process group of just these ranks: the domain's own where they are all of it, one of
    its own where such were made, else None.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None
    first: int = 0

    @property
    def alone(self) -> bool:
        """Whether there is nobody to communicate with."""
        return self.size == 1


class RuntimeGroups:
    """Every group of ranks in a row, for one domain that is the whole world.

    `sizes` are the group sizes that plans may use. `blocks` are the (first rank, size) for which a
    process group is made, in this order, each with a communicator that takes device memory; without them
    the domain's communicator is the only one. Collective over the domain.

    Raises:
        ValueError: a size or a block that does not fit the domain.
    """

    def __init__(
        self,
        sizes: Iterable[int],
        device: torch.device,
        timeout: timedelta,
        *,
        blocks: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.sizes = tuple(sorted(set(sizes)))
        """Sizes that plans may use, ascending."""
        self._device = device
        if not self.sizes or self.sizes[0] < 1 or self.sizes[-1] > self.world:
            raise ValueError(f"groups of {self.sizes} ranks do not fit a domain of {self.world}")
        self.on_parent = 1 < self.sizes[-1] == self.world
        """Whether jobs communicate on the domain's communicator, so that nothing else of an iteration should."""
        before = used_memory(device)
        self._groups: dict[tuple[int, int], CpGroup] = {}
        communicators: list[CpGroup] = []
        for first, size in blocks:
            if first < 0 or size < 1 or first + size > self.world:
                raise ValueError(f"block of {size} ranks from {first} lies outside the domain of {self.world}")
            if size == 1:
                continue
            # Collective over the world: every rank makes every group, in this order.
            whole = size == self.world
            group = dist.group.WORLD if whole else dist.new_group(list(range(first, first + size)), timeout=timeout)
            if first <= self.rank < first + size:
                communicators.append(CpGroup(size, self.rank - first, group, first))
                self._groups[first, size] = communicators[-1]
        self.communicators = tuple(communicators)
        """The groups of this rank for which `blocks` asked for a process group, in the order they were made in."""
        self._warm_up()
        self.memory_bytes = max(0, used_memory(device) - before)
        """Device memory that the communicators took on this rank (0 on CPU)."""

    @property
    def largest(self) -> int:
        """The largest group that plans may use."""
        return self.sizes[-1]

    def of(self, first_rank: int, size: int) -> CpGroup:
        """The group of the job on `size` ranks from `first_rank`.

        Raises:
            ValueError: this rank is not in it, or it is not inside the domain.
        """
        found = self._groups.get((first_rank, size))
        if found is None:
            if not 0 <= first_rank <= self.rank < first_rank + size <= self.world:
                raise ValueError(f"rank {self.rank} of {self.world} is in no group of {size} ranks from {first_rank}")
            group = dist.group.WORLD if 1 < size == self.world else None
            found = self._groups[first_rank, size] = CpGroup(size, self.rank - first_rank, group, first_rank)
        return found

    def connect(self) -> None:
        """Lets the domain's communicator connect this rank to all that `collectives` lets it talk to.

        Connections are made at first use, which would be a spike inside the first iteration that needs
        one. Whatever the group, they are the same few; collective over the domain.
        """
        if not any(1 < size < self.world for size in self.sizes):
            return
        self.on_parent = True
        before = used_memory(self._device)
        near = [
            self.rank + hop
            for hop in range(-collectives.LONGEST_HOP, collectives.LONGEST_HOP + 1)
            if hop and 0 <= self.rank + hop < self.world
        ]
        mine = torch.ones(1, device=self._device)
        theirs = torch.empty(len(near), 1, device=self._device)
        collectives.exchange([(mine, peer) for peer in near], list(zip(theirs, near, strict=True)))
        self._settle()
        self.memory_bytes += max(0, used_memory(self._device) - before)

    def _warm_up(self) -> None:
        # The collectives the worker uses are run once on every communicator: see `connect`.
        groups = {id(group.group): group for group in self.communicators}
        if self.largest == self.world > 1:
            groups.setdefault(id(dist.group.WORLD), self.of(0, self.world))
        for group in groups.values():
            mine = torch.ones(1, device=self._device)
            everyone = torch.empty(group.size, device=self._device)
            collectives.all_gather(everyone, mine, group=group.group)
            collectives.reduce_scatter(mine, everyone, group=group.group)
        dist.all_reduce(torch.ones(1, device=self._device))
        self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def used_memory(device: torch.device) -> int:
    """Bytes of device memory in use by anyone (0 on CPU): what communicators take is not in the allocator's numbers."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
