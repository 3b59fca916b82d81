"""How well `dcpbench calibrate` would predict on a machine whose costs are known, in many simulated calibrations.

    python benchmarks/calibration.py mock_2xh200 long_2xh200

The machine has the coefficients of the shipped measurement, floors of the host (20 ms alone, 25 ms on a group), in half
of the calibrations products that take 15 % longer with few rows than with many, clocks 3 % lower in training than in
bursts, and noise: 2 % on every time of a microbatch, 6 % on the host's, 0.8 % on iterations. One row for each
calibration: errors of microbatches and iterations held out, the pace and the constant that were found, and how far the
mean iteration of schedulers of which none was measured is missed. Nothing is run, and no GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from dcpbench import commands
from dcpbench.analysis.predicted import planned
from dcpbench.calibration import command, fit, points
from dcpbench.calibration.fit import Sample, paced
from dcpbench.data.prepare import prepare
from dcpbench.data.stream import SampleStream
from dcpbench.dcp import cost_profiles, schedulers
from dcpbench.dcp.cost_profiles import CostProfile
from dcpbench.dcp.iterations import PlannedIteration, iteration_times
from dcpbench.dcp.kernel_choice import starting_from
from dcpbench.dcp.timings import Timing, Timings
from dcpbench.spec import Spec

PROFILE = "h200-gpt-0.87b"
HOST, HOST_SHARED = 0.020, 0.025
NOISE, HOST_NOISE, ITERATION_NOISE = 0.02, 0.06, 0.008
PACE = 1.03
UNSEEN = ("dp_balanced", "laminar")
WINDOW = range(command.WARMUP + 1, command.ITERATIONS + 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="+", help="specs, by name or path")
    parser.add_argument("--seeds", type=int, default=8, help="calibrations of each machine")
    chosen = parser.parse_args(arguments)
    known = cost_profiles.load(cost_profiles.SHIPPED / f"{PROFILE}.json")
    heads = (
        "spec",
        "slow rows",
        "points",
        "microbatches",
        "95 %",
        "iterations",
        "pace",
        "constant ms",
        *UNSEEN,
        "usable",
    )
    print("  ".join(f"{head:>12}" for head in heads))
    for name in chosen.specs:
        spec = command.measured_spec(commands.resolve(Path(name), (), {}).spec)
        with TemporaryDirectory() as folder:
            prepare(spec, Path(folder) / "data")
            stream = SampleStream.open(Path(folder) / "data")
            for slow in (0.0, 0.15):
                for seed in range(chosen.seeds):
                    print("  ".join(f"{cell:>12}" for cell in row(spec, stream, known, slow, seed)))


def row(spec: Spec, stream: SampleStream, known: CostProfile, slow: float, seed: int) -> tuple[str, ...]:
    """One simulated calibration; `slow` is how much slower products are on few rows than on many."""
    random = np.random.default_rng(seed)
    start = cost_profiles.assumed(spec).cost
    truth = replace(known.cost, floor=HOST, floor_shared=HOST_SHARED)
    device = replace(truth, floor=0.0, floor_shared=0.0)
    scheduler = schedulers.of_case(spec, "dcp", None)
    lengths = np.concatenate([stream.lengths(stream.batch(i + 1)) for i in range(command.ITERATIONS)]).tolist()
    jobs = command.planned_jobs(spec, stream, start)
    chosen = points.choose(
        lengths, scheduler.group_sizes(), spec.cases.max_seqlen_per_dp_cp_rank, scheduler.padding, jobs
    )
    timed = []
    for point in chosen:
        rows = sum(point.lengths) / point.size
        efficiency = 1 + slow * (4096 / (4096 + rows) - 0.5)
        floor = HOST_SHARED if point.size > 1 else HOST
        seconds = max(
            device.job_time(point.lengths, point.size, scheduler.padding) * efficiency,
            floor * float(np.exp(random.normal(0, HOST_NOISE))),
        )
        timed.append(Timing(seconds=seconds * float(np.exp(random.normal(0, NOISE))), repetitions=1, spread=0.0))
    timings = Timings(backend=known.key.backend or "" if known.key else "", timings=tuple(timed))
    samples: list[Sample] = command.samples_of(chosen, timings, scheduler.padding)
    cost = fit.fit(samples, starting_from(start, timings.backend))
    judged = fit.judge(samples, cost)
    profile = known.model_copy(
        update={"coefficients": cost_profiles.coefficients_of(cost), "fit": judged, "iteration": None}
    )
    rest, trained = known.iteration_seconds, paced(truth, PACE)
    executed = list(planned(spec, "dcp", stream, None, WINDOW))
    noise = np.exp(random.normal(0, ITERATION_NOISE, len(executed)))
    profile = command.with_iterations(profile, executed, (iteration_times(executed, trained) + rest) * noise)
    assert profile.iteration is not None
    missed = []
    for name in UNSEEN:
        other = list(planned_by(spec, name, stream, profile))
        predicted = (iteration_times(other, profile.cost) + profile.iteration_seconds).sum()
        missed.append(f"{predicted / (iteration_times(other, trained) + rest).sum() - 1:+.1%}")
    return (
        spec.name,
        f"{slow:.0%}",
        str(len(samples)),
        f"{judged.mape:.1%}",
        f"{judged.p95:.1%}",
        f"{profile.iteration.mape:.1%}",
        f"{profile.iteration.pace:.3f}",
        f"{1e3 * profile.iteration_seconds:.1f}",
        *missed,
        "no" if profile.refused else "yes",
    )


def planned_by(spec: Spec, name: str, stream: SampleStream, profile: CostProfile) -> Sequence[PlannedIteration]:
    """The iterations as another scheduler plans them with the profile."""
    chosen = spec.cases.dcp.model_copy(update={"scheduler": name})
    changed = spec.model_copy(update={"cases": spec.cases.model_copy(update={"dcp": chosen})})
    return list(planned(changed, "dcp", stream, profile.cost, WINDOW))


if __name__ == "__main__":
    main()
