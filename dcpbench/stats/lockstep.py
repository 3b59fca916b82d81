"""Lockstep: both cases computed every iteration at the same weights, so iterations are pairs, in time and in loss.

The interval of the speed-up stands on iterations, which resemble their neighbours: it counts as many of them as
are independent. It holds for the launch that was made; what differs from launch to launch it cannot know.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dcpbench.stats.bootstrap import mean_interval
from dcpbench.stats.gates import KAPPA, Gate, back_stop
from dcpbench.stats.interval import Interval, Speed, decide
from dcpbench.stats.throughput import log_ratios

Values = NDArray[np.float64]

FEWEST = 8
"""With fewer independent iterations nothing is decided."""
MOST = 100_000
"""More iterations than this `more_iterations` does not ask for."""
_MOST_CORRELATION = 0.95

LOSS = {True: 2e-6, False: 3e-4}
"""Accepted relative difference of losses at equal weights, by whether the compute type is float32."""
LOSS_BIAS = {True: 1e-6, False: 1e-4}
"""Accepted mean relative difference of losses."""
GRAD_NORM = {True: 1e-4, False: 1e-2}
"""Accepted relative difference of gradient norms."""
GRAD_NORM_BIAS = {True: 2e-5, False: 5e-4}
"""Accepted mean relative difference of gradient norms."""
GRADIENT = {True: 1e-4, False: 5e-2}
"""Accepted norm of the difference of gradients, relative to the norm."""


@dataclass(frozen=True)
class Paired:
    """What aligned iterations say of the speed-up, beside the interval."""

    interval: Interval
    iterations: int
    """Of all launches together."""
    correlation: float
    """Lag-1 autocorrelation of what an iteration adds to the logarithm of the speed-up, or of its own ratio."""
    effective: float
    """n (1 - rho) / (1 + rho): how many independent iterations these are worth."""


def paired(
    baseline: Values, dcp: Values, baseline_first: NDArray[np.bool_] | None, kept: NDArray[np.bool_] | None = None
) -> Paired | None:
    """The interval of exp(mean over launches of log(total baseline / total dcp)); times are (launches, iterations).

    The logarithm of a ratio of totals is, to first order, a mean over iterations of
    u = b / mean(b) - d / mean(d). From u goes the effect of coming second, which alternates; its spread and an
    autocorrelation give the standard error s / sqrt(n_eff), and Student's t with n_eff - 1 degrees of freedom the
    interval. The autocorrelation is the greater of those of u and of log(b / d), with Kendall's correction for short
    series and never below 0: u weighs iterations by their length, which hides how alike neighbours are.

    Args:
        baseline: seconds of the baseline.
        dcp: seconds of dcp in the same places.
        baseline_first: in which iterations the baseline came first; None where that is not known.
        kept: the iterations that count; None: all.

    Returns:
        None with fewer than four iterations.
    """
    used = np.ones(baseline.shape, dtype=np.bool_) if kept is None else kept
    series = [_influence(b[row], d[row]) for b, d, row in zip(baseline, dcp, used, strict=True) if row.any()]
    count = sum(part.size for part in series)
    if count < 4:
        return None
    first = None if baseline_first is None else baseline_first[used]
    series = _without_position(series, first)
    flat = np.concatenate(series)
    lost = len(series) + (first is not None and bool(first.any() and not first.all()))
    spread = float(np.sqrt((flat @ flat) / max(1, count - lost)))
    spread = spread if spread > 1e-12 else 0.0
    ratios = [np.log(b[row] / d[row]) for b, d, row in zip(baseline, dcp, used, strict=True) if row.any()]
    ratios = _without_position([part - part.mean() for part in ratios], first)
    rho = max(_correlation(series, count), _correlation(ratios, count)) if spread else 0.0
    effective = count * (1 - rho) / (1 + rho)
    logs = np.array(
        [np.log(b[row].sum() / d[row].sum()) for b, d, row in zip(baseline, dcp, used, strict=True) if row.any()]
    )
    mean, error, freedom = float(logs.mean()), spread / np.sqrt(effective), max(1.0, effective - 1)
    wide, narrow = (float(stats.t.ppf((1 + share) / 2, freedom) * error) for share in (0.95, 0.90))
    return Paired(
        Interval(
            pairs=int(effective),
            low=float(np.exp(mean - wide)),
            high=float(np.exp(mean + wide)),
            equivalence_low=float(np.exp(mean - narrow)),
            equivalence_high=float(np.exp(mean + narrow)),
            spread=spread,
            half_width=wide,
            p_value=None,
        ),
        count,
        rho,
        float(effective),
    )


def decide_paired(found: Paired | None, margin: float) -> Speed:
    """`interval.decide` on iterations; inconclusive with fewer than `FEWEST` independent ones."""
    if found is None or found.effective < FEWEST:
        return "inconclusive"
    return decide(found.interval, margin)


def more_iterations(found: Paired, baseline: Values, dcp: Values, margin: float) -> int | None:
    """How many more measured iterations would settle an inconclusive speed-up if mean and spread stay as they are.

    The half-width shrinks with the root of their number. None where even `MOST` would not do.
    """
    limit, mean = float(np.log1p(margin)), abs(float(log_ratios(baseline, dcp).mean()))
    ends = found.interval
    half = ends.half_width if mean > limit else float(np.log(ends.equivalence_high / ends.equivalence_low)) / 2
    distance = abs(mean - limit)
    if distance == 0 or half == 0:
        return None
    least = max(found.iterations * (half / distance) ** 2, found.iterations * FEWEST / found.effective)
    more = int(np.ceil(least)) - found.iterations
    return max(1, more) if more <= MOST else None


@dataclass(frozen=True)
class Sides:
    """What both sides computed at equal weights, shape (launches, iterations)."""

    baseline: Values
    """Losses of the baseline."""
    dcp: Values
    """Losses of dcp or, in an A/A control, of the baseline in its place."""
    baseline_grad_norm: Values | None = None
    """Gradient norms, NaN where a record has none."""
    dcp_grad_norm: Values | None = None
    difference: Values | None = None
    """Norm of the difference of gradients over the baseline's norm, NaN where a record has none."""
    segments: NDArray[np.bytes_] | None = None
    """Where in the model that difference is greatest."""

    @property
    def scale(self) -> Values:
        """The loss or, where that has become small, the mean one: rounding does not shrink as a loss does."""
        return _scale(np.abs(self.baseline))

    @property
    def loss(self) -> Values:
        """dcp's loss less the baseline's."""
        return self.dcp - self.baseline

    @property
    def norm(self) -> Values | None:
        """The same of gradient norms, relative; None where one of them is not known."""
        if self.baseline_grad_norm is None or self.dcp_grad_norm is None:
            return None
        if not _positive(self.baseline_grad_norm, self.dcp_grad_norm):
            return None
        apart: Values = (self.dcp_grad_norm - self.baseline_grad_norm) / _scale(self.baseline_grad_norm)
        return apart

    @property
    def gradient(self) -> Values | None:
        """Norm of the difference of gradients, relative; None where it is not known."""
        if self.norm is None or self.baseline_grad_norm is None or self.difference is None:
            return None
        if not np.isfinite(self.difference).all():
            return None
        apart: Values = self.difference * self.baseline_grad_norm / _scale(self.baseline_grad_norm)
        return apart


