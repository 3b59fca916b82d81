"""How often the interval of a lockstep launch covers the truth, and how often equal cases are called different.

    python benchmarks/lockstep.py [REPETITIONS]

Batches are lognormal; the noise of each pass resembles its neighbours' (first-order autoregressive); coming second
costs 3 %. Prints one row for each autocorrelation and number of measured iterations.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from dcpbench.stats.lockstep import Paired, decide_paired, paired

TRUTH = 1.05
SECOND = 0.03
NOISE = 0.02
MARGIN = 0.01
CORRELATIONS = (0.0, 0.5, 0.8)
COUNTS = (30, 100, 300)
_SETTLING = 50


def launch(draw: np.random.Generator, count: int, speedup: float, rho: float) -> Paired:
    """One lockstep launch of `count` measured iterations, judged."""
    batch = draw.lognormal(0.0, 0.4, count)
    shocks = draw.normal(0.0, NOISE * np.sqrt(1 - rho**2), (2, count + _SETTLING))
    noise = np.zeros_like(shocks)
    for index in range(1, noise.shape[1]):
        noise[:, index] = rho * noise[:, index - 1] + shocks[:, index]
    first: NDArray[np.bool_] = np.arange(count) % 2 == 0
    baseline = batch * np.exp(noise[0, _SETTLING:] + SECOND * ~first)
    dcp = batch / speedup * np.exp(noise[1, _SETTLING:] + SECOND * first)
    found = paired(baseline[None], dcp[None], first[None])
    assert found is not None
    return found


def main() -> None:
    """Prints the table."""
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    draw = np.random.default_rng(5)
    print(
        f"{'rho':>5} {'iterations':>10} {'covered':>8} {'half-width':>10} {'1.05 found':>10} {'A/A called apart':>20}"
    )
    for rho in CORRELATIONS:
        for count in COUNTS:
            real = [launch(draw, count, TRUTH, rho) for _ in range(repetitions)]
            same = [decide_paired(launch(draw, count, 1.0, rho), MARGIN) for _ in range(repetitions)]
            covered = np.mean([found.interval.low <= TRUTH <= found.interval.high for found in real])
            width = np.median([found.interval.half_width for found in real])
            power = np.mean([decide_paired(found, MARGIN) == "faster" for found in real])
            wrong = np.mean([verdict in ("faster", "slower") for verdict in same])
            print(f"{rho:5.1f} {count:10d} {covered:8.1%} {width:10.2%} {power:10.1%} {wrong:20.1%}")


if __name__ == "__main__":
    main()
