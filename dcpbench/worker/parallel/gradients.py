"""The sum of all ranks' gradients, started segment by segment while the last backward is still running.

What may overlap. Collectives block until every rank has issued them, so there must be one order of
all collectives of an iteration that every rank's own order agrees with; then some rank can always go
on. The order is: every job that is not the last of all its ranks, as the plan orders them; then,
layer by layer from the last, first what attention exchanges in the remaining jobs, then the gradients
of that layer. A rank may therefore start reducing inside its last job only when that job is the last
one of every rank in its CP group (`reduces_early`). Were it not, one rank would issue "attention of
layer 11, gradients of layer 11, attention of layer 10" while its partner, with another job to come,
needs "attention of layer 10" before any gradients. Ranks that may not overlap, or have no job at all,
issue the same reductions in the same order behind their last backward. All ranks know the plan, so
each decides for itself.

That order must also hold within one communicator, and it does; but there a waiting reduction would hold
up the attention behind it. So where CP groups use the domain's communicator, gradients get one of their own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dcpbench.dcp import collectives
from dcpbench.dcp.groups import used_memory
from dcpbench.dcp.workload import BatchPlan
from dcpbench.worker.parameters import FlatParameters, Segment


def reduces_early(plan: BatchPlan, rank: int) -> bool:
    """Whether `rank` may start reducing in the backward of its last job; see the module."""
    own = plan.jobs_by_rank[rank]
    return bool(own) and all(plan.jobs_by_rank[member][-1] == own[-1] for member in plan.jobs[own[-1]].ranks)


def reduction_order(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Segments in the order in which a backward finishes them: output, blocks from the last, the rest."""
    by_name = {segment.name: segment for segment in segments}
    blocks = [name for name in by_name if name.startswith("blocks.")]
    names = ["output", *reversed(blocks), "embedding", "vectors"]
    return tuple(by_name[name] for name in names if name in by_name)


class GradientReduction:
    """Sums gradients over all ranks, in place; with shards each rank's part is summed on that rank only.

    In every iteration every rank calls `finish` once, work or no work, and may call `ready` before.
    """

    def __init__(self, flat: FlatParameters, *, overlap: bool, own_group: bool, timeout: timedelta) -> None:
        self._flat = flat
        self._alone = dist.get_world_size() == 1
        self.overlaps = overlap and not self._alone
        """Whether ranks that may should call `ready`."""
        self._order = reduction_order(flat.segments)
        if not self.overlaps and flat.shards == 1:
            # Nothing to start early: one reduction of everything is the fastest.
            self._order = (Segment("all", 0, len(flat.grad)),)
        self._pieces = (
            {segment.name: piece for segment, piece in zip(flat.segments, flat.pieces, strict=True)}
            if flat.shards > 1
            else {}
        )
        self._works: list[Any] = []
        self._group = dist.group.WORLD
        before = used_memory(flat.grad.device)
        if self.overlaps and own_group:
            self._group = dist.new_group(timeout=timeout)
            dist.all_reduce(torch.ones(1, device=flat.grad.device), group=self._group)
        self.memory_bytes = max(0, used_memory(flat.grad.device) - before)
        """Device memory that the communicator took, where there is one of its own."""

    def ready(self, name: str) -> None:
        """Starts the sum of a segment whose gradients this rank has finished; called in the order of segments.

        Raises:
            RuntimeError: it is not the segment whose turn it is; ranks would add up different things.
        """
        expected = self._order[len(self._works)].name if len(self._works) < len(self._order) else "none"
        if name != expected:
            raise RuntimeError(f"gradients of {name} were finished when those of {expected} were expected")
        self._start(self._order[len(self._works)])

    def finish(self) -> None:
        """Starts what has not been started; afterwards the current stream (on CPU: this thread) has all sums."""
        if self._alone:
            return
        for segment in self._order[len(self._works) :]:
            self._start(segment)
        for work in self._works:
            work.wait()
        self._works = []

    def _start(self, segment: Segment) -> None:
        whole = segment.of(self._flat.grad)
        if self._flat.shards > 1:
            own = self._pieces[segment.name].grad
            self._works.append(collectives.reduce_scatter(own, whole, group=self._group, async_op=True))
        else:
            self._works.append(dist.all_reduce(whole, group=self._group, async_op=True))
