"""How long iterations take where the host queues kernels ahead of the device.

A microbatch alone takes the longer of what the device computes and what the host needs to queue its kernels: the floor
of the cost model. In a row of microbatches the host does not wait for the device, so behind a long microbatch, or a
long iteration, it is ahead, and a short one that follows is not held up. Adding up floors, as a scheduler does that
must know the time of a job from the job alone, is therefore too long; here, for rank r whose job before i was i - 1,

    queued(r, i) = max(queued(r, i - 1), finished(r, i - 1 - LEAD)) + host(i)
    finished(i)  = max over members of max(finished(r, i - 1) + device(i), queued(r, i))

All members of a job finish together: a device waits in the first exchange of keys until all are there. All ranks finish
an iteration together, in the reduction of gradients; a host that has queued one waits for the end of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAD = 2
"""How many microbatches the host gets ahead at most: a device's queue of launches is finite (1,024 on CUDA)."""


class Timeline:
    """Ranks that execute one iteration after the other, from an idle start. Times in seconds."""

    def __init__(self, ranks: int) -> None:
        self._queued = [0.0] * ranks
        self._finished = [(0.0,) * (LEAD + 1) for _ in range(ranks)]
        self._end = 0.0
        self.ends: list[float] = []
        """When each job of the latest iteration finished, counted from the end of the iteration before."""

    def iteration(
        self, first: Sequence[int], size: Sequence[int], device: Sequence[float], host: Sequence[float]
    ) -> float:
        """Seconds between the end of the iteration before and of this one.

        Args:
            first: the first rank of each job, in plan order.
            size: how many ranks it has.
            device: seconds that the devices of a job compute.
            host: seconds that the host of each member needs to queue it.
        """
        queued, finished, before = self._queued, self._finished, self._end
        self.ends = []
        for begin, count, computing, queuing in zip(first, size, device, host, strict=True):
            members = range(begin, begin + count)
            end = 0.0
            for rank in members:
                queued[rank] = max(queued[rank], finished[rank][0]) + queuing
                end = max(end, finished[rank][-1] + computing, queued[rank])
            for rank in members:
                finished[rank] = (*finished[rank][1:], end)
            self.ends.append(end - before)
        self._end = max((history[-1] for history in finished), default=before)
        for rank, history in enumerate(finished):
            finished[rank] = (*history[:-1], self._end)
            queued[rank] = max(queued[rank], before)
        return self._end - before
