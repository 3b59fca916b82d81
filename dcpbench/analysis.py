"""Records -> analysis: the one pipeline behind `run`, `analyze` and every report.

`analyze_run` and `analyze_logs` read, align, compute and judge; `write_analysis` writes the files
of a run's `analysis/` folder. An `Analysis` holds every number that a report shows. It depends on
the stored files only, so the folder can be deleted and rebuilt with the same bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcpbench import report
from dcpbench.align import KEYS, Aligned, align, expected_iterations
from dcpbench.cautions import cautions
from dcpbench.errors import LogError, UsageError
from dcpbench.faults import Fault, LaunchInput
from dcpbench.records import RunHeader
from dcpbench.sources import Source, read_logs, read_run
from dcpbench.spec import CASES, Tolerances
from dcpbench.stats.parity import Parity, parity
from dcpbench.stats.profile import CaseProfile, case_profile
from dcpbench.stats.steadiness import settling
from dcpbench.stats.throughput import (
    CaseStatistics,
    FlopModel,
    Speedup,
    case_statistics,
    log_ratios,
    order_effect,
    speedup,
)
from dcpbench.verdict import Verdict, judge

DEFAULT_WARMUP = 10
"""Warm-up iterations where neither the user nor the records name a number (docs/method.md)."""


@dataclass(frozen=True)
class CaseResult:
    """One case: its numbers, and how it was configured as far as its first launch's header tells."""

    header: RunHeader | None
    consumed_samples: int | None = None
    consumed_tokens: int | None = None
    statistics: CaseStatistics | None = None
    profile: CaseProfile | None = None


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


@dataclass(frozen=True)
class Analysis:
    """Everything the reports say. `cases` has the keys of `spec.CASES`; what could not be computed is None."""

    name: str
    pairs: int
    iterations: int
    warmup: int
    tolerances: Tolerances
    cases: dict[str, CaseResult]
    launches: tuple[LaunchResult, ...]
    verdict: Verdict
    speedup: Speedup | None = None
    order_effect: float | None = None
    """How many times as long a case takes for coming second in its pair."""
    parity: Parity | None = None
    aligned_on: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    aligned: Aligned | None = field(default=None, repr=False)


def analyze_run(folder: Path, *, tolerances: Tolerances | None = None, warmup: int | None = None) -> Analysis:
    """The analysis of a run folder, from its stored files alone; launches and writes nothing.

    Args:
        folder: the run folder.
        tolerances: in place of the spec's.
        warmup: first iterations to leave out, in place of the spec's.

    Raises:
        LogError: the folder is no run folder or cannot be read.
        UsageError: the warm-up leaves nothing to measure.
    """
    source = read_run(folder)
    if source.spec is None:
        raise LogError(f"{folder} has no spec")
    training = source.spec.training
    return analyze(
        source,
        iterations=training.iterations,
        warmup=training.warmup_iterations if warmup is None else warmup,
        global_batch_size=training.global_batch_size,
        tolerances=tolerances or source.spec.tolerances,
    )


def analyze_logs(
    baseline: Sequence[Path],
    dcp: Sequence[Path],
    *,
    format: str = "auto",
    iterations: int | None = None,
    warmup: int | None = None,
    global_batch_size: int | None = None,
    tolerances: Tolerances | None = None,
) -> Analysis:
    """The analysis of console logs made anywhere; the n-th log of either case are a pair.

    Args:
        baseline: logs of the fixed-CP launches.
        dcp: logs of the dynamic-CP launches, as many.
        format: `auto` or a name in `parse.FORMATS`.
        iterations: how many each launch must have; default: what the logs announce.
        warmup: first iterations to leave out; default: what the logs' headers say, or else 10.
        global_batch_size: samples of one iteration; default: what the logs say.
        tolerances: of loss parity; default: the spec's defaults.

    Raises:
        LogError: a log cannot be read.
        UsageError: the numbers of logs differ, or the warm-up leaves nothing to measure.
    """
    return analyze(
        read_logs(baseline, dcp, format),
        iterations=iterations,
        warmup=warmup,
        global_batch_size=global_batch_size,
        tolerances=tolerances or Tolerances(),
    )


def analyze(
    source: Source, *, iterations: int | None, warmup: int | None, global_batch_size: int | None, tolerances: Tolerances
) -> Analysis:
    """Align, compute, judge. Faults are part of the result, not exceptions.

    Raises:
        LogError: the records announce an absurd number of iterations.
        UsageError: the warm-up leaves nothing to measure.
    """
    launches = source.launches
    expected = iterations or expected_iterations(launches)
    left_out = _warmup(launches, warmup)
    aligned, faults = align(launches, expected, global_batch_size)
    if aligned is not None and not 0 <= left_out < expected:
        raise UsageError(
            f"a warm-up of {left_out} leaves nothing to measure of {expected} iterations; "
            "give a smaller one (--warmup or WARMUP_ITERS)"
        )
    measured = None if aligned is None else _Measured(aligned, left_out, global_batch_size)
    result_parity = None if aligned is None else _parity(aligned, tolerances)
    results = [_launch_result(launch, measured, row) for row, launch in enumerate(launches)]
    logs = measured.log_ratios() if measured else None
    first = _baseline_first(launches)
    return Analysis(
        name=source.name,
        pairs=len({launch.pair for launch in launches}),
        iterations=expected,
        warmup=left_out,
        tolerances=tolerances,
        cases={case: _case_result(launches, case, measured) for case in CASES},
        launches=tuple(results),
        verdict=judge(faults, result_parity, tolerances.check_loss_parity),
        speedup=measured.speedup() if measured else None,
        order_effect=None if logs is None or first is None else order_effect(logs, first),
        parity=result_parity,
        aligned_on=("iteration", *(KEYS[key] for key in aligned.keys)) if aligned else (),
        cautions=cautions(
            launches,
            aligned=aligned,
            baseline_first=first,
            settling={result.id: result.settling for result in results},
            warmup=left_out,
            parity=result_parity,
            check_loss_parity=tolerances.check_loss_parity,
            remarks=source.remarks,
        ),
        faults=faults,
        aligned=aligned,
    )


