"""Two finished runs side by side: what became faster or slower from the first to the second.

The runs' launches are not paired with each other, so their throughputs are compared by Welch's
interval over launches. What decides how fast a run can be must be equal in both, or be allowed to
differ by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dcpbench.analysis.pipeline import Analysis, analyze_run
from dcpbench.analysis.sources import read_run
from dcpbench.errors import ExitCode, RecordsError, UsageError
from dcpbench.settings.fields import leaves_of
from dcpbench.spec import CASES, Spec
from dcpbench.stats.interval import Interval, Speed, decide, unpaired

_FREE = ("name", "output", "tolerances", "decision", "launches", "lockstep")
"""Sections of the spec that do not decide how fast a case is."""


@dataclass(frozen=True)
class Row:
    """One quantity in both runs; `ratio` is second over first, above 1 the second is faster."""

    quantity: str
    first: float
    second: float
    ratio: float
    interval: Interval | None
    verdict: Speed


@dataclass(frozen=True)
class Comparison:
    """The rows, in the order of reports, and what a reader must know beside them."""

    runs: tuple[str, str]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    outcome: str
    exit_code: ExitCode

    @property
    def dcp(self) -> Row:
        """The row that decides."""
        return next(row for row in self.rows if row.quantity.startswith("dcp"))


def compare(first: Path, second: Path, *, allow: Sequence[str] = (), required: bool = False) -> Comparison:
    """Compares two run folders from their stored records.

    Args:
        first: the run to compare with.
        second: the run that is judged.
        allow: fields, or sections, of the spec that may differ.
        required: whether it has to be decided (exit code 3 otherwise).

    Returns:
        exit code 1 when dcp of the second run is slower by more than the margin.

    Raises:
        UsageError: a controlled field differs and is not allowed to.
        RecordsError: one of the runs has no result.
        LogError: a folder is no run.
    """
    specs = [_spec(path) for path in (first, second)]
    differing = [name for name in _differences(*specs) if not _allowed(name, allow)]
    if differing:
        raise UsageError(
            f"the runs differ in {', '.join(differing)}, so they say nothing of each other; "
            f"where that is what you compare, add {' '.join(f'--allow {name}' for name in differing)}"
        )
    found = (_result(first), _result(second))
    if not _same_batches(*found) and not _allowed("data", allow):
        raise UsageError("the runs trained on different batches; where that is what you compare, add --allow data")
    rows = tuple(_rows(*found))
    dcp = next(row for row in rows if row.quantity.startswith("dcp"))
    outcome, code = "passed", ExitCode.PASSED
    if dcp.verdict == "slower":
        outcome, code = "failed", ExitCode.GATE_FAILED
    elif required and dcp.verdict in ("inconclusive", "indicative"):
        outcome, code = "inconclusive", ExitCode.INCONCLUSIVE
    return Comparison((first.name, second.name), rows, tuple(_notes(*found)), outcome, code)


def _spec(path: Path) -> Spec:
    spec = read_run(path).spec
    assert spec is not None, "a run folder has a spec"
    return spec


def _result(path: Path) -> Analysis:
    found = analyze_run(path)
    if found.aligned is None:
        raise RecordsError(f"{path} has no result to compare: {'; '.join(found.verdict.reasons)}")
    return found


def _differences(first: Spec, second: Spec) -> list[str]:
    ours, theirs = (dict(leaves_of("", spec.model_dump(mode="json"))) for spec in (first, second))
    names = {*ours, *theirs}
    return sorted(name for name in names if ours.get(name) != theirs.get(name) and not _allowed(name, _FREE))


def _allowed(name: str, fields: Sequence[str]) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in fields)


def _same_batches(first: Analysis, second: Analysis) -> bool:
    assert first.aligned is not None
    assert second.aligned is not None
    ours, theirs = (found.aligned.of_case("baseline", "batch_digest") for found in (first, second) if found.aligned)
    return ours is None or theirs is None or bool(np.array_equal(ours[0], theirs[0]))


def _rows(first: Analysis, second: Analysis) -> Iterator[Row]:
    margin = second.decision.margin
    for case in CASES:
        ours, theirs = _rates(first, case), _rates(second, case)
        found = unpaired(np.log(ours), np.log(theirs))
        ratio = float(np.exp(np.log(theirs).mean() - np.log(ours).mean()))
        values = float(np.exp(np.log(ours).mean())), float(np.exp(np.log(theirs).mean()))
        yield Row(f"{case} {_unit(first, second)}", *values, ratio, found, decide(found, margin))
    assert first.speedup is not None
    assert second.speedup is not None
    logs = np.log(first.speedup.by_pair), np.log(second.speedup.by_pair)
    found = unpaired(*logs)
    ratio = second.speedup.total / first.speedup.total
    yield Row("speed-up of dcp", first.speedup.total, second.speedup.total, ratio, found, decide(found, margin))


def _unit(first: Analysis, second: Analysis) -> str:
    launches = (*first.launches, *second.launches)
    return "tokens/s" if all(launch.tokens_per_second for launch in launches) else "iterations/s"


def _rates(analysis: Analysis, case: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    launches = [launch for launch in analysis.launches if launch.case == case]
    known = all(launch.tokens_per_second for launch in analysis.launches)
    rates = [launch.tokens_per_second if known else 1000.0 / (launch.mean_ms or np.nan) for launch in launches]
    return np.array(rates, dtype=np.float64)


def _notes(first: Analysis, second: Analysis) -> Iterator[str]:
    """What differs between the runs beside the spec: versions, kernels, devices; and what each run cautions of."""
    for case in CASES:
        ours, theirs = first.cases[case].header, second.cases[case].header
        if ours is None or theirs is None:
            continue
        for name in ("device", "attention", "dtype", "world_size"):
            a, b = getattr(ours, name), getattr(theirs, name)
            if a != b:
                yield f"{case}: {name} is {a} in the first run, {b} in the second."
        for package in sorted({*ours.versions, *theirs.versions}):
            version, other = ours.versions.get(package), theirs.versions.get(package)
            if version != other:
                yield f"{case}: {package} is {version} in the first run, {other} in the second."
    modes = [run.mode for run in (first, second)]
    if "lockstep" in modes:
        yield (
            f"The first run was made in mode {modes[0]}, the second in mode {modes[1]}; in lockstep a case's time is "
            "put together from its own passes and a shared update."
        )
    if 1 in (first.pairs, second.pairs):
        yield "With a single pair of launches nothing is decided."
