"""Coefficients of the cost model from timed microbatches: non-negative least squares on relative errors.

The model is linear in base, token, square (of each attention kernel), the latency of a hop and the inverse of its
bandwidth, apart from three maxima: the host's floor, and in each direction the hop that attention hides. Which
microbatches a maximum decides is not known beforehand, so:

- for each `overlap` of a few, and each number of quickest microbatches taken to stand on a floor (on one rank, and on
  groups), the rest is fitted by linear non-negative least squares in a few passes, each with the exposed hops of the
  pass before; the choice with the least error wins;
- a bounded non-linear fit of all coefficients together polishes it.

`merge` is kept at 0: on any one group size it cannot be told from the bandwidth of a hop, which therefore is an
effective one, with all the work that sharing keys and values costs per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from dcpbench.dcp.cost_profiles import CostProfile, Fit
from dcpbench.dcp.costs import CostModel, Link

Floats = NDArray[np.float64]

MAPE_LIMIT, P95_LIMIT = 0.05, 0.10
"""Nothing is predicted with a fit that misses microbatches held out by more: on average, and 95 % of them.
Planning with coefficients that are 5 % off costs up to 1.6 % of the step, 10 % off up to 3 %, and 30 % off up to
9 % on average and so more than planning without a model (a study of the scheduler with randomly wrong coefficients).
The host and clocks move a single microbatch of 30 ms by a few per cent from one time to the next, which whole
iterations average out: what is common to all microbatches shows there, so these have a limit of their own."""
ITERATION_LIMIT = 0.03
"""The same for whole iterations held out one at a time, on average: of the 5 % that predictions promise, the rest is
for other plans than those of `default_dynamic_cp`."""
OVERLAPS = (0.0, 0.25, 0.5, 1.0)
PRIOR = 0.003
"""Weight of the coefficients that the fit starts from, scaled to the samples, as a relative error of each: they decide
only what the samples leave open, such as the time of a token where every microbatch stands on the host's floor."""
PASSES = 3
SOFT = 0.03
"""Relative errors beyond this count linearly, not squared: one disturbed microbatch must not bend the fit."""
FREE = 0.1
"""A token that takes less than this share of what data sheets give it, scaled to the quickest microbatch, is free."""
FASTEST = 1e15
"""Bandwidth, in bytes per second, of a hop that was too quick to be measured."""


@dataclass(frozen=True)
class Sample:
    """One timed microbatch: group size, padded tokens, squares as `costs.squares_of` adds them, seconds."""

    size: int
    tokens: float
    squares: float
    seconds: float
    kind: str = "mixed"
    held_out: bool = False
    real: float | None = None
    """The sum of squared real lengths, which decides the attention kernel; None: that of short key ranges."""


def fit(samples: Sequence[Sample], start: CostModel) -> CostModel:
    """The cost model fitted to the samples that are not held out.

    Args:
        samples: at least four on one rank that are not held out.
        start: layers, bytes of a hop, node size, the links between nodes, and from when on there is a second attention
            kernel come from it; where no sample has a group of several ranks, everything about groups does.

    Raises:
        ValueError: too few samples.
    """
    used = [sample for sample in samples if not sample.held_out]
    if sum(sample.size == 1 for sample in used) < 4:
        raise ValueError("a fit needs at least four microbatches on one rank")
    data = _Data(used, start)
    best: tuple[bool, float, CostModel] | None = None
    for overlap, on_floor in product(OVERLAPS if data.shared.any() else (start.overlap,), data.floors()):
        model = data.linear(overlap, on_floor)
        # A floor must earn its place: an error that is only as small without it is better. But where all microbatches
        # take the same time, tokens are not free of cost: it is the host that is timed, and they stand on its floor.
        score = data.loss(model) * (1 + 0.02 * ((model.floor > 0) + (model.floor_shared > 0)))
        candidate = data.tokens_are_free(model), score, model
        if best is None or candidate[:2] < best[:2]:
            best = candidate
    assert best is not None
    polished = data.polish(best[2])
    better = data.loss(polished) < data.loss(best[2]) and data.tokens_are_free(polished) <= best[0]
    return polished if better else best[2]


