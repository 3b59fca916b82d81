"""The process beside rank 0 that refits the cost profile while the worker trains: `refit_helper LAUNCH.json BACKEND`.

A fit takes tenths of a second of Python and scipy, which in the worker would hold the interpreter's lock and leave
the device without work. So it runs here, at low priority, without torch and hence without any GPU. It is told on its
standard input after which iteration to refit, reads the launch's own records, writes `refits.json`, and answers with
one line of JSON (`Refitted`) on its standard output. It ends when that input ends or its parent dies.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dcpbench import records
from dcpbench.dcp import refit, refit_log
from dcpbench.dcp.cost_profiles import coefficients_of
from dcpbench.dcp.costs import H200_1B
from dcpbench.dcp.iterations import PlannedIteration
from dcpbench.dcp.kernel_choice import starting_from
from dcpbench.dcp.refit import Refit
from dcpbench.dcp.refit_log import READY, RefitLog, Refitted
from dcpbench.plan import Launch
from dcpbench.records import IterationRecord
from dcpbench.worker.lifetime import end_with_parent

_POLL = 0.01
"""Seconds between two looks for a record that will be written soon."""


@dataclass(frozen=True)
class _Measured:
    jobs: PlannedIteration
    seconds: float


class Refitter:
    """The coefficients in use, and what has been recorded of the launch so far."""

    def __init__(self, launch: Launch, backend: str) -> None:
        self._launch = launch
        costs = launch.costs
        self._cost = starting_from(costs.cost if costs else H200_1B, backend)
        self._constant = costs.iteration_seconds if costs else 0.0
        self._interval = launch.spec.schedule.refit
        self._half_life = refit_log.HALF_LIFE * self._interval
        self._log = RefitLog(
            interval=self._interval,
            half_life=self._half_life,
            basis=costs.basis if costs else f"assumed profile {H200_1B.name}",
        )
        self._measured: dict[int, _Measured] = {}

    def record(self, record: IterationRecord) -> None:
        """Takes in the record of an iteration."""
        if record.seconds and record.jobs:
            jobs = PlannedIteration.recorded(record.jobs, self._launch.spec.topology.domain_size)
            self._measured[record.iteration] = _Measured(jobs, record.seconds)

    def refit(self, after: int) -> Refitted:
        """Refits to the iterations up to `after`, adopts the result if it is better, and writes the file."""
        started = time.perf_counter()
        wanted = refit_log.usable(self._launch.spec.training, self._interval, after)
        used = {number: self._measured[number] for number in wanted if number in self._measured}
        self._measured = {number: one for number, one in self._measured.items() if number >= wanted[0]}
        fixed = {"after": after, "applies_from": after + self._interval, "iterations": len(used)}
        try:
            found = self._fit(after, used)
            why_not = refit.why_not(found)
            result = Refitted(
                **fixed,
                adopted=why_not is None,
                why_not=why_not,
                error_before=found.before,
                error_after=found.after,
                coefficients=coefficients_of(found.cost),
                iteration_seconds=found.iteration_seconds,
                seconds=_since(started),
            )
        except (ValueError, ArithmeticError) as error:
            why_not = f"it could not be made: {str(error).splitlines()[0]}"
            result = Refitted(**fixed, adopted=False, why_not=why_not, seconds=_since(started))
        else:
            if result.adopted:
                self._cost, self._constant = found.cost, found.iteration_seconds
        self._log = self._log.model_copy(update={"refits": (*self._log.refits, result)})
        refit_log.write(self._launch.folder, self._log)
        return result

    def _fit(self, after: int, used: dict[int, _Measured]) -> Refit:
        numbers = np.array(list(used), np.int64)
        return refit.refit(
            self._cost,
            self._constant,
            [one.jobs for one in used.values()],
            np.array([one.seconds for one in used.values()]),
            # The same ones in every refit of a launch: none was ever fitted to.
            numbers % 2 == 1,
            0.5 ** ((after - numbers) / self._half_life),
        )


def _since(started: float) -> float:
    return time.perf_counter() - started


def follow(path: Path, until: Callable[[], bool]) -> Iterator[IterationRecord]:
    """The records of iterations as they are written; ends when `until` says so."""
    lines = records.GrowingFile(path)
    while True:
        found = lines.read()
        for line in found:
            record = records.from_json(line.decode("utf-8"))
            if isinstance(record, IterationRecord):
                yield record
        if not found:
            if until():
                return
            time.sleep(_POLL)


def main() -> None:
    """Answers until the input ends."""
    end_with_parent()
    os.nice(19)
    parent = os.getppid()
    launch = Launch.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    refitter = Refitter(launch, sys.argv[2])
    written = follow(launch.records, until=lambda: os.getppid() != parent)
    _answer(READY)
    for line in sys.stdin:
        after = int(line)
        for record in written:
            refitter.record(record)
            if record.iteration >= after:
                break
        else:
            return
        _answer(refitter.refit(after).model_dump_json())


def _answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
