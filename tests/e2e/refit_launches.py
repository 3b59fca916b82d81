"""Runs under torchrun: the real worker on each launch file of argv, with times as the cost model `TRUTH` gives them.

Real times of tiny iterations on a shared machine tell little; these are exact, so it is known what a refit must find.
Everything else is real: what is computed, the helper process, the store, the records.
"""

import sys

from worker_launches import run_each

from dcpbench.dcp.costs import H200_1B
from dcpbench.dcp.iterations import PlannedIteration, iteration_times
from dcpbench.records import IterationRecord, RunHeader
from dcpbench.worker import emit

TRUTH = H200_1B
CONSTANT = 0.002
RECORD_OF = emit.record_of


def record_of(header: RunHeader, *rest: object) -> IterationRecord:
    record = RECORD_OF(header, *rest)  # type: ignore[arg-type]
    seconds = CONSTANT + iteration_times([PlannedIteration.recorded(record.jobs, header.world_size)], TRUTH)[0]
    values = {**vars(record), "seconds": float(seconds)}
    return IterationRecord(**values)


if __name__ == "__main__":
    emit.record_of = record_of
    run_each(sys.argv[1:])
