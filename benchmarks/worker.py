"""Iteration times of both cases on the short and the long workload; ours, and Megatron-LM's in the same sitting.

    python benchmarks/worker.py [--workloads short,long] [--iterations 40] [--warmup 10]
                                [--megatron CHECKOUT] [--set a.b=c ...]

Every row is a `dcpbench run` of one pair with the shapes, global batch and lengths of the shipped spec; with
--megatron each workload is run a second time through `pretrain_gpt.py` of that checkout. The last column is
Megatron-LM's trimmed mean over ours, so above 1 means that ours is faster. Absolute times differ between
machines and days; quote the ratios.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SPECS = {"short": "mock_2xh200", "long": "long_2xh200"}
CASES = ("baseline", "dcp")


def measure(spec: str, folder: Path, settings: list[str]) -> dict[str, dict[str, float | None]]:
    """The `cases` of `statistics.json` of one run; ends the benchmark where the run has no numbers."""
    command = [sys.executable, "-m", "dcpbench", "run", spec, "--pairs", "1", "--json", "--out", str(folder)]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        statistics = json.loads(done.stdout)
    except ValueError:
        sys.exit(f"{' '.join(command)} ended with {done.returncode} and printed no statistics")
    if statistics["faults"]:
        sys.exit("\n".join(fault["message"] for fault in statistics["faults"]))
    if done.returncode:
        print(f"{spec}: exit code {done.returncode}, verdict {statistics['verdict']}", file=sys.stderr)
    return statistics["cases"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="short,long", help="of: " + ", ".join(SPECS) + ", or spec files")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--megatron", type=Path, help="root of a Megatron-LM checkout")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="as `dcpbench run --set`")
    options = parser.parse_args()
    common = [f"training.iterations={options.iterations}", f"training.warmup_iterations={options.warmup}"]
    common += options.settings

    print(f"{'workload':14} {'trainer':12} {'case':9} {'mean ms':>9} {'median':>9} {'trimmed':>9} {'tokens/s':>10} "
          f"{'TFLOP/s':>8} {'ratio':>6}")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="dcpbench-worker-") as scratch:
        for workload in options.workloads.split(","):
            spec = SPECS.get(workload, workload)
            trainers = {"dcpbench": common}
            if options.megatron is not None:
                trainers["Megatron-LM"] = [
                    *common,
                    "runner=megatron_lm",
                    f"megatron.checkout={options.megatron.resolve()}",
                    # The tokens that its mock data have, and what configs/megatron_short_2xh200.yaml allows for them.
                    "data.tokens=counting",
                    "tolerances.loss_atol=0.1",
                    "tolerances.loss_rtol=0",
                    "tolerances.first_step_rtol=5e-4",
                ]
            ours: dict[str, float | None] = {}
            for trainer, settings in trainers.items():
                cases = measure(spec, Path(scratch) / f"{Path(workload).stem}-{trainer}", settings)
                for case in CASES:
                    found = cases[case]
                    trimmed, mine = found["trimmed_mean_ms"], ours.setdefault(case, found["trimmed_mean_ms"])
                    ratio = "" if trainer == "dcpbench" or not (trimmed and mine) else f"{trimmed / mine:.2f}"
                    numbers = (found["mean_ms"], found["median_ms"], trimmed, found["tokens_per_second"])
                    widths = zip((*numbers, found["tflops_per_gpu"]), (9, 9, 9, 10, 8), strict=True)
                    shown = " ".join(f"{'-' if x is None else format(x, ',.1f'):>{width}}" for x, width in widths)
                    print(f"{Path(workload).stem:14} {trainer:12} {case:9} {shown} {ratio:>6}", flush=True)


if __name__ == "__main__":
    main()