def lockstep_gates(
    sides: Sides, atol: float, rtol: float, *, float32: bool, control: Sides | None = None
) -> tuple[Gate, ...]:
    """S1 to S5 and L4; a gate for which there is no data is left out.

    At equal weights nothing grows from one iteration to the next, so every iteration counts as much as the first.

    Args:
        sides: both cases.
        atol: absolute difference of losses that is accepted at every gate.
        rtol: relative tolerance of the back-stop, L4.
        float32: whether they were computed in float32.
        control: the baseline on both sides, whose differences are the floors of all gates but L4.
    """
    loss, scale, several = sides.loss, sides.scale, sides.baseline.shape[1] > 1
    same = None if control is None else control.loss
    found = [
        _everywhere(
            "S1", "loss at equal weights, every iteration", np.abs(loss), np.maximum(LOSS[float32] * scale, atol),
            "a wrong scale of the loss, shifted labels, a lost sample, or attention across samples", same,
        )
    ]  # fmt: skip
    if several:
        found.append(
            _mean("S2", "bias of the loss at equal weights, relative, farther end of its 95 % interval", loss / scale,
                  max(LOSS_BIAS[float32], atol / float(scale.mean())),
                  "a small systematic error: a divisor, a mask, or tokens that one case leaves out",
                  None if control is None or same is None else same / control.scale)
        )  # fmt: skip
    found.append(back_stop(sides.baseline, sides.dcp, atol, rtol))
    norm, gradient = sides.norm, sides.gradient
    if norm is None:
        return tuple(found)
    same, allowed = None if control is None else control.norm, np.ones(norm.shape)
    found.append(
        _everywhere("S3", "gradient norm at equal weights, every iteration, relative", np.abs(norm),
                    GRAD_NORM[float32] * allowed, "gradients summed over the wrong ranks or divided twice", same)
    )  # fmt: skip
    if several:
        found.append(
            _mean("S4", "bias of the gradient norm, relative, farther end of its 95 % interval", norm,
                  GRAD_NORM_BIAS[float32], "a wrong scale of the gradients, which Adam hides from the loss", same,
                  # How far rounding moves norms in bfloat16 is not known well enough to fail on it, and the control,
                  # which adds in the same order on both sides, does not know it either.
                  enforced=float32)
        )  # fmt: skip
    if gradient is not None:
        found.append(
            _everywhere("S5", "difference of the gradients at equal weights, every iteration, relative to the norm",
                        gradient, GRADIENT[float32] * allowed,
                        "a contribution of a rank or a sample that is missing or counted twice",
                        None if control is None else control.gradient, sides.segments)
        )  # fmt: skip
    return tuple(found)


