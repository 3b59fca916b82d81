"""Gates -> verdict and exit code.

Order of precedence: a launch that failed (4), then records that cannot be compared (5), then gates
on finite numbers (1), then a decision that was asked for and that the data cannot give (3). What is
wrong first decides, because what follows from it means nothing. A speed-up that is inconclusive
while nobody asked for a decision is a result like any other: the comparison passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dcpbench.errors import ExitCode
from dcpbench.faults import Fault
from dcpbench.spec import Decision
from dcpbench.stats.interval import Interval, Speed
from dcpbench.stats.parity import Parity

Outcome = Literal["passed", "failed", "inconclusive"]


@dataclass(frozen=True)
class Verdict:
    """What a comparison amounts to; `reasons` are sentences, empty when it passed."""

    outcome: Outcome
    exit_code: ExitCode
    reasons: tuple[str, ...] = ()


def judge(
    faults: Sequence[Fault],
    parity: Parity | None,
    check_loss_parity: bool,
    *,
    speed: Speed | None = None,
    interval: Interval | None = None,
    decision: Decision | None = None,
    more_pairs: int | None = None,
) -> Verdict:
    """The verdict on a comparison.

    Args:
        faults: everything that keeps the records from being compared.
        parity: None when the losses could not be compared.
        check_loss_parity: whether finite losses out of tolerance fail it, or are only reported.
        speed: the verdict on the speed-up.
        interval: of the speed-up; None with one pair.
        decision: what is asked of the speed-up.
        more_pairs: how many more would settle an inconclusive speed-up, where known.
    """
    failed = [fault for fault in faults if fault.kind == "launch_failed"]
    if failed:
        reasons = tuple(f"{fault.launch} {fault.message}" for fault in failed)
        return Verdict("failed", ExitCode.LAUNCH_FAILED, reasons)
    if faults or parity is None:
        return Verdict("failed", ExitCode.RECORDS, (_records_sentence(faults),))
    reasons = (_parity_sentence(parity),) if check_loss_parity and not parity.passed else ()
    asked = decision or Decision()
    reasons += _minimum(interval, asked)
    if reasons:
        return Verdict("failed", ExitCode.GATE_FAILED, reasons)
    open_questions = _open(speed, interval, asked, more_pairs)
    if open_questions:
        return Verdict("inconclusive", ExitCode.INCONCLUSIVE, open_questions)
    return Verdict("passed", ExitCode.PASSED)


def _minimum(interval: Interval | None, asked: Decision) -> tuple[str, ...]:
    """The gate on the lower end of the interval."""
    if asked.min_speedup is None or interval is None or interval.low >= asked.min_speedup:
        return ()
    reach = "" if interval.high < asked.min_speedup else "; more pairs may narrow it"
    return (
        f"a speed-up of {asked.min_speedup:g} was asked for; the 95 % interval is {interval.low:.3f} to "
        f"{interval.high:.3f}, and its lower end counts{reach}",
    )


def _open(speed: Speed | None, interval: Interval | None, asked: Decision, more_pairs: int | None) -> tuple[str, ...]:
    """What was asked for and cannot be told from this data."""
    if speed not in ("inconclusive", "indicative"):
        return ()
    more = "" if more_pairs is None else f"; about {more_pairs} more pairs would settle it"
    if asked.min_speedup is not None and interval is None:
        return (f"a speed-up of {asked.min_speedup:g} was asked for, and one pair of launches has no interval",)
    if asked.required:
        return (f"it was asked which case is faster, and the data are {speed}{more}",)
    return ()


def _records_sentence(faults: Sequence[Fault]) -> str:
    kinds = {fault.kind: sum(other.kind == fault.kind for other in faults) for fault in faults}
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"the records cannot be compared: {counted or 'no losses'}"


def _parity_sentence(parity: Parity) -> str:
    worst = parity.worst
    parts = [
        f"loss parity failed at {parity.outside} of {parity.compared} iterations; worst at iteration "
        f"{worst.iteration} of pair {worst.pair + 1}: |{worst.dcp:.6g} - {worst.baseline:.6g}| = "
        f"{abs(worst.difference):.3g}, allowed {worst.allowed:.3g}"
        if gate.name == "L4"
        else f"loss parity failed at gate {gate.name} ({gate.title}): {gate.statistic:.3g}, allowed {gate.limit:.3g}"
        for gate in sorted(parity.failed, key=lambda gate: gate.name != "L4")
    ]
    # The earliest gate is the sharpest, so its reading is the one that helps.
    return "; ".join([*parts, f"usually {parity.failed[0].meaning}"])
