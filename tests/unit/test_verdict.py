import numpy as np
import pytest

from dcpbench.errors import ExitCode
from dcpbench.faults import Fault
from dcpbench.spec import Decision
from dcpbench.stats.interval import decide, interval
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


@pytest.mark.parametrize(
    ("logs", "decision", "code", "words"),
    [
        ([0.3, 0.3, 0.3], Decision(min_speedup=1.3), ExitCode.PASSED, ""),
        ([0.3, 0.3, 0.3], Decision(min_speedup=1.4), ExitCode.GATE_FAILED, "its lower end counts"),
        ([0.3, 0.1, 0.5], Decision(min_speedup=1.2), ExitCode.GATE_FAILED, "more pairs may narrow it"),
        ([0.3], Decision(min_speedup=1.2), ExitCode.INCONCLUSIVE, "has no interval"),
        ([0.3], Decision(required=True), ExitCode.INCONCLUSIVE, "indicative"),
        ([0.3, 0.3], Decision(required=True), ExitCode.INCONCLUSIVE, "about 2 more pairs would settle it"),
        ([0.3, 0.3, 0.3], Decision(required=True), ExitCode.PASSED, ""),
        ([0.001, 0.0, 0.002], Decision(required=True), ExitCode.PASSED, ""),
        ([0.3, -0.3], Decision(), ExitCode.PASSED, ""),
    ],
)
def test_what_is_asked_of_the_speedup(logs: list[float], decision: Decision, code: ExitCode, words: str) -> None:
    found = interval(np.array(logs))
    speed = decide(found, decision.margin)
    verdict = judge((), of(0.0), True, speed=speed, interval=found, decision=decision, more_pairs=2)
    assert verdict.exit_code == code
    assert words in "".join(verdict.reasons)
    assert verdict.outcome == {0: "passed", 1: "failed", 3: "inconclusive"}[code]


def test_the_gate_that_failed_is_read_for_the_user() -> None:
    baseline = np.full((1, 5), 2.0)
    (reason,) = judge((), parity(baseline, baseline * 1.001, 0.0, 1e-2), True).reasons
    assert reason.startswith("loss parity failed at gate L1 (first step, before any update): 0.002, allowed 0.001")
    assert "usually a wrong scale of the loss" in reason
