"""Whether the losses of both cases agree, warm-up included.

Different context-parallel layouts add in different orders, so equality to the last bit is not
expected. `gates.py` has the rules; the tolerance |dcp - baseline| <= atol + rtol * |baseline| at
every iteration is the back-stop among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcpbench.stats.gates import Control, Gate, gates

Values = NDArray[np.float64]

FINAL = 20
"""Iterations of the final window."""


@dataclass(frozen=True)
class WorstIteration:
    """Where the difference stands highest against its tolerance."""

    pair: int
    """Row of the arrays, counted from 0."""
    iteration: int
    baseline: float
    dcp: float
    difference: float
    allowed: float


@dataclass(frozen=True)
class Parity:
    """Losses of all pairs compared; differences are dcp minus baseline."""

    passed: bool
    """Whether every enforced gate passed."""
    atol: float
    rtol: float
    compared: int
    outside: int
    """Iterations out of tolerance."""
    max_abs_diff: float
    mean_abs_diff: float
    median_abs_diff: float
    mean_rel_diff: float | None
    """Mean of |difference| / |baseline loss|; None where a baseline loss is zero."""
    final_abs_diff: float
    """Mean |difference| over the last `FINAL` iterations, to which rounding has grown."""
    first_iteration_diff: float
    """Greatest |difference| at iteration 1 of any pair: before any update, so it shows scaling errors best."""
    worst: WorstIteration
    step_correlation: float | None
    """Least Pearson correlation, over pairs, of the losses' changes from one iteration to the next: near 0
    when the cases saw different batches. None when it cannot be computed (see `step_correlation`)."""
    loss_correlation: float | None
    """The same of the losses themselves. Blind to scale and offset: a loss scaled by 1.02 scores 0.99999."""
    grad_norm_max_rel_diff: float | None
    grad_norm_first_rel_diff: float | None
    gates: tuple[Gate, ...] = ()

    @property
    def failed(self) -> tuple[Gate, ...]:
        """The enforced gates that did not pass."""
        return tuple(gate for gate in self.gates if gate.enforced and not gate.passed)


def parity(
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
    judged: tuple[Gate, ...] | None = None,
) -> Parity:
    """Compares finite losses of shape (pairs, iterations), every iteration from the first on.

    Gradient norms are compared where both cases have them: clipping and Adam hide their scale from
    the loss. `float32` says that the losses were computed in that type, in which less is accepted.
    For the other arguments see `gates.gates`; `judged` are other gates in place of those.

    Raises:
        ValueError: the shapes differ or nothing is there to compare.
    """
    if baseline.shape != dcp.shape or baseline.size == 0:
        raise ValueError(f"losses to compare have shapes {baseline.shape} and {dcp.shape}")
    difference = dcp - baseline
    size = np.abs(difference)
    allowed = atol + rtol * np.abs(baseline)
    pair, index = np.unravel_index(int(np.argmax(size - allowed)), size.shape)
    steps = [step_correlation(b, d) for b, d in zip(baseline, dcp, strict=True)]
    losses = [correlation(b, d) for b, d in zip(baseline, dcp, strict=True)]
    norm_max = norm_first = None
    if baseline_grad_norm is not None and dcp_grad_norm is not None:
        norm_max, norm_first = _relative(baseline_grad_norm, dcp_grad_norm)
    judged = judged or gates(
        baseline,
        dcp,
        atol,
        rtol,
        baseline_grad_norm,
        dcp_grad_norm,
        float32=float32,
        first_step_rtol=first_step_rtol,
        control=control,
    )
    return Parity(
        passed=all(gate.passed or not gate.enforced for gate in judged),
        atol=atol,
        rtol=rtol,
        compared=size.size,
        outside=int((size > allowed).sum()),
        max_abs_diff=float(size.max()),
        mean_abs_diff=float(size.mean()),
        median_abs_diff=float(np.median(size)),
        mean_rel_diff=float((size / np.abs(baseline)).mean()) if (baseline != 0).all() else None,
        final_abs_diff=float(size[:, -FINAL:].mean()),
        first_iteration_diff=float(size[:, 0].max()),
        worst=WorstIteration(
            pair=int(pair),
            iteration=int(index) + 1,
            baseline=float(baseline[pair, index]),
            dcp=float(dcp[pair, index]),
            difference=float(difference[pair, index]),
            allowed=float(allowed[pair, index]),
        ),
        step_correlation=_least(steps),
        loss_correlation=_least(losses),
        grad_norm_max_rel_diff=norm_max,
        grad_norm_first_rel_diff=norm_first,
        gates=judged,
    )


def step_correlation(baseline: Values, dcp: Values) -> float | None:
    """Pearson correlation of first differences of two losses, shape (iterations,).

    None with fewer than three differences, or when one of the losses changes by the same amount in
    every step: then there is nothing to correlate.
    """
    return correlation(np.diff(baseline), np.diff(dcp))


def correlation(a: Values, b: Values) -> float | None:
    """Pearson correlation of two series, shape (n,); None with fewer than three values or when one is constant."""
    if a.size < 3:
        return None
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else None


def _least(values: list[float | None]) -> float | None:
    """The least of all; None where one is not known."""
    known = [value for value in values if value is not None]
    return min(known) if len(known) == len(values) else None


def _relative(baseline: Values, dcp: Values) -> tuple[float | None, float | None]:
    """(greatest, at iteration 1) relative difference, over the places where both have a positive norm."""
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.abs(dcp - baseline) / baseline
    relative = np.where(np.isfinite(relative), relative, -1.0)
    greatest, first = float(relative.max()), float(relative[:, 0].max())
    return (None if greatest < 0 else greatest), (None if first < 0 else first)
