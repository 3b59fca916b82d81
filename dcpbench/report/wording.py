"""Words and tables that the console and the Markdown report share. Formats numbers, computes none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dcpbench.faults import Fault
from dcpbench.profiles import table

if TYPE_CHECKING:
    from dcpbench.analysis.pipeline import Analysis
    from dcpbench.analysis.results import CaseResult

NONE = "-"
Row = tuple[str, ...]


def number(value: float | None, form: str = ",.1f", unit: str = "") -> str:
    """A formatted number with its unit, or a dash."""
    return NONE if value is None else f"{value:{form}}{unit}"


def headline(analysis: Analysis) -> str:
    """The answer in one sentence, without cautions."""
    verdict, speedup, parity = analysis.verdict, analysis.speedup, analysis.parity
    if speedup is None or parity is None:
        return "FAILED: " + "; ".join(verdict.reasons) + "."
    result = f"dcp trained {speedup.total:.3f} times as fast as baseline"
    if analysis.lockstep is not None and analysis.lockstep.same_case:
        result = f"a case compared with itself (A/A) came out {speedup.total:.3f} times as fast"
    elif speedup.total < 1:
        result += " (so it was slower)"
    if analysis.lockstep is not None:
        result += _in_lockstep(analysis)
    elif analysis.interval is None:
        result += " in one pair of launches, which is indicative only"
    else:
        result += (
            f" over {analysis.pairs} pairs of launches (95 % interval {analysis.interval.low:.3f} to "
            f"{analysis.interval.high:.3f}: {analysis.speed})"
        )
    if verdict.outcome != "passed":
        return f"{verdict.outcome.upper()}: {'; '.join(verdict.reasons)}. Apart from that, {result}."
    agreement = "passed" if parity.passed else "was out of tolerance and not a gate"
    return f"PASSED: {result}; loss parity {agreement} (greatest difference {parity.max_abs_diff:.3g})."


def _in_lockstep(analysis: Analysis) -> str:
    """How the speed-up of a lockstep run was found."""
    found, both = analysis.interval, analysis.lockstep
    assert both is not None
    launches = "one launch" if both.launches == 1 else f"{both.launches} launches"
    what = f" in lockstep, over {launches}" if both.paired is None else (
        f" in lockstep, over {both.paired.iterations} iterations of {launches}"
    )  # fmt: skip
    if found is None:
        return f"{what} ({analysis.speed})"
    return f"{what} (95 % interval {found.low:.3f} to {found.high:.3f}: {analysis.speed})"


def case_rows(analysis: Analysis) -> list[Row]:
    """(quantity, baseline, dcp) for every quantity that at least one case has."""
    rows = [(label, *(show(case) for case in analysis.cases.values())) for label, show in _CASE_ROWS]
    return [row for row in rows if any(cell != NONE for cell in row[1:])]


def _statistic(name: str, form: str = ",.1f") -> Callable[[CaseResult], str]:
    return lambda case: number(getattr(case.statistics, name, None), form)


def _profile(name: str, form: str = ",.1f") -> Callable[[CaseResult], str]:
    return lambda case: number(getattr(case.profile, name, None), form)


def _logged_tflops(case: CaseResult) -> str:
    # Only in place of our own figure: a second one beside it would have to be explained away.
    own = getattr(case.statistics, "tflops_per_gpu", None)
    return _profile("logged_tflops_per_gpu", ",.3g")(case) if own is None else NONE


def _predicted(name: str, form: str) -> Callable[[CaseResult], str]:
    return lambda case: NONE if case.predicted is None else f"{getattr(case.predicted, name):{form}}"


def _setting(name: str) -> Callable[[CaseResult], str]:
    return lambda case: str(getattr(case.header, name, None) or NONE)


def _cp_sizes(case: CaseResult) -> str:
    sizes = case.profile.cp_sizes if case.profile else None
    return ", ".join(f"CP {size}: {count:,}" for size, count in sizes.items()) if sizes else NONE


def _memory(case: CaseResult) -> str:
    peak = case.profile.peak_memory_bytes if case.profile else None
    return NONE if peak is None else f"{peak / 2**20:,.0f} MiB"


def _memory_parts(case: CaseResult) -> str:
    header = case.header
    sizes = header and (
        header.parameter_bytes,
        header.gradient_bytes,
        header.optimizer_bytes,
        header.group_memory_bytes,
    )
    if not sizes or None in sizes[:3]:
        return NONE
    return " + ".join(f"{(size or 0) / 2**20:,.0f}" for size in sizes) + " MiB"


_CASE_ROWS: tuple[tuple[str, Callable[[CaseResult], str]], ...] = (
    ("scheduler", _setting("scheduler")),
    ("planned with", _setting("costs")),
    ("attention backend", _setting("attention")),
    ("padding policy", _setting("padding")),
    ("compute type", _setting("dtype")),
    ("measured iterations", _statistic("iterations", ",d")),
    ("mean iteration (ms)", _statistic("mean_ms")),
    ("median iteration (ms)", _statistic("median_ms")),
    ("10 % trimmed mean (ms)", _statistic("trimmed_mean_ms")),
    ("predicted mean iteration (ms)", _predicted("mean_ms", ",.1f")),
    ("predicted over measured time", _predicted("ratio", ",.3f")),
    ("mean error of predicted iterations", _predicted("mape", ".1%")),
    ("predicted with", _predicted("basis", "")),
    ("samples/s", _statistic("samples_per_second")),
    ("tokens/s (padding left out)", _statistic("tokens_per_second", ",.0f")),
    ("TFLOP/s per GPU (real tokens)", _statistic("tflops_per_gpu", ",.3g")),
    ("TFLOP/s per GPU as logged", _logged_tflops),
    ("padding share of tokens", _profile("padding_share", ".2%")),
    ("microbatches per iteration", _profile("microbatches")),
    ("microbatches by CP size", _cp_sizes),
    ("slowest rank's time over the ranks' mean", _profile("imbalance", ",.3f")),
    ("scheduling per iteration (ms)", _profile("scheduling_ms", ",.3f")),
    ("peak memory of a rank", _memory),
    ("of it weights + gradients + optimizer, beside it communicators", _memory_parts),
)


def speedup_rows(analysis: Analysis) -> list[Row]:
    """(measure, speed-up) by each summary."""
    speedup = analysis.speedup
    if speedup is None:
        return []
    cut, all_ = speedup.trimmed_cut, speedup.trimmed_cut + speedup.trimmed_kept
    rows: list[Row] = [
        ("total throughput (headline)", f"{speedup.total:.3f}"),
        *_interval_rows(analysis),
        ("mean iteration", f"{speedup.mean:.3f}"),
        ("median iteration", f"{speedup.median:.3f}"),
        (f"trimmed mean, the same {cut} of {all_} iterations cut from both", f"{speedup.trimmed_mean:.3f}"),
    ]
    if analysis.timing_floor is not None:
        rows.append(("spread of the same case in neighbouring launches", f"{analysis.timing_floor:.1%}"))
    if analysis.order_effect is not None:
        ends = analysis.order_interval
        between = "" if ends is None else f" ({ends[0] - 1:+.1%} to {ends[1] - 1:+.1%})"
        place = "a pair" if analysis.lockstep is None else "an iteration"
        rows.append((f"effect of coming second in {place} (on time)", f"{analysis.order_effect - 1:+.1%}{between}"))
    return rows


def units(analysis: Analysis) -> str:
    """What the interval counts."""
    both = analysis.lockstep
    return "pairs" if both is None else "launches" if both.paired is None else "iterations"


def pair_noun(analysis: Analysis) -> str:
    """What a row of `pair_rows` is."""
    return "pair" if analysis.lockstep is None else "launch"


def lockstep_rows(analysis: Analysis) -> list[Row]:
    """(what, value) that only lockstep can tell; empty in the other mode."""
    both = analysis.lockstep
    if both is None:
        return []
    found = both.paired
    rows: list[Row] = [
        ("launches, both cases in each", f"{both.launches}"),
        ("the two sides", "the same case (A/A)" if both.same_case else "baseline and dcp"),
    ]
    if found is not None:
        rows += [
            ("measured iterations", f"{found.iterations:,}"),
            ("correlation of neighbours", f"{found.correlation:.2f}"),
            ("worth independent iterations", f"{found.effective:,.0f}"),
        ]
    if both.more_iterations is not None:
        rows.append(("iterations that would settle it", f"about {both.more_iterations:,} more"))
    rows += [
        ("update, in both cases' times (ms)", number(both.update_ms)),
        ("difference of gradients over their norm, greatest", number(both.gradient_difference_max, ".3g")),
        ("the same, median", number(both.gradient_difference_median, ".3g")),
        ("where the greatest difference stands out most", both.gradient_segment or NONE),
    ]
    if both.memory_difference is not None:
        rows.append(("peak memory of dcp's passes less baseline's", f"{both.memory_difference / 2**20:+,.0f} MiB"))
    return rows


LOCKSTEP_TEXT = (
    "Each global batch was computed under both cases' plans at the same weights, in alternating order, and one update "
    "was made from the baseline's gradient. A case's time is its own forward, backward and reduction, and the update's."
)


def _interval_rows(analysis: Analysis) -> list[Row]:
    found, margin = analysis.interval, analysis.decision.margin
    if found is None:
        return []
    rows: list[Row] = [
        (f"95 % interval over {units(analysis)}", f"{found.low:.3f} to {found.high:.3f}"),
        (f"verdict, differences up to {margin:.3g} counting as none", str(analysis.speed)),
    ]
    if analysis.more_pairs is not None:
        rows.append((f"{units(analysis)} that would settle it", f"about {analysis.more_pairs} more"))
    if found.p_value is not None:
        rows.append(("p of no difference, exact sign-flip test", f"{found.p_value:.3g}"))
    return rows


def pair_rows(analysis: Analysis) -> list[Row]:
    """(pair, speed-up in it)."""
    return [(f"{number}", f"{value:.3f}") for number, value in enumerate(getattr(analysis.speedup, "by_pair", ()), 1)]


LENGTH_COLUMNS = ("longest sample of the batch", "iterations", "share of baseline time", "speed-up", "95 % interval")


def length_rows(analysis: Analysis) -> list[Row]:
    """One row for each bin of batches, under `LENGTH_COLUMNS`."""
    return [
        (
            f"{found.shortest:,} to {found.longest:,} tokens",
            f"{found.iterations:,}",
            f"{found.share:.0%}",
            f"{found.speedup:.3f}",
            NONE if found.low is None else f"{found.low:.3f} to {found.high:.3f}",
        )
        for found in analysis.lengths
    ]


STEADY_COLUMNS = ("launch", "times are", "drift", "correlation of neighbours", "worth independent", "stand out")


def steady_rows(analysis: Analysis) -> list[Row]:
    """How steady each launch was, under `STEADY_COLUMNS`."""
    return [
        (
            launch.id,
            launch.steadiness.label,
            f"{launch.steadiness.drift:+.1%}",
            f"{launch.steadiness.correlation:.2f}",
            f"{launch.steadiness.effective:,.0f}",
            f"{len(launch.steadiness.outliers)}",
        )
        for launch in analysis.launches
        if launch.steadiness is not None
    ]


def setup_rows(analysis: Analysis) -> list[Row]:
    """(what, baseline, dcp): what the launches say of the machine, the model and the versions they ran on."""
    headers = [case.header for case in analysis.cases.values()]
    rows: list[Row] = []
    for label, name in _SETUP_ROWS.items():
        rows.append((label, *(_plain(getattr(header, name, None)) for header in headers)))
    packages = sorted({package for header in headers if header for package in header.versions})
    rows += [(package, *(_plain(header.versions.get(package) if header else None) for header in headers))
             for package in packages]  # fmt: skip
    return [row for row in rows if any(cell != NONE for cell in row[1:])]


def _plain(value: object) -> str:
    return NONE if value is None else f"{value:,}" if isinstance(value, int) else str(value)


_SETUP_ROWS = {
    "device": "device",
    "ranks": "world_size",
    "ranks of a DPxCP domain": "domain_size",
    "CP size of the baseline": "cp",
    "capacity (tokens of a rank)": "capacity",
    "samples of an iteration": "global_batch_size",
    "parameters": "parameters",
}


GATE_COLUMNS = ("gate", "found", "allowed", "same case", "found / same case", "")


def gate_rows(analysis: Analysis) -> list[Row]:
    """One row for each parity gate, under `GATE_COLUMNS`."""
    if analysis.parity is None:
        return []
    rows: list[Row] = [("L0 every iteration once, finite, on the same samples", NONE, NONE, NONE, NONE, "passed")]
    for gate in analysis.parity.gates:
        outcome = "passed" if gate.passed else "FAILED" if gate.enforced else "beyond, not a gate here"
        same = number(gate.floor, ".3g")
        rows.append(
            (
                f"{gate.name} {gate.title}",
                f"{gate.statistic:.3g}",
                f"{gate.limit:.3g}",
                same,
                number(gate.ratio, ".3g"),
                outcome,
            )
        )
    return rows


def gate_sentences(analysis: Analysis) -> list[str]:
    """What the gates that did not pass usually mean, and what no gate stands on."""
    if analysis.parity is None:
        return []
    sentences = [
        f"{gate.name} {'failed' if gate.enforced else 'would have failed'}{f' ({gate.where})' if gate.where else ''}: "
        f"this usually comes from {gate.meaning}."
        for gate in analysis.parity.gates
        if not gate.passed
    ]
    if analysis.control is not None:
        sentences.append(
            f"Launches of the same case include {analysis.control.id}: the baseline once more, each batch packed in "
            f"reversed order ({analysis.control.scheduler}). Its loss differs from the baseline's by up to "
            f"{analysis.control.max_abs_diff:.3g}, at iteration 1 by {analysis.control.first_iteration_diff:.3g}: that "
            "is what another order of additions does. It takes no part in the speed-up."
        )
    if analysis.lockstep is not None:
        more = "" if analysis.lockstep_control is None else ", or three times the A/A control's where that is more"
        sentences.append(
            f"The gates compare both cases at the same weights in every iteration; their limits are absolute{more}, "
            "and have not been calibrated on this model."
        )
        if not all(gate.enforced for gate in analysis.parity.gates):
            sentences.append("S4 is reported only: how far rounding moves the norm in this type is not known.")
        return sentences
    if all(gate.floor is None for gate in analysis.parity.gates):
        sentences.append(
            "With one launch of each case nothing says how far launches of the same case lie apart: the gates stand on "
            "their absolute limits alone."
        )
    if not all(gate.enforced for gate in analysis.parity.gates):
        sentences.append(
            "L2 and L3 are reported only: rounding grows with the iterations, and no two launches of the same case "
            "show here by how much."
        )
    return sentences


def parity_rows(analysis: Analysis) -> list[Row]:
    """(quantity, value) of the loss comparison."""
    parity = analysis.parity
    if parity is None:
        return []
    worst = parity.worst
    return [
        ("tolerance", f"{parity.atol:g} + {parity.rtol:g} x |baseline loss|"),
        ("iterations out of tolerance", f"{parity.outside:,} of {parity.compared:,}"),
        ("greatest difference", f"{parity.max_abs_diff:.3g}"),
        ("mean difference", f"{parity.mean_abs_diff:.3g}"),
        ("median difference", f"{parity.median_abs_diff:.3g}"),
        ("mean difference relative to the loss", number(parity.mean_rel_diff, ".3g")),
        ("mean difference over the last 20 iterations", f"{parity.final_abs_diff:.3g}"),
        ("difference at iteration 1", f"{parity.first_iteration_diff:.3g}"),
        (
            f"nearest to the limit: iteration {worst.iteration} of pair {worst.pair + 1}",
            f"{worst.baseline:.6g} and {worst.dcp:.6g}; allowed {worst.allowed:.3g}",
        ),
        ("correlation of losses (blind to scale and offset)", number(parity.loss_correlation, ".5f")),
        ("correlation of loss steps (near 1 on the same batches)", number(parity.step_correlation, ".5f")),
        ("greatest relative difference of grad norms", number(parity.grad_norm_max_rel_diff, ".3g")),
        ("the same at iteration 1", number(parity.grad_norm_first_rel_diff, ".3g")),
    ]


LAUNCH_COLUMNS = ("launch", "started as", "records", "mean ms", "total s", "samples/s", "tokens/s", "read from")


def launch_rows(analysis: Analysis) -> list[Row]:
    """One row for each launch, under `LAUNCH_COLUMNS`."""
    return [
        (
            launch.id,
            number(launch.position, "d"),
            f"{launch.records:,}" if launch.failure is None else f"{launch.records:,} (failed)",
            number(launch.mean_ms),
            number(launch.total_seconds, ",.2f"),
            number(launch.samples_per_second),
            number(launch.tokens_per_second, ",.0f"),
            f"{launch.source} ({launch.format})",
        )
        for launch in analysis.launches
    ] + [
        (control.id, number(control.position, "d"), f"{control.records:,}", *[NONE] * 4, control.source)
        for control in (analysis.control, analysis.lockstep_control)
        if control is not None
    ]


def profile_columns(analysis: Analysis) -> Row:
    """The columns of `profile_rows`."""
    return ("ms in a profiled iteration", *(profile.launch for profile in analysis.profiles))


def profile_rows(analysis: Analysis) -> list[Row]:
    """(what, milliseconds and share of the iteration for each profiled launch); means over ranks and iterations."""
    return [
        (_PROFILE_ROWS[name], *(f"{ms:,.2f} ({share:.0%})" for ms, share in zip(times, shares, strict=True)))
        for name, times, shares in table(analysis.profiles)
    ]


_PROFILE_ROWS = {
    "attention": "attention",
    "gemm": "matrix products",
    "loss": "cross-entropy",
    "optimizer": "optimizer",
    "other": "other computation and copies",
    "exposed_communication": "exposed communication",
    "idle": "idle: the device waits for the host",
    "seconds": "iteration, the sum of the above",
    "communication": "all communication, hidden or exposed",
    "scheduling": "planning, behind the iteration before",
}


def warmup_sentence(analysis: Analysis) -> str:
    """Which iterations were left out, and which were measured."""
    total, warmup = analysis.iterations, analysis.warmup
    if warmup == 0:
        return f"All {total} iterations of each launch were measured; no warm-up was left out."
    left_out = "iteration 1 was" if warmup == 1 else f"iterations 1 to {warmup} were"
    return f"Measured are iterations {warmup + 1} to {total} of each launch; {left_out} left out as warm-up."


def fault_lines(analysis: Analysis, most: int) -> list[str]:
    """One line for each fault; equal ones of consecutive iterations share a line. At most `most` lines."""
    runs: list[list[Fault]] = []
    for fault in analysis.faults:
        if runs and _continues(runs[-1][-1], fault):
            runs[-1].append(fault)
        else:
            runs.append([fault])
    lines = [_fault_line(run[0], run[-1]) for run in runs[:most]]
    if len(runs) > most:
        lines.append(f"and {len(runs) - most} more; statistics.json lists them")
    return lines


def _continues(last: Fault, fault: Fault) -> bool:
    return (
        (last.launch, last.kind, last.message) == (fault.launch, fault.kind, fault.message)
        and last.iteration is not None
        and fault.iteration == last.iteration + 1
    )


def _fault_line(first: Fault, last: Fault) -> str:
    where = ""
    if first.iteration is not None:
        where = (
            f", iteration {first.iteration}" if first is last else f", iterations {first.iteration}-{last.iteration}"
        )
    return f"{first.launch} ({first.case}){where}: {first.kind.replace('_', ' ')}: {first.message}"
