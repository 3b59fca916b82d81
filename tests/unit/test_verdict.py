import numpy as np
import pytest

from dcpbench.errors import ExitCode
from dcpbench.faults import Fault
from dcpbench.stats.parity import Parity, parity
from dcpbench.verdict import judge

FAILED = Fault("dcp", "01-dcp", None, "launch_failed", "failed after iteration 2 of 6: exit code 7")
MISSING = Fault("dcp", "01-dcp", 3, "missing", "no record of this iteration: 2 of 6")


def of(difference: float) -> Parity:
    baseline = np.full((1, 5), 2.0)
    return parity(baseline, baseline + difference, 0.1, 0.0)


@pytest.mark.parametrize(
    ("faults", "difference", "check", "outcome", "code"),
    [
        ((), 0.0, True, "passed", ExitCode.PASSED),
        ((), 0.5, True, "failed", ExitCode.GATE_FAILED),
        ((), 0.5, False, "passed", ExitCode.PASSED),
        ((MISSING,), 0.0, True, "failed", ExitCode.RECORDS),
        ((MISSING,), 0.0, False, "failed", ExitCode.RECORDS),
        ((MISSING, FAILED), 0.5, True, "failed", ExitCode.LAUNCH_FAILED),
    ],
)
def test_precedence(faults: tuple[Fault, ...], difference: float, check: bool, outcome: str, code: ExitCode) -> None:
    verdict = judge(faults, None if faults else of(difference), check)
    assert (verdict.outcome, verdict.exit_code) == (outcome, code)
    assert bool(verdict.reasons) == (outcome == "failed")


def test_reasons_are_sentences() -> None:
    assert judge((FAILED,), None, True).reasons == ("01-dcp failed after iteration 2 of 6: exit code 7",)
    assert judge((MISSING, MISSING), None, True).reasons == ("the records cannot be compared: 2 missing",)
    (reason,) = judge((), of(0.5), True).reasons
    assert reason.startswith("loss parity failed at 5 of 5 iterations; worst at iteration 1 of pair 1")
    assert "allowed 0.1" in reason


def test_nothing_to_compare_never_passes() -> None:
    assert judge((), None, False).exit_code == ExitCode.RECORDS
