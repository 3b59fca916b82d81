"""Iteration times and throughput of a case, and the speed-up of one case over the other.

Times come as float64 arrays of shape (launches, iterations) in seconds, warm-up already left out.
Rates are totals over totals, so long iterations weigh what they cost. Mean, median and trimmed mean
describe a typical iteration; on samples of very different lengths the last two leave out just the
iterations in which the cases may differ least, and so are no headline (docs/method.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dcpbench.errors import RecordsError, UsageError

TRIM = 0.1
"""Share cut from each end for the trimmed mean."""

Seconds = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class FlopModel:
    """Model FLOPs of an iteration: per_token * sum(L) + per_squared_length * sum(L**2), over real lengths L."""

    per_token: float
    per_squared_length: float
    world_size: int


@dataclass(frozen=True)
class CaseStatistics:
    """One case over its measured iterations, all launches together."""

    launches: int
    iterations: int
    total_seconds: float
    mean_ms: float
    median_ms: float
    trimmed_mean_ms: float
    trimmed_kept: int
    trimmed_cut: int
    samples_per_second: float | None
    tokens_per_second: float | None
    tflops_per_gpu: float | None


@dataclass(frozen=True)
class Speedup:
    """How many times as fast dcp is as baseline, by several summaries; above 1, dcp is faster."""

    total: float
    """exp(mean over pairs of log(R_dcp / R_baseline)), R the total throughput of a launch: the headline."""
    mean: float
    """Ratio of the cases' mean iteration times."""
    median: float
    """Ratio of the cases' median iteration times."""
    trimmed_mean: float
    """Ratio of mean times over aligned iterations, the same iterations left out of both cases."""
    trimmed_kept: int
    trimmed_cut: int
    by_pair: tuple[float, ...]
    """R_dcp / R_baseline of each pair."""


def milliseconds(seconds: Seconds) -> Seconds:
    """Seconds as milliseconds, without the binary dust of the conversion (rounded to 1e-9 ms)."""
    return np.round(seconds * 1e3, 9)


def cut_from_each_end(count: int, trim: float) -> int:
    """How many of `count` values a trim leaves out at each end.

    Raises:
        UsageError: the trim would leave nothing, or is negative.
    """
    if not 0 <= trim < 0.5:
        raise UsageError(f"a trim of {trim} from each end would leave nothing of {count} values; it must be below 0.5")
    return int(trim * count)


def _measured(seconds: Seconds) -> Seconds:
    if seconds.size == 0 or not (np.isfinite(seconds) & (seconds > 0)).all():
        raise RecordsError("no valid samples: there is no measured iteration with a positive, finite time")
    return seconds


def case_statistics(
    seconds: Seconds,
    samples: Counts | None = None,
    tokens: Counts | None = None,
    squared_lengths: Counts | None = None,
    flops: FlopModel | None = None,
    trim: float = TRIM,
) -> CaseStatistics:
    """One case's numbers; every array has the shape of `seconds`, and what is None gives None.

    Raises:
        RecordsError: no iteration to take a statistic of.
        UsageError: an impossible trim.
    """
    times = milliseconds(_measured(seconds)).ravel()
    cut = 2 * cut_from_each_end(times.size, trim)
    total = float(seconds.sum())
    tflops = None
    if flops is not None and tokens is not None and squared_lengths is not None:
        work = flops.per_token * float(tokens.sum()) + flops.per_squared_length * float(squared_lengths.sum())
        tflops = work / (total * flops.world_size * 1e12)
    return CaseStatistics(
        launches=seconds.shape[0],
        iterations=times.size,
        total_seconds=total,
        mean_ms=float(times.mean()),
        median_ms=float(np.median(times)),
        trimmed_mean_ms=float(stats.trim_mean(times, trim)),
        trimmed_kept=times.size - cut,
        trimmed_cut=cut,
        samples_per_second=None if samples is None else float(samples.sum()) / total,
        tokens_per_second=None if tokens is None else float(tokens.sum()) / total,
        tflops_per_gpu=tflops,
    )


def speedup(baseline: Seconds, dcp: Seconds, trim: float = TRIM) -> Speedup:
    """dcp over baseline. Both arrays are aligned: shape (pairs, iterations), equal work in equal places.

    Because the work is equal, the ratio of throughputs is the inverse ratio of total times.

    Raises:
        RecordsError: no iteration to compare.
        UsageError: an impossible trim.
        ValueError: the shapes differ.
    """
    if baseline.shape != dcp.shape:
        raise ValueError(f"aligned times have shapes {baseline.shape} and {dcp.shape}")
    base_ms, dcp_ms = milliseconds(_measured(baseline)), milliseconds(_measured(dcp))
    logs = log_ratios(baseline, dcp)
    kept = kept_on_aligned(base_ms.ravel(), dcp_ms.ravel(), trim)
    return Speedup(
        total=float(np.exp(logs.mean())),
        mean=float(base_ms.mean() / dcp_ms.mean()),
        median=float(np.median(base_ms) / np.median(dcp_ms)),
        trimmed_mean=float(base_ms.ravel()[kept].mean() / dcp_ms.ravel()[kept].mean()),
        trimmed_kept=len(kept),
        trimmed_cut=base_ms.size - len(kept),
        by_pair=tuple(np.exp(logs).tolist()),
    )


def log_ratios(baseline: Seconds, dcp: Seconds) -> Seconds:
    """y = log(R_dcp / R_baseline) of each pair, shape (pairs,): what intervals and verdicts are built on."""
    logs: Seconds = np.log(baseline.sum(axis=1) / dcp.sum(axis=1))
    return logs


def kept_on_aligned(baseline: Seconds, dcp: Seconds, trim: float) -> NDArray[Any]:
    """Indices of the aligned iterations that a trim keeps, ascending.

    Iterations are ordered by the geometric mean of both cases' times, so that the choice treats the
    cases alike and the ratio of the trimmed means turns into its reciprocal when they are swapped.
    """
    cut = cut_from_each_end(baseline.size, trim)
    order = np.argsort(np.log(baseline) + np.log(dcp), kind="stable")
    return np.sort(order[cut : baseline.size - cut])


def order_effect(logs: Seconds, baseline_first: NDArray[np.bool_]) -> float | None:
    """How many times as long a case takes for coming second in its pair; None unless both orders occur.

    A case that looks slower when second shows as y too low with baseline first and too high with
    dcp first: the factor is exp(half the difference of the two means), and cancels in the headline.
    """
    first, second = logs[baseline_first], logs[~baseline_first]
    if first.size == 0 or second.size == 0:
        return None
    return float(np.exp((second.mean() - first.mean()) / 2))