def judge(samples: Sequence[Sample], cost: CostModel) -> Fit:
    """How well a cost model describes the samples; those held out decide whether it may be used.

    Errors are relative to a sample's own time or, where that is less, to the mean time of those held out: in an
    iteration errors add up in seconds, and a microbatch that takes little decides little.
    """
    errors = relative_errors(samples, cost)
    held = np.array([sample.held_out for sample in samples], np.bool_)
    among = held if held.any() else ~held
    seconds = np.array([sample.seconds for sample in samples])
    judged = (np.abs(errors) * np.minimum(1.0, seconds / seconds[among].mean()))[among]
    mape, p95 = float(judged.mean()), float(np.quantile(judged, 0.95))
    refused = None
    if mape > MAPE_LIMIT or p95 > P95_LIMIT:
        refused = (
            f"its fit is poor: microbatches held out are missed by {mape:.1%} on average (limit {MAPE_LIMIT:.0%}) and "
            f"95 % of them by up to {p95:.1%} (limit {P95_LIMIT:.0%}), most of all {worst(samples, errors)}; "
            "calibrate again on an idle machine"
        )
    fitted = np.abs(errors[~held]) if not held.all() else judged
    return Fit(
        points=int((~held).sum()),
        held_out=int(held.sum()),
        mape=mape,
        p95=p95,
        fitted_mape=float(fitted.mean()),
        most_tokens=int(max(sample.tokens / sample.size for sample in samples)),
        sizes=tuple(sorted({sample.size for sample in samples})),
        refused=refused,
    )


def paced(cost: CostModel, pace: float) -> CostModel:
    """The model with all that the device does `pace` times as long, and the host as it was."""
    hop = cost.within
    return replace(
        cost,
        base=pace * cost.base,
        token=pace * cost.token,
        square=pace * cost.square,
        merge=pace * cost.merge,
        within=Link(pace * hop.latency, hop.bandwidth / pace),
        long=cost.long and replace(cost.long, square=pace * cost.long.square),
    )


def timed_apart(profile: CostProfile) -> CostModel:
    """The cost model as it was fitted to microbatches, before it was brought to the pace of iterations."""
    return paced(profile.cost, 1 / profile.iteration.pace) if profile.iteration else profile.cost


def relative_errors(samples: Sequence[Sample], cost: CostModel) -> Floats:
    """(predicted - measured) / measured, shape (samples,)."""
    return np.array([cost.time(s.size, s.tokens, s.squares, s.real) / s.seconds - 1 for s in samples], np.float64)


TERMS = {
    "linear": "short samples (base, token)",
    "attention": "long samples (square)",
    "shared": "samples shared by a group (hop latency and bandwidth)",
    "mixed": "samples as the data have them",
}


def worst(samples: Sequence[Sample], errors: Floats) -> str:
    """The kind and group size that are missed the most on average, in words."""
    groups: dict[tuple[str, int], list[float]] = {}
    for sample, error in zip(samples, errors.tolist(), strict=True):
        groups.setdefault((sample.kind, sample.size), []).append(error)
    kind, size = max(groups, key=lambda group: float(np.mean(np.abs(groups[group]))))
    mean = float(np.mean(groups[kind, size]))
    return f"{TERMS.get(kind, kind)} on CP size {size} ({mean:+.1%})"