def write_analysis(analysis: Analysis, folder: Path) -> tuple[Path, ...]:
    """Writes every file of `report.FILES`, each to a temporary file that is then renamed; returns their paths.

    A file that this analysis does not have (no aligned data when there are faults) is removed, so
    that nothing of an earlier analysis stands beside it.

    Raises:
        LogError: the folder cannot be written.
    """
    contents = {name: write(analysis) for name, write in report.FILES.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            if content is None:
                (folder / name).unlink(missing_ok=True)
            else:
                _replace(folder / name, content)
    except OSError as error:
        raise LogError(f"the analysis cannot be written to {folder}: {error.strerror}") from None
    return tuple(folder / name for name, content in contents.items() if content is not None)


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _warmup(launches: Sequence[LaunchInput], asked: int | None) -> int:
    """The warm-up to apply: as asked, or as the headers say, or the default."""
    if asked is not None:
        return asked
    headers = [launch.table.header for launch in launches if launch.table.header]
    return max((h.warmup_iterations for h in headers if h.warmup_iterations is not None), default=DEFAULT_WARMUP)


def _baseline_first(launches: Sequence[LaunchInput]) -> NDArray[np.bool_] | None:
    """For each pair, whether its baseline ran first; None where the order is not known."""
    position = {(launch.pair, launch.case): launch.position for launch in launches}
    order: list[bool] = []
    for pair in sorted({launch.pair for launch in launches}):
        baseline, dcp = position.get((pair, "baseline")), position.get((pair, "dcp"))
        if baseline is None or dcp is None:
            return None
        order.append(baseline < dcp)
    return np.array(order)


class _Measured:
    """The aligned columns after warm-up, by case."""

    def __init__(self, aligned: Aligned, warmup: int, global_batch_size: int | None) -> None:
        self.aligned = aligned
        self.warmup = warmup
        self._batch = global_batch_size

    def column(self, case: str, name: str) -> NDArray[Any] | None:
        return self.aligned.of_case(case, name, self.warmup)

    def counts(self, case: str, step: str, total: str) -> NDArray[np.int64] | None:
        """A count of each iteration: as recorded, or as the rise of its running total."""
        counts = self.column(case, step)
        totals = self.aligned.of_case(case, total) if counts is None else None
        return np.diff(totals, axis=1, prepend=0)[:, self.warmup :] if totals is not None else counts

    def seconds(self, case: str) -> NDArray[np.float64]:
        seconds = self.column(case, "seconds")
        assert seconds is not None, "alignment refuses records without times"
        return seconds

    def samples(self, case: str) -> NDArray[np.int64] | None:
        counts = self.counts(case, "samples", "consumed_samples")
        if counts is None and self._batch is not None:
            return np.full(self.seconds(case).shape, self._batch)
        return counts

    def tokens(self, case: str) -> NDArray[np.int64] | None:
        return self.counts(case, "tokens", "consumed_tokens")

    def log_ratios(self) -> NDArray[np.float64]:
        return log_ratios(self.seconds("baseline"), self.seconds("dcp"))

    def speedup(self) -> Speedup:
        return speedup(self.seconds("baseline"), self.seconds("dcp"))


def _parity(aligned: Aligned, tolerances: Tolerances) -> Parity:
    baseline, dcp = aligned.of_case("baseline", "loss"), aligned.of_case("dcp", "loss")
    assert baseline is not None, "alignment refuses records without losses"
    assert dcp is not None, "alignment refuses records without losses"
    return parity(
        baseline,
        dcp,
        tolerances.loss_atol,
        tolerances.loss_rtol,
        aligned.of_case("baseline", "grad_norm"),
        aligned.of_case("dcp", "grad_norm"),
    )


def _case_result(launches: Sequence[LaunchInput], case: str, measured: _Measured | None) -> CaseResult:
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
            *(
                measured.column(case, name)
                for name in (
                    "padding_tokens",
                    "cp_sizes",
                    "microbatches",
                    "scheduling_seconds",
                    "peak_memory_bytes",
                    "tflops_per_gpu",
                )
            ),
        ),
    )


def _last(measured: _Measured, case: str, total: str) -> int | None:
    totals = measured.column(case, total)
    return None if totals is None else int(totals[0, -1])


def _launch_result(launch: LaunchInput, measured: _Measured | None, row: int) -> LaunchResult:
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
    return replace(
        known,
        mean_ms=own.mean_ms,
        total_seconds=own.total_seconds,
        samples_per_second=own.samples_per_second,
        tokens_per_second=own.tokens_per_second,
        settling=settling(seconds[0]),
    )
