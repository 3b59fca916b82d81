"""`statistics.json`: the machine-readable result, whose keys are a contract.

Strict JSON: no NaN, no Infinity. Each null outside `faults` has its reason in `reasons`, under the
dotted path of its key. In `faults`, a null iteration means that the fault concerns the whole launch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dcpbench.report import refits

if TYPE_CHECKING:
    from dcpbench.analysis.pipeline import Analysis
    from dcpbench.analysis.results import CaseResult, LaunchResult

SCHEMA_VERSION = 1

_NO_COMPARISON = "not computed: the records cannot be compared, see faults"
_REASONS = {
    "samples_per_second": "the records carry no sample counts",
    "tokens_per_second": "the records carry no token counts",
    "tflops_per_gpu": "the records carry no token counts and squared lengths, or the header no FLOP coefficients",
    "consumed_samples": "the records carry no sample counts",
    "consumed_tokens": "the records carry no token counts",
    "step_correlation": "too few iterations, or a loss that does not vary",
    "loss_correlation": "too few iterations, or a loss that does not vary",
    "mean_rel_diff": "a loss of the baseline is zero",
    "first_step_rtol": "the default: 5e-4, in float32 1e-5",
    "layout_control": "none was launched, or it cannot be used (see cautions)",
    "ratio": "there is no floor, or it is zero",
    "grad_norm_max_rel_diff": "the records of at least one case carry no gradient norms",
    "grad_norm_first_rel_diff": "the records of at least one case carry no gradient norm of iteration 1",
    "interval": "one pair of launches has no interval",
    "equivalence_interval": "one pair of launches has no interval",
    "p_value": "known from 2 to 16 pairs of launches",
    "pairs_spread": "one pair of launches has no spread",
    "more_pairs": "only where the speed-up is inconclusive, from two pairs and for up to 200",
    "min_speedup": "none was asked for",
    "low": "one pair of launches has no interval",
    "high": "one pair of launches has no interval",
    "rank_imbalance": "the records carry no times of single ranks",
    "timing_floor": "needs two places in the order where launches of the same case follow each other",
    "floor": "needs two launches of a case or a layout control, and is not used by every gate",
    "order_interval": "known only when each order of the cases was launched at least twice",
    "order_effect": "known only when both orders of the cases were launched",
    "position": "the logs do not tell in which order the launches ran",
    "failure": "the launch did not fail",
    "lockstep": "the cases were launched apart",
    "lockstep_control": "none was launched, or it cannot be used (see cautions)",
    "baseline_memory_beside_dcp": "on CPU peaks are those of the process",
    "paired": "known for one or two launches of at least four measured iterations",
    "more_iterations": "only where the speed-up is inconclusive and iterations are counted",
    "memory_difference": "on CPU peaks are those of the process",
    "predicted": "the run used no measured cost profile of this machine and model",
    "planned_with": "the scheduler plans without a cost model",
    "why_not": "the refit was adopted",
    "error_before": "the refit could not be made",
    "error_after": "the refit could not be made",
    "coefficients": "the refit could not be made",
    "iteration_seconds": "the refit could not be made",
    "long": "one attention kernel serves all",
}
_NOT_REPORTED = "the records do not carry it"


def document(analysis: Analysis) -> dict[str, Any]:
    """The result as plain data."""
    speedup = analysis.speedup
    parity = analysis.parity
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "name": analysis.name,
        "verdict": analysis.verdict.outcome,
        "exit_code": int(analysis.verdict.exit_code),
        "verdict_reasons": list(analysis.verdict.reasons),
        "iterations": analysis.iterations,
        "warmup_iterations": analysis.warmup,
        "mode": analysis.mode,
        "pairs": analysis.pairs,
        "lockstep": asdict(analysis.lockstep) if analysis.lockstep else None,
        "lockstep_control": _lockstep_control(analysis),
        "cases": {name: _case(case) for name, case in analysis.cases.items()},
        "speedup": {
            "total": speedup.total if speedup else None,
            "mean": speedup.mean if speedup else None,
            "median": speedup.median if speedup else None,
            "trimmed_mean": speedup.trimmed_mean if speedup else None,
            "by_pair": list(speedup.by_pair) if speedup else None,
            "trimmed_kept": speedup.trimmed_kept if speedup else None,
            "trimmed_cut": speedup.trimmed_cut if speedup else None,
            **_certainty(analysis),
        },
        "order_effect": analysis.order_effect,
        "order_interval": list(analysis.order_interval) if analysis.order_interval else None,
        "timing_floor": analysis.timing_floor,
        "by_longest_sample": [asdict(found) for found in analysis.lengths],
        "workload_removed_by": analysis.workload,
        "parity": {
            "passed": parity.passed if parity else None,
            "checked": analysis.tolerances.check_loss_parity,
            "loss_atol": analysis.tolerances.loss_atol,
            "loss_rtol": analysis.tolerances.loss_rtol,
            "first_step_rtol": analysis.tolerances.first_step_rtol,
            "max_abs_diff": parity.max_abs_diff if parity else None,
            "mean_abs_diff": parity.mean_abs_diff if parity else None,
            "median_abs_diff": parity.median_abs_diff if parity else None,
            "mean_rel_diff": parity.mean_rel_diff if parity else None,
            "final_abs_diff": parity.final_abs_diff if parity else None,
            "first_iteration_diff": parity.first_iteration_diff if parity else None,
            "compared": parity.compared if parity else None,
            "outside": parity.outside if parity else None,
            "worst": {**asdict(parity.worst), "pair": parity.worst.pair + 1} if parity else None,
            "step_correlation": parity.step_correlation if parity else None,
            "loss_correlation": parity.loss_correlation if parity else None,
            "grad_norm_max_rel_diff": parity.grad_norm_max_rel_diff if parity else None,
            "grad_norm_first_rel_diff": parity.grad_norm_first_rel_diff if parity else None,
            "gates": [{**asdict(gate), "ratio": gate.ratio} for gate in parity.gates] if parity else None,
        },
        "slowest_iterations": [
            {"case": found.case, "launch": found.launch, "iteration": found.iteration, "seconds": found.seconds}
            for found in analysis.slowest
        ],
        "layout_control": asdict(analysis.control) if analysis.control else None,
        "aligned_on": list(analysis.aligned_on),
        "launches": [_launch(launch, analysis.warmup) for launch in analysis.launches],
        "profiles": [
            {"launch": profile.launch, "iterations": [asdict(found) for found in profile.iterations]}
            for profile in analysis.profiles
        ],
        "refits": refits.plain(analysis),
        "cautions": list(analysis.cautions),
        "faults": [asdict(fault) for fault in analysis.faults],
    }
    compared = analysis.aligned is not None
    result["reasons"] = {path: _reason(path, compared) for path in nulls(result) if not path.startswith("faults.")}
    return result


def _lockstep_control(analysis: Analysis) -> dict[str, Any] | None:
    found = analysis.lockstep_control
    if found is None:
        return None
    ends = found.interval
    interval = {"confidence": 0.95, "low": ends.low, "high": ends.high} if ends else None
    order = list(found.order_interval) if found.order_interval else None
    return {**asdict(found), "interval": interval, "order_interval": order}


def _launch(launch: LaunchResult, warmup: int) -> dict[str, Any]:
    known = launch.steadiness
    steadiness = known and {
        **asdict(known),
        "outliers": [warmup + 1 + index for index in known.outliers],
        "excess": list(known.excess),
    }
    standing_out = [{**asdict(found), "causes": list(found.causes)} for found in launch.standing_out]
    return {**asdict(launch), "steadiness": steadiness, "standing_out": standing_out}


def _certainty(analysis: Analysis) -> dict[str, Any]:
    found = analysis.interval
    return {
        "verdict": analysis.speed,
        "interval": {"confidence": 0.95, "low": found.low, "high": found.high} if found else None,
        "equivalence_interval": (
            {"confidence": 0.90, "low": found.equivalence_low, "high": found.equivalence_high} if found else None
        ),
        "p_value": found.p_value if found else None,
        "pairs_spread": found.spread if found else None,
        "more_pairs": analysis.more_pairs,
        "margin": analysis.decision.margin,
        "interval_by": analysis.decision.interval,
        "min_speedup": analysis.decision.min_speedup,
    }


def write(analysis: Analysis) -> str:
    """The document as text; the same analysis gives the same bytes."""
    return json.dumps(document(analysis), indent=2, allow_nan=False) + "\n"


def nulls(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of every null; list elements go by their index."""
    if value is None:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from nulls(item, f"{path}.{key}" if path else str(key))