class _Data:
    """The samples as arrays, and the ways to fit them."""

    def __init__(self, samples: Sequence[Sample], start: CostModel) -> None:
        self._start = start
        self._samples = samples
        self._size = np.array([s.size for s in samples], np.float64)
        self._local = np.array([s.tokens for s in samples], np.float64) / self._size
        self._squares = np.array([s.squares for s in samples], np.float64)
        self._real = np.array([0.0 if s.real is None else s.real for s in samples], np.float64)
        self._long = np.zeros(len(samples), np.bool_)
        for number, sample in enumerate(samples if start.long is not None else ()):
            own = slice(number, number + 1)
            assert start.long is not None
            self._long[own] = start.long.serves(sample.size, self._local[own] * sample.size, self._real[own])
        self._seconds = np.array([s.seconds for s in samples], np.float64)
        self.shared: NDArray[np.bool_] = self._size > 1
        # Where the host is the slower one, samples tell nothing of the device; the others have the least ratios.
        scale = float((self._seconds / self.times(start)).min())
        long = 0.0 if start.long is None else start.long.square
        guess = (start.base, start.token, start.square, long, start.within.latency, 1 / start.within.bandwidth)
        self._guess: Floats = scale * np.maximum(np.array(guess, np.float64), 1e-18)

    def floors(self) -> Iterator[NDArray[np.bool_]]:
        """Sets of samples that may stand on a floor: the quickest of one rank with the quickest of groups."""
        for alone, shared in product(self._quickest(~self.shared), self._quickest(self.shared)):
            yield alone | shared

    def _quickest(self, among: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
        order = [index for index in np.argsort(self._seconds, kind="stable") if among[index]]
        sets = []
        # One alone would be described by a floor of its own, whatever it is.
        for count in (0, *range(2, len(order) + 1)):
            chosen = np.zeros(len(self._seconds), np.bool_)
            chosen[order[:count]] = True
            sets.append(chosen)
        return sets

    def times(self, model: CostModel) -> Floats:
        """What a model predicts."""
        predicted = np.empty_like(self._seconds)
        for size in np.unique(self._size):
            own = self._size == size
            predicted[own] = model.times(int(size), self._local[own] * size, self._squares[own], self._real[own])
        return predicted

    def tokens_are_free(self, model: CostModel) -> bool:
        """Whether a model has tokens that take no time worth mentioning, which none does."""
        return model.token < FREE * float(self._guess[1])

    def loss(self, model: CostModel) -> float:
        """Sum of squared relative errors, linear beyond `SOFT`."""
        z = ((self.times(model) / self._seconds - 1) / SOFT) ** 2
        return float((2 * (np.sqrt(1 + z) - 1)).sum())

    def linear(self, overlap: float, on_floor: NDArray[np.bool_]) -> CostModel:
        """The non-negative least squares fit of the samples that stand on no floor."""
        start, rest = self._start, ~on_floor
        exposed = np.stack([self.shared, self.shared], axis=1).astype(np.float64)
        shares = np.array([start.forward_share, 1 - start.forward_share])
        sent = np.array(start.hop_bytes)
        hops = start.layers * (self._size - 1)
        hidden = overlap * self._squares / self._size**2 / start.layers
        model = start
        for _ in range(PASSES):
            attention = self._squares / self._size - hops * hidden * (exposed @ shares)
            columns = np.stack(
                [
                    np.ones_like(self._local),
                    self._local,
                    np.where(self._long, 0.0, attention),
                    np.where(self._long, attention, 0.0),
                    hops * exposed.sum(axis=1),
                    hops * self._local * (exposed @ sent),
                ],
                axis=1,
            )
            # In multiples of the guess, so that all columns are of one size.
            rows = np.vstack([columns[rest] * self._guess / self._seconds[rest, None], PRIOR * np.eye(6)])
            found = nnls(rows, np.concatenate([np.ones(int(rest.sum())), np.full(6, PRIOR)]))[0] * self._guess
            base, token, square, long, latency, inverse = found.tolist()
            model = replace(
                self._with(base, token, square, long, latency, inverse),
                overlap=overlap,
                floor=_median(self._seconds[on_floor & ~self.shared]),
                floor_shared=_median(self._seconds[on_floor & self.shared]),
            )
            behind = hidden * np.where(self._long, long, square)
            hop = latency + sent[None, :] * self._local[:, None] * inverse - behind[:, None] * shares
            exposed = ((hop > 0) & self.shared[:, None]).astype(np.float64)
        return model

    def _with(self, base: float, token: float, square: float, long: float, latency: float, inverse: float) -> CostModel:
        start = self._start
        link = Link(latency, min(FASTEST, 1 / inverse) if inverse > 0 else FASTEST)
        return replace(
            start,
            assumed=False,
            base=base,
            token=max(token, 1e-15),
            square=square,
            long=None if start.long is None else replace(start.long, square=long),
            merge=0.0 if self.shared.any() else start.merge,
            within=link if self.shared.any() else start.within,
            # A host is not slower on a group that it never ran.
            floor=0.0,
            floor_shared=0.0,
        )

    def polish(self, model: CostModel) -> CostModel:
        """All coefficients of `model` that are above zero, fitted together as multiples of what they are."""
        names = [name for name in ("base", "token", "square", "floor", "floor_shared") if getattr(model, name) > 0]
        links = self.shared.any() and model.within.bandwidth < FASTEST
        second = model.long is not None and self._long.any() and model.long.square > 0

        def scaled(multiples: Floats) -> CostModel:
            values = {name: getattr(model, name) * float(m) for name, m in zip(names, multiples, strict=False)}
            if second:
                assert model.long is not None
                values["long"] = replace(model.long, square=model.long.square * float(multiples[-1]))
            if links:
                latency, bandwidth = (float(m) for m in multiples[len(names) : len(names) + 2])
                values["within"] = Link(model.within.latency * latency, model.within.bandwidth / bandwidth)
            return replace(model, **values)

        count = len(names) + 2 * links + second

        def residuals(multiples: Floats) -> Floats:
            return self.times(scaled(multiples)) / self._seconds - 1

        found = least_squares(
            residuals,
            np.ones(count),
            bounds=(np.full(count, 0.05), np.full(count, 20.0)),
            loss="soft_l1",
            f_scale=SOFT,
            max_nfev=200,
        )
        return scaled(found.x)


def _median(values: Floats) -> float:
    return float(np.median(values)) if values.size else 0.0
