"""How often the verdict on simulated campaigns is right, and how often the interval covers the truth.

    python benchmarks/campaigns.py [--campaigns 400] [--pairs 6 10] [--seed 1]

A campaign is P pairs of launches in balanced order. Times of its iterations are a batch's work, the
same in both cases, times: what the launch as a whole is off by (1 %), a random walk within the
launch (1 % from start to end), autocorrelated noise, spikes, and, by scenario,

    drift      the machine slows down by 0.5 % a launch, on a random walk of 0.5 % besides
    position   the first launch of a pair is 1 % slower
    tails      what a launch is off by is Student's t with 3 degrees of freedom instead of normal
    all        the three together

The table says how often the 95 % interval covers the true speed-up, and the share of each verdict.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcpbench.stats.interval import decide, interval
from dcpbench.stats.throughput import log_ratios

EFFECTS = (1.0, 1.02, 1.05)
SCENARIOS = ("plain", "drift", "position", "tails", "all")
ITERATIONS = 100
MARGIN = 0.01

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    covered: float
    """Share of campaigns whose 95 % interval holds the true speed-up."""
    half_width: float
    """Mean half-width of the interval of the logarithm."""
    verdicts: dict[str, float]
    """Share of campaigns by verdict."""


def campaign(rng: np.random.Generator, pairs: int, effect: float, scenario: str) -> tuple[Values, Values]:
    """Iteration times of baseline and dcp, each of shape (pairs, iterations)."""
    launches, shape = 2 * pairs, (2 * pairs, ITERATIONS)
    tails, drift, position = (scenario in (name, "all") for name in ("tails", "drift", "position"))
    # Student's t with 3 degrees of freedom has variance 3.
    level = 0.01 * (rng.standard_t(3, launches) / np.sqrt(3) if tails else rng.normal(0, 1, launches))
    if drift:
        level += 0.005 * np.arange(launches) + np.cumsum(rng.normal(0, 0.005, launches))
    if position:
        level[0::2] += 0.01
    walk = np.cumsum(rng.normal(0, 0.01 / np.sqrt(ITERATIONS), shape), axis=1)
    noise = rng.normal(0, 0.02, shape)
    for i in range(1, ITERATIONS):
        noise[:, i] += 0.5 * noise[:, i - 1]
    spikes = np.where(rng.random(shape) < 0.01, rng.exponential(0.5, shape), 0.0)
    times = rng.gamma(4, 0.25, ITERATIONS) * np.exp(level[:, None] + walk + noise + spikes)
    first, second = times[0::2], times[1::2]
    baseline_first = ((np.arange(pairs) + rng.integers(2)) % 2 == 0)[:, None]
    baseline, dcp = np.where(baseline_first, first, second), np.where(baseline_first, second, first)
    return baseline, dcp / effect


def simulate(campaigns: int, pairs: int, effect: float, scenario: str, seed: int) -> Outcome:
    """Judges many campaigns as dcpbench judges one."""
    rng = np.random.default_rng([seed, pairs, round(1000 * effect), SCENARIOS.index(scenario)])
    verdicts: Counter[str] = Counter()
    covered, widths = 0, []
    for _ in range(campaigns):
        found = interval(log_ratios(*campaign(rng, pairs, effect, scenario)))
        assert found is not None
        covered += found.low <= effect <= found.high
        widths.append(found.half_width)
        verdicts[decide(found, MARGIN)] += 1
    shares = {name: count / campaigns for name, count in verdicts.items()}
    return Outcome(covered / campaigns, float(np.mean(widths)), shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--campaigns", type=int, default=400)
    parser.add_argument("--pairs", type=int, nargs="+", default=[6, 10])
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    names = ("faster", "equivalent", "inconclusive", "slower")
    print("| pairs | speed-up | scenario | covered | half-width | " + " | ".join(names) + " |")
    print("|---:|---:|---|---:|---:|" + "---:|" * len(names))
    for pairs in asked.pairs:
        pooled = []
        for effect in EFFECTS:
            for scenario in SCENARIOS:
                found = simulate(asked.campaigns, pairs, effect, scenario, asked.seed)
                pooled.append(found.covered)
                shares = " | ".join(f"{found.verdicts.get(name, 0.0):.1%}" for name in names)
                print(
                    f"| {pairs} | {effect:g} | {scenario} | {found.covered:.1%} | {found.half_width:.1%} | {shares} |"
                )
        print(f"| {pairs} | all | all rows | {np.mean(pooled):.1%} | | | | | |")


if __name__ == "__main__":
    main()
