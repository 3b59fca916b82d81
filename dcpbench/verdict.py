"""Gates -> verdict and exit code.

Order of precedence: a launch that failed (4), then records that cannot be compared (5), then gates
on finite numbers (1). What is wrong first decides, because what follows from it means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dcpbench.errors import ExitCode
from dcpbench.faults import Fault
from dcpbench.stats.parity import Parity

Outcome = Literal["passed", "failed"]


@dataclass(frozen=True)
class Verdict:
    """What a comparison amounts to; `reasons` are sentences, empty when it passed."""

    outcome: Outcome
    exit_code: ExitCode
    reasons: tuple[str, ...] = ()


def judge(faults: Sequence[Fault], parity: Parity | None, check_loss_parity: bool) -> Verdict:
    """The verdict on a comparison.

    Args:
        faults: everything that keeps the records from being compared.
        parity: None when the losses could not be compared.
        check_loss_parity: whether finite losses out of tolerance fail it, or are only reported.
    """
    failed = [fault for fault in faults if fault.kind == "launch_failed"]
    if failed:
        reasons = tuple(f"{fault.launch} {fault.message}" for fault in failed)
        return Verdict("failed", ExitCode.LAUNCH_FAILED, reasons)
    if faults or parity is None:
        return Verdict("failed", ExitCode.RECORDS, (_records_sentence(faults),))
    if check_loss_parity and not parity.passed:
        return Verdict("failed", ExitCode.GATE_FAILED, (_parity_sentence(parity),))
    return Verdict("passed", ExitCode.PASSED)


def _records_sentence(faults: Sequence[Fault]) -> str:
    kinds = {fault.kind: sum(other.kind == fault.kind for other in faults) for fault in faults}
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"the records cannot be compared: {counted or 'no losses'}"


def _parity_sentence(parity: Parity) -> str:
    worst = parity.worst
    return (
        f"loss parity failed at {parity.outside} of {parity.compared} iterations; worst at iteration "
        f"{worst.iteration} of pair {worst.pair + 1}: |{worst.dcp:.6g} - {worst.baseline:.6g}| = "
        f"{abs(worst.difference):.3g}, allowed {worst.allowed:.3g}"
    )
