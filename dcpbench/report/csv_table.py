"""`summary.csv`: the main figures in long form, one value a row."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcpbench.analysis.pipeline import Analysis

_UNITS = {
    "iterations": "",
    "mean_ms": "ms",
    "median_ms": "ms",
    "trimmed_mean_ms": "ms",
    "total_seconds": "s",
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "tflops_per_gpu": "TFLOP/s",
}

Value = float | int | str | bool | None


def write(analysis: Analysis) -> str:
    """Columns `case`, `metric`, `value`, `unit`; an absent value is an empty cell."""
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(("case", "metric", "value", "unit"))
    for case, metric, value, unit in _rows(analysis):
        text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
        table.writerow((case, metric, text, unit))
    return file.getvalue()


def _rows(analysis: Analysis) -> Iterator[tuple[str, str, Value, str]]:
    for name, case in analysis.cases.items():
        for metric, unit in _UNITS.items():
            yield name, metric, getattr(case.statistics, metric, None), unit
        yield name, "padding_share", getattr(case.profile, "padding_share", None), ""
        yield name, "peak_memory", getattr(case.profile, "peak_memory_bytes", None), "bytes"
    for metric in ("total", "mean", "median", "trimmed_mean"):
        yield "", f"speedup_{metric}", getattr(analysis.speedup, metric, None), "times"
    for end in ("low", "high"):
        yield "", f"speedup_interval_{end}", getattr(analysis.interval, end, None), "times"
    yield "", "speedup_verdict", analysis.speed, ""
    yield "", "mode", analysis.mode, ""
    if analysis.lockstep is not None:
        yield "", "gradient_difference_max", analysis.lockstep.gradient_difference_max, ""
    if (control := analysis.lockstep_control) is not None:
        yield "", "aa_speedup", control.speedup, "times"
        for end in ("low", "high"):
            yield "", f"aa_interval_{end}", getattr(control.interval, end, None), "times"
        yield "", "aa_verdict", control.verdict, ""
    yield "", "order_effect", analysis.order_effect, "times"
    for metric in ("passed", "max_abs_diff", "mean_abs_diff", "first_iteration_diff"):
        yield "", f"parity_{metric}", getattr(analysis.parity, metric, None), ""
    yield "", "faults", len(analysis.faults), ""
    yield "", "verdict", analysis.verdict.outcome, ""
