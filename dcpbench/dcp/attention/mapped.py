"""Buffers that every rank of a domain has mapped, shared by groups of any ranks in a row: when one may be written.

Each rank has a pair of buffers for each direction. An operation of a job writes this rank's buffer
whose turn it is, *meets* the group (nobody goes on before all members have come this far), and reads the
members' buffers of the same turn. A job ends with one more meeting, `finish`.

Which buffer. Turns start anew with every job. All members of a job run the same operations in it, so they
agree on the turn by counting from its start; what else each of them did before, with other partners, does not
matter. Were turns counted over the whole run, one rank that had an odd number of operations more than its
partner would read the buffer that its partner is not writing.

When it may be written. Within a job, a rank writes a buffer again after it has passed the meeting of the
operation in between, which every member reaches after it has read what was there before. From one job
to the next, `finish` does the same: once a rank has passed it, all members have read all they will ever read
of that job. So at the start of a job nobody reads this rank's buffers: those who could were partners in an
earlier job, and it passed the `finish` of that job. Whom it meets next, and what its earlier partners do
meanwhile, makes no difference.

How a group meets without a communicator. For each pair of ranks there is one counter on either side, which
the other one raises: `signals[b][a]`, in b's memory, is how often a has come to a meeting with b. To meet, a
rank raises its counter at every other member and waits until each of theirs, here, is at least as high as the
number of its own meetings with that member, this one included. Both ranks of a pair count the same meetings in
the same order, because jobs have one order that all ranks follow. No signal is lost, since counters are not
reset and each has one writer. None is taken for another: a counter says n only when its owner has come to the
n-th meeting of the pair, and the owner cannot come to the next but one before this rank has passed the n-th. A
member that runs ahead into the next meeting raises its counter to n + 1, which still satisfies who waits for n.
And nobody waits for ever: take the first job, in the order of all, with a meeting that some member has not passed,
and its first such meeting. All members have passed everything before it, so each of them comes to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcpbench.dcp.groups import CpGroup


class MappedPair:
    """Two mapped buffers of every rank, used in turn; see the module.

    `views[turn][rank]` is a flat tensor on this rank's device: the buffer of that rank.
    """

    def __init__(self, views: Sequence[Sequence[Tensor]], rank: int) -> None:
        self._views = [list(of_turn) for of_turn in views]
        self._own = [of_turn[rank] for of_turn in self._views]
        self._addresses = [_addresses(of_turn) for of_turn in self._views]
        self._turn = 0

    def next(self, elements: int) -> Tensor:
        """The first `elements` of this rank's buffer whose turn it now is, to be written."""
        self._turn ^= 1
        return self._own[self._turn][:elements]

    def views(self, group: CpGroup) -> list[Tensor]:
        """The buffers whose turn it is, of every member of the group, flat."""
        return self._views[self._turn][group.first : group.first + group.size]

    def addresses(self, group: CpGroup) -> Tensor:
        """Where those buffers are: int64 on the device, one for each member, more behind them."""
        return self._addresses[self._turn][group.first]

    def start_over(self) -> None:
        """Lets turns begin anew: the job is over and its group has met for the last time."""
        self._turn = 0


def _addresses(views: Sequence[Tensor]) -> list[Tensor]:
    """For every rank, the addresses of the views from its own on.

    Each list starts at a multiple of 16 bytes: kernels are compiled for the alignment of what they are
    given, and would be compiled again for the first group that starts elsewhere.
    """
    ranks = len(views)
    table = torch.zeros(ranks, ranks + ranks % 2, dtype=torch.int64)
    for first in range(ranks):
        table[first, : ranks - first] = torch.tensor([view.data_ptr() for view in views[first:]], dtype=torch.int64)
    return list(table.to(views[0].device))
