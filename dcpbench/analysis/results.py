"""The numbers of each case and each launch, from aligned records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcpbench.align import Aligned
from dcpbench.analysis.disturbances import Telemetry
from dcpbench.analysis.predicted import Predicted
from dcpbench.faults import LaunchInput
from dcpbench.records import RunHeader
from dcpbench.stats.profile import CaseProfile, case_profile
from dcpbench.stats.steadiness import Steadiness, settling, steadiness
from dcpbench.stats.throughput import CaseStatistics, FlopModel, case_statistics


@dataclass(frozen=True)
class CaseResult:
    """One case: its numbers, and how it was configured as far as its first launch's header tells."""

    header: RunHeader | None
    consumed_samples: int | None = None
    consumed_tokens: int | None = None
    statistics: CaseStatistics | None = None
    profile: CaseProfile | None = None
    predicted: Predicted | None = None
    """Only where the run used a measured cost profile."""


@dataclass(frozen=True)
class StandingOut:
    """An iteration that took much longer, or shorter, than its batch takes in this launch."""

    iteration: int
    times: float
    """How many times the usual time."""
    causes: tuple[str, ...] = ()
    """What disturbed the machine in that time, as far as telemetry knows."""


@dataclass(frozen=True)
class LaunchResult:
    """One launch; the numbers are None unless all launches align."""

    id: str
    case: str
    pair: int
    position: int | None
    source: str
    format: str
    records: int
    failure: str | None
    mean_ms: float | None = None
    total_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    settling: int = 0
    """Leading measured iterations that still ran slow."""
    steadiness: Steadiness | None = None
    standing_out: tuple[StandingOut, ...] = ()
    """The iterations of `steadiness.outliers`, with what telemetry knows of each."""


@dataclass(frozen=True)
class LayoutControl:
    """One more launch of the baseline, packed in another order: what rounding alone changes."""

    id: str
    scheduler: str | None
    position: int | None
    source: str
    records: int
    max_abs_diff: float
    """Greatest difference of its loss from that of a baseline launch at any iteration."""
    first_iteration_diff: float


class Measured:
    """The aligned columns after warm-up, by case."""

    def __init__(self, aligned: Aligned, warmup: int, global_batch_size: int | None) -> None:
        self.aligned = aligned
        self.warmup = warmup
        self._batch = global_batch_size

    def column(self, case: str, name: str) -> NDArray[Any] | None:
        """A column of one case, shape (pairs, measured iterations); None where it is not recorded."""
        return self.aligned.of_case(case, name, self.warmup)

    def counts(self, case: str, step: str, total: str) -> NDArray[np.int64] | None:
        """A count of each iteration: as recorded, or as the rise of its running total."""
        counts = self.column(case, step)
        totals = self.aligned.of_case(case, total) if counts is None else None
        return np.diff(totals, axis=1, prepend=0)[:, self.warmup :] if totals is not None else counts

    def seconds(self, case: str) -> NDArray[np.float64]:
        """Iteration times."""
        seconds = self.column(case, "seconds")
        assert seconds is not None, "alignment refuses records without times"
        return seconds

    def samples(self, case: str) -> NDArray[np.int64] | None:
        """Samples of each iteration."""
        counts = self.counts(case, "samples", "consumed_samples")
        if counts is None and self._batch is not None:
            return np.full(self.seconds(case).shape, self._batch)
        return counts

    def tokens(self, case: str) -> NDArray[np.int64] | None:
        """Real tokens of each iteration."""
        return self.counts(case, "tokens", "consumed_tokens")


def case_result(launches: Sequence[LaunchInput], case: str, measured: Measured | None) -> CaseResult:
    """What is known of one case; the numbers are None when nothing was measured."""
    header = next((launch.table.header for launch in launches if launch.case == case and launch.table.header), None)
    if measured is None:
        return CaseResult(header)
    flops = None
    if header and header.flops_per_token is not None and header.flops_per_squared_length is not None:
        flops = FlopModel(header.flops_per_token, header.flops_per_squared_length, header.world_size)
    tokens = measured.tokens(case)
    return CaseResult(
        header=header,
        consumed_samples=_last(measured, case, "consumed_samples"),
        consumed_tokens=_last(measured, case, "consumed_tokens"),
        statistics=case_statistics(
            measured.seconds(case),
            measured.samples(case),
            tokens,
            measured.column(case, "squared_lengths"),
            flops,
        ),
        profile=case_profile(
            tokens,
            padding_tokens=measured.column(case, "padding_tokens"),
            cp_sizes=measured.column(case, "cp_sizes"),
            microbatches=measured.column(case, "microbatches"),
            scheduling_seconds=measured.column(case, "scheduling_seconds"),
            peak_memory_bytes=measured.column(case, "peak_memory_bytes"),
            tflops_per_gpu=measured.column(case, "tflops_per_gpu"),
            imbalance=measured.column(case, "imbalance"),
        ),
    )


def _last(measured: Measured, case: str, total: str) -> int | None:
    totals = measured.column(case, total)
    return None if totals is None else int(totals[0, -1])


def launch_result(
    launch: LaunchInput,
    measured: Measured | None,
    z: dict[str, NDArray[np.float64]] | None = None,
    telemetry: Telemetry | None = None,
) -> LaunchResult:
    """What is known of one launch; the numbers are None when nothing was measured.

    `z` has the workload-removed times by case, of the shape of its seconds.
    """
    table = launch.table
    known = LaunchResult(
        id=launch.id,
        case=launch.case,
        pair=launch.pair,
        position=launch.position,
        source=table.source,
        format=table.format,
        records=table.rows,
        failure=launch.failure,
    )
    if measured is None:
        return known
    index = [other.id for other in measured.aligned.launches if other.case == launch.case].index(launch.id)
    pick = slice(index, index + 1)
    seconds = measured.seconds(launch.case)[pick]
    samples, tokens = measured.samples(launch.case), measured.tokens(launch.case)
    own = case_statistics(seconds, None if samples is None else samples[pick], None if tokens is None else tokens[pick])
    steady = steadiness(z[launch.case][index]) if z else None
    ended = measured.column(launch.case, "ended")
    return replace(
        known,
        mean_ms=own.mean_ms,
        total_seconds=own.total_seconds,
        samples_per_second=own.samples_per_second,
        tokens_per_second=own.tokens_per_second,
        settling=settling(seconds[0]),
        steadiness=steady,
        standing_out=tuple(
            StandingOut(
                measured.warmup + 1 + place,
                times,
                () if ended is None else _causes(telemetry, float(ended[index, place]), float(seconds[0, place])),
            )
            for place, times in zip(steady.outliers, steady.excess, strict=True)
        )
        if steady
        else (),
    )


def _causes(telemetry: Telemetry | None, ended: float, seconds: float) -> tuple[str, ...]:
    return () if telemetry is None or not ended > 0 else telemetry.during(ended - seconds, ended)
