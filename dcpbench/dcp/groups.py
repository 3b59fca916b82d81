"""The process groups that microbatches run on: made once, in one order, and warmed up before iteration 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dcpbench.dcp import collectives


@dataclass(frozen=True)
class CpGroup:
    """The CP group of one job, seen from one of its ranks. `group` is None for a single rank."""

    size: int
    rank: int
    group: dist.ProcessGroup | None

    @property
    def alone(self) -> bool:
        """Whether there is nobody to communicate with."""
        return self.size == 1


class RuntimeGroups:
    """Every (first rank, size) block a scheduler may use, for one domain that is the whole world.

    A group of one rank needs no communicator and the full domain reuses the default group, so a
    domain of 8 ranks with sizes 1, 2, 4 and 8 costs two new communicators per rank.
    """

    def __init__(self, blocks: Sequence[tuple[int, int]], device: torch.device, timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        before = used_memory(device)
        self._groups: dict[tuple[int, int], CpGroup] = {}
        for first, size in blocks:
            members = range(first, first + size)
            if first < 0 or first + size > self.world:
                raise ValueError(f"block of {size} ranks from {first} lies outside the domain of {self.world}")
            group: dist.ProcessGroup | None = None
            if size == self.world:
                group = dist.group.WORLD
            elif size > 1:
                # Collective over the world: every rank makes every group, in this order.
                group = dist.new_group(list(members), timeout=timeout)
            if self.rank in members:
                self._groups[first, size] = CpGroup(size, self.rank - first, group)
        self._warm_up(device)
        self.memory_bytes = max(0, used_memory(device) - before)
        """Device memory that the communicators took on this rank (0 on CPU)."""

    def of(self, first_rank: int, size: int) -> CpGroup:
        """The group of the job on `size` ranks from `first_rank`.

        Raises:
            KeyError: no such group was made, or this rank is not in it.
        """
        return self._groups[first_rank, size]

    @property
    def shared(self) -> tuple[CpGroup, ...]:
        """The groups of more than one rank that this rank is in, in the order in which they were made."""
        return tuple(group for group in self._groups.values() if not group.alone)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the groups this rank is in, ascending."""
        return tuple(sorted({size for _, size in self._groups}))

    def _warm_up(self, device: torch.device) -> None:
        # Communicators connect lazily, at their first use: a spike inside the first iteration that
        # uses a size. The collectives the worker uses are therefore run once on every group.
        for group in self._groups.values():
            if group.group is None:
                continue
            mine = torch.ones(1, device=device)
            everyone = torch.empty(group.size, device=device)
            collectives.all_gather(everyone, mine, group=group.group)
            collectives.reduce_scatter(mine, everyone, group=group.group)
        dist.all_reduce(torch.ones(1, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def used_memory(device: torch.device) -> int:
    """Bytes of device memory in use by anyone (0 on CPU): what communicators take is not in the allocator's numbers."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
