"""Words and the table of the A/A control of lockstep, which all reports share. Formats numbers, computes none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.report.wording import Row, number

if TYPE_CHECKING:
    from dcpbench.analysis.lockstep_control import LockstepControl
    from dcpbench.analysis.pipeline import Analysis

TITLE = "A/A control"


def sentences(analysis: Analysis) -> list[str]:
    """The judgement in one sentence, and what the control is; empty without one."""
    control = analysis.lockstep_control
    if control is None:
        return []
    return [
        f"A/A: {_times(control)}: {_judgement(control, analysis.decision.margin)}.",
        f"{control.id} is one more launch with the baseline ({control.scheduler}) on both sides. It takes no part in "
        "the comparison: what it shows is the measurement's own.",
    ]


def rows(analysis: Analysis) -> list[Row]:
    """(what, value); empty without a control."""
    control = analysis.lockstep_control
    if control is None:
        return []
    return [
        ("speed-up of the side in dcp's place (95 % interval)", _times(control)),
        ("measured iterations", f"{control.iterations:,}"),
        ("effect of coming second in an iteration (on time)", _second(control)),
        ("peak memory of that side's passes less the other's", _memory(control.memory_difference)),
        ("difference of losses, greatest", f"{control.loss_difference_max:.3g}"),
        ("relative difference of gradient norms, greatest", number(control.grad_norm_difference_max, ".3g")),
        ("difference of gradients over their norm, greatest", number(control.gradient_difference_max, ".3g")),
        ("time of the baseline beside dcp over beside itself", f"{control.baseline_beside_dcp:.3f}"),
        ("peak memory of the baseline beside dcp less beside itself", _memory(control.baseline_memory_beside_dcp)),
    ]


def _times(control: LockstepControl) -> str:
    ends = control.interval
    return f"{control.speedup:.3f}" + ("" if ends is None else f" ({ends.low:.3f} to {ends.high:.3f})")


def _judgement(control: LockstepControl, margin: float) -> str:
    ends = control.interval
    if ends is None:
        return "too few iterations for an interval"
    if control.verdict in ("faster", "slower"):
        return f"the two places differ by more than the margin of {margin:.3g}"
    if control.verdict != "equivalent":
        return f"too uncertain to tell whether the two places differ by the margin of {margin:.3g}"
    if ends.low <= 1 <= ends.high:
        return "the two places do not differ"
    return f"the two places differ by less than the margin of {margin:.3g}"


def _second(control: LockstepControl) -> str:
    if control.order_effect is None:
        return number(None)
    ends = control.order_interval
    between = "" if ends is None else f" ({ends[0] - 1:+.1%} to {ends[1] - 1:+.1%})"
    return f"{control.order_effect - 1:+.1%}{between}"


def _memory(size: int | None) -> str:
    return number(None) if size is None else f"{size / 2**20:+,.0f} MiB"