def _influence(baseline: Values, dcp: Values) -> Values:
    found: Values = baseline / baseline.mean() - dcp / dcp.mean()
    return found


def _without_position(series: list[Values], first: NDArray[np.bool_] | None) -> list[Values]:
    """The series less half the difference between iterations with the baseline first and those with dcp first."""
    if first is None or first.all() or not first.any():
        return series
    flat = np.concatenate(series)
    flat = np.where(first, flat - flat[first].mean(), flat - flat[~first].mean())
    return np.split(flat, np.cumsum([part.size for part in series])[:-1])


def _correlation(series: list[Values], count: int) -> float:
    """Lag-1 autocorrelation within launches, corrected for its downward bias (Kendall 1954), between 0 and 0.95."""
    products = sum(float(part[1:] @ part[:-1]) for part in series)
    squares = sum(float(part @ part) for part in series)
    rho = products / squares if squares > 0 else 0.0
    return float(np.clip(rho + (1 + 4 * rho) / count, 0.0, _MOST_CORRELATION))


def _scale(values: Values) -> Values:
    scale: Values = np.maximum(values, values.mean(axis=1, keepdims=True))
    return np.where(scale > 0, scale, 1.0)


def _positive(*norms: Values) -> bool:
    return all(bool((np.isfinite(values) & (values > 0)).all()) for values in norms)


def _everywhere(
    name: str,
    title: str,
    values: Values,
    least: Values,
    meaning: str,
    same: Values | None,
    segments: NDArray[np.bytes_] | None = None,
) -> Gate:
    """A gate on every iteration: the one that stands highest against its limit, and the first beyond it.

    `least` are the limits where the control's values `same` allow no more.
    """
    floor = None if same is None else float(np.abs(same).max())
    limits = np.maximum(least, KAPPA * (floor or 0.0))
    worst = np.unravel_index(int(np.argmax(values / np.maximum(limits, 1e-300))), values.shape)
    beyond = values > limits
    where = ""
    if beyond.any():
        iteration = int(np.flatnonzero(beyond.any(axis=0))[0])
        launch = int(np.flatnonzero(beyond[:, iteration])[0])
        where = (
            f"first at iteration {iteration + 1} of launch {launch + 1}, {int(beyond.sum())} of {beyond.size} beyond"
        )
        if segments is not None and segments[launch, iteration]:
            where += f", there most in {segments[launch, iteration].decode()}"
    return Gate(
        name, title, float(values[worst]), float(limits[worst]), floor, not beyond.any(), True, meaning, where
    )  # fmt: skip


def _mean(
    name: str, title: str, values: Values, least: float, meaning: str, same: Values | None, *, enforced: bool = True
) -> Gate:
    """A gate on the mean over iterations; `least` is its limit where the control's mean allows no more."""
    statistic, floor = _farther_end(values), None if same is None else _farther_end(same)
    limit = max(least, KAPPA * (floor or 0.0))
    return Gate(name, title, statistic, limit, floor, statistic <= limit, enforced, meaning)


def _farther_end(values: Values) -> float:
    """That of the 95 % interval of the mean over iterations, without its sign."""
    low, high = mean_interval(values.mean(axis=0))
    return max(abs(low), abs(high))