def _reason(path: str, compared: bool) -> str:
    if path == "lockstep_control.interval":
        return "needs at least four measured iterations"
    key = path.rsplit(".", 1)[-1]
    if path.startswith("refits."):
        return _REASONS[key]
    if not compared and key not in ("position", "failure", "min_speedup"):
        return _NO_COMPARISON
    return _REASONS.get(key, _NOT_REPORTED)


def _case(case: CaseResult) -> dict[str, Any]:
    statistics, profile, header = case.statistics, case.profile, case.header
    return {
        "launches": statistics.launches if statistics else None,
        "iterations": statistics.iterations if statistics else None,
        "mean_ms": statistics.mean_ms if statistics else None,
        "median_ms": statistics.median_ms if statistics else None,
        "trimmed_mean_ms": statistics.trimmed_mean_ms if statistics else None,
        "total_seconds": statistics.total_seconds if statistics else None,
        "samples_per_second": statistics.samples_per_second if statistics else None,
        "tokens_per_second": statistics.tokens_per_second if statistics else None,
        "tflops_per_gpu": statistics.tflops_per_gpu if statistics else None,
        "consumed_samples": case.consumed_samples,
        "consumed_tokens": case.consumed_tokens,
        "padding_share": profile.padding_share if profile else None,
        "cp_sizes": {str(size): n for size, n in profile.cp_sizes.items()} if profile and profile.cp_sizes else None,
        "microbatches": profile.microbatches if profile else None,
        "scheduling_ms": profile.scheduling_ms if profile else None,
        "rank_imbalance": profile.imbalance if profile else None,
        "peak_memory_bytes": profile.peak_memory_bytes if profile else None,
        "logged_tflops_per_gpu": profile.logged_tflops_per_gpu if profile else None,
        "predicted": asdict(case.predicted) if case.predicted else None,
        "scheduler": header.scheduler if header else None,
        "planned_with": header.costs if header else None,
        "attention": header.attention if header else None,
        "padding": header.padding if header else None,
        "dtype": header.dtype if header else None,
        "world_size": header.world_size if header else None,
    }
