"""The gates of loss parity: first step, early window, bias, back-stop, gradient norm.

Rounding grows with the iterations and saturates, so the last iterations cannot tell a loss scaled
by 1.001 from another order of additions; the first step and the first twenty can. Each statistic is
held against its *floor*: the greatest value that it takes between two launches of the same case, and
between the baseline and a layout control, which is the baseline packed in another order.

L0, the integrity of the records, is no matter of tolerance: see `align.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from dcpbench.stats.bootstrap import mean_interval

Values = NDArray[np.float64]

KAPPA = 3.0
"""How many times its floor a statistic may reach."""
FIRST_STEP = {True: 1e-5, False: 5e-4}
"""Accepted relative difference at iteration 1, by whether the compute type is float32."""
EARLY = 1e-4
"""Accepted root mean square of the difference over iterations 2 to 20, relative to the loss."""
EARLY_LAST = 20
BIAS = 1e-3
"""Accepted mean difference, relative to the loss."""
GRAD_NORM = 1e-2
"""Accepted relative difference of gradient norms at iteration 1."""


@dataclass(frozen=True)
class Gate:
    """One comparison of a statistic with its limit."""

    name: str
    title: str
    statistic: float
    limit: float
    floor: float | None
    """The greatest value between launches of the same case; None with one pair, or where it is not used."""
    passed: bool
    enforced: bool
    """Whether it counts: a gate that needs a floor and has none is only reported."""
    meaning: str
    """What a failure usually comes from."""
    where: str = ""
    """In lockstep: where it was exceeded first."""

    @property
    def ratio(self) -> float | None:
        """How many floors the statistic is; None where there is no floor, or it is zero."""
        return self.statistic / self.floor if self.floor else None


@dataclass(frozen=True)
class Control:
    """Losses, and gradient norms where recorded, of one more launch of the baseline, shape (iterations,)."""

    loss: Values
    grad_norm: Values | None = None


def gates(
    baseline: Values,
    dcp: Values,
    atol: float,
    rtol: float,
    baseline_grad_norm: Values | None = None,
    dcp_grad_norm: Values | None = None,
    *,
    float32: bool = False,
    first_step_rtol: float | None = None,
    control: Control | None = None,
) -> tuple[Gate, ...]:
    """L1 to L5 for losses of shape (pairs, iterations); a gate for which there is no data is left out.

    Args:
        baseline: losses of the baseline's launches.
        dcp: losses of dcp's launches, row by row of the same pair.
        atol: absolute difference of losses that is accepted at every gate; at L1 only where `first_step_rtol` is None.
        rtol: relative tolerance of the back-stop, L4.
        baseline_grad_norm: gradient norms, NaN where a record has none.
        dcp_grad_norm: the same of dcp.
        float32: whether the losses were computed in float32.
        first_step_rtol: relative difference that is accepted at iteration 1; None: `FIRST_STEP`.
        control: the layout control, if one was launched.
    """
    other = None if control is None else control.loss
    found = [_first_step(baseline, dcp, atol, FIRST_STEP[float32], first_step_rtol, other)]
    if baseline.shape[1] > 1:
        found += [_early(baseline, dcp, atol, float32, other), _bias(baseline, dcp, atol, float32, other)]
    found.append(back_stop(baseline, dcp, atol, rtol))
    if baseline_grad_norm is not None and dcp_grad_norm is not None:
        norm = None if control is None or control.grad_norm is None else control.grad_norm[0]
        found += _grad_norm(baseline_grad_norm[:, 0], dcp_grad_norm[:, 0], norm)
    return tuple(found)


def floor(
    baseline: Values, dcp: Values, statistic: Callable[[Values, Values], float], control: Values | None = None
) -> float | None:
    """The greatest value of a statistic over all pairs of launches of the same case, the control one of the baseline.

    None with one launch of each and no control.
    """
    same = [statistic(case[a], case[b]) for case in (baseline, dcp) for a, b in combinations(range(len(case)), 2)]
    if control is not None:
        same += [statistic(launch, control) for launch in baseline]
    return max(same) if same else None


def _first_step(
    baseline: Values, dcp: Values, atol: float, usual: float, asked: float | None, control: Values | None
) -> Gate:
    def statistic(a: Values, b: Values) -> float:
        return abs(float(b[0] - a[0]))

    loss = float(np.abs(baseline[:, 0]).mean())
    return _gate(
        "L1",
        "first step, before any update",
        max(map(statistic, baseline, dcp)),
        floor(baseline, dcp, statistic, control),
        max(atol, usual * loss) if asked is None else asked * loss,
        "a wrong scale of the loss, shifted labels, a lost sample, or other weights at the start",
    )


def _early(baseline: Values, dcp: Values, atol: float, float32: bool, control: Values | None) -> Gate:
    early = slice(1, EARLY_LAST)

    def statistic(a: Values, b: Values) -> float:
        return float(np.sqrt(np.mean((b[early] - a[early]) ** 2)))

    known = floor(baseline, dcp, statistic, control)
    return _gate(
        "L2",
        f"iterations 2 to {min(EARLY_LAST, baseline.shape[1])}, root mean square",
        max(map(statistic, baseline, dcp)),
        known,
        max(atol, EARLY * float(np.abs(baseline[:, early]).mean())),
        "wrong gradients or a wrong scale of the loss: attention across samples, a missing contribution of a rank",
        enforced=float32 or bool(known),
    )


def _bias(baseline: Values, dcp: Values, atol: float, float32: bool, control: Values | None) -> Gate:
    low, high = mean_interval((dcp - baseline).mean(axis=0))
    known = floor(baseline, dcp, lambda a, b: abs(float((b - a).mean())), control)
    return _gate(
        "L3",
        "bias over all iterations, farther end of its 95 % interval",
        max(abs(low), abs(high)),
        known,
        max(atol, BIAS * float(np.abs(baseline).mean())),
        "a small systematic error: a divisor, a mask, or tokens that one case leaves out",
        enforced=float32 or bool(known),
    )


def back_stop(baseline: Values, dcp: Values, atol: float, rtol: float) -> Gate:
    """L4: |dcp - baseline| <= atol + rtol * |baseline| at every iteration."""
    excess = np.abs(dcp - baseline) - (atol + rtol * np.abs(baseline))
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    size, allowed = np.abs(dcp - baseline), atol + rtol * np.abs(baseline)
    return Gate(
        name="L4",
        title="every iteration, the tolerance that was asked for",
        statistic=float(size[worst]),
        limit=float(allowed[worst]),
        floor=None,
        passed=bool((size <= allowed).all()),
        enforced=True,
        meaning="training that is not stable, other data in these iterations, or a tolerance below what rounding does",
    )


def _grad_norm(baseline: Values, dcp: Values, control: float | None) -> list[Gate]:
    def statistic(a: Values, b: Values) -> float:
        return abs(float(b - a)) / float(a)

    known = None if control is None or not np.isfinite(control) else np.asarray(control, dtype=np.float64)
    if not (np.isfinite(baseline) & np.isfinite(dcp) & (baseline > 0) & (dcp > 0)).all():
        return []
    return [
        _gate(
            "L5",
            "gradient norm at iteration 1, relative",
            max(map(statistic, baseline, dcp)),
            floor(baseline, dcp, statistic, known),
            GRAD_NORM,
            "gradients summed over the wrong ranks or divided twice, which Adam hides from the loss",
        )
    ]


def _gate(
    name: str, title: str, statistic: float, known: float | None, least: float, meaning: str, *, enforced: bool = True
) -> Gate:
    limit = max(KAPPA * (known or 0.0), least)
    return Gate(name, title, statistic, limit, known, statistic <= limit, enforced, meaning)
