"""How fast logs are parsed, aligned, analysed and written, and how much memory that takes.

    python benchmarks/analysis.py [--iterations 500000] [--formats megatron native] [--folder DIR]

Writes one synthetic log for each case, of `--iterations` records each, then measures every stage in
one process. The target is one million iterations (both cases together) in 20 s and 1 GB on one core.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dcpbench import records
from dcpbench.analysis.pipeline import analyze
from dcpbench.analysis.sources import read_logs
from dcpbench.report import FILES
from dcpbench.spec import Tolerances

SAMPLES = 32


def _draws(iterations: int, case: str) -> Iterator[tuple[int, float, float, float]]:
    rng = np.random.default_rng(1 if case == "baseline" else 2)
    seconds = rng.gamma(20.0, 0.02, iterations) * (1.0 if case == "baseline" else 0.6)
    # The loss is nearly the same in both cases, as it is in a sound comparison.
    loss = 2 + 10 / np.sqrt(np.arange(1, iterations + 1)) + rng.normal(0, 1e-4, iterations)
    norm = rng.gamma(5.0, 1.0, iterations)
    for index in range(iterations):
        yield index + 1, float(seconds[index]), float(loss[index]), float(norm[index])


def megatron_log(path: Path, iterations: int, case: str) -> None:
    first = 0.0
    with path.open("w") as file:
        for iteration, seconds, loss, norm in _draws(iterations, case):
            shown = (first + seconds) / 2 if iteration == 2 else seconds
            first = seconds if iteration == 1 else first
            file.write(
                f" [2026-11-30 14:17:00.717373] iteration {iteration:8d}/{iterations:8d} | consumed samples: "
                f"{iteration * SAMPLES:12d} | elapsed time per iteration (ms): {1e3 * shown:.1f} | throughput per GPU "
                f"(TFLOP/s/GPU): 130.3 | learning rate: 1.000000E-05 | global batch size: {SAMPLES:5d} | lm loss: "
                f"{loss:.6E} | loss scale: 1.0 | grad norm: {norm:.3f} | number of skipped iterations:   0 | number of "
                "nan iterations:   0 |\n"
            )


def native_log(path: Path, iterations: int, case: str) -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(10_000, 60_000, iterations).tolist()
    consumed = 0
    with path.open("w") as file:
        for iteration, seconds, loss, norm in _draws(iterations, case):
            own = tokens[iteration - 1]
            consumed += own
            record = records.IterationRecord(
                iteration=iteration,
                consumed_samples=iteration * SAMPLES,
                consumed_tokens=consumed,
                samples=SAMPLES,
                tokens=own,
                padding_tokens=own // 50,
                squared_lengths=own * 900,
                longest=min(own, 8192),
                loss=loss,
                token_count=own - SAMPLES,
                grad_norm=norm,
                learning_rate=1e-4,
                seconds=seconds,
                scheduling_seconds=2e-4,
                microbatches=4,
                cp_sizes={1: 6, 2: 3},
                batch_digest=f"{iteration * 0x9E3779B97F4A7C15 % 2**64:016x}",
                peak_memory_bytes=2**34,
                tflops_per_gpu=130.3,
            )
            file.write(records.console_line(record, iterations) + "\n")


WRITERS: dict[str, Callable[[Path, int, str], None]] = {"megatron": megatron_log, "native": native_log}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=500_000, help="records of each of the two logs")
    parser.add_argument("--formats", nargs="+", choices=tuple(WRITERS), default=list(WRITERS))
    parser.add_argument("--folder", type=Path, default=None, help="where to keep the logs (default: a temporary one)")
    options = parser.parse_args()
    print(f"{'format':10} {'records':>9} {'log MB':>7} {'parse s':>8} {'analyse s':>10} {'write s':>8} {'total s':>8}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for format in options.formats:
            logs = []
            for case in ("baseline", "dcp"):
                path = folder / f"{format}-{case}-{options.iterations}.log"
                if not path.exists():
                    WRITERS[format](path, options.iterations, case)
                logs.append(path)
            start = time.perf_counter()
            source = read_logs(logs[:1], logs[1:], format)
            parsed = time.perf_counter()
            analysis = analyze(source, iterations=None, warmup=10, global_batch_size=SAMPLES, tolerances=Tolerances())
            analysed = time.perf_counter()
            written = sum(len(write(analysis) or b"") for write in FILES.values())
            end = time.perf_counter()
            if analysis.faults or not written:
                print(f"{format}: {analysis.faults[:3]}", file=sys.stderr)
                return 1
            print(
                f"{format:10} {2 * options.iterations:9,} {sum(p.stat().st_size for p in logs) / 1e6:7.0f} "
                f"{parsed - start:8.2f} {analysed - parsed:10.2f} {end - analysed:8.2f} {end - start:8.2f}"
            )
            del source, analysis
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this process: {peak:,.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
