"""How long `dcpbench plan` takes and how much memory, picture and page included, for growing batches and ranks.

Lengths: the mock distribution of `configs/mock_8xh200.yaml`. Wall-clock time depends on what else the machine does, so
processor time is printed beside it. Run it twice: the first run may compile.

    python benchmarks/planning.py [--padding minimal|megatron]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time

CASES = [(8, 64), (64, 512), (512, 4096), (512, 32768), (4096, 4096), (4096, 65536)]
"""Ranks and samples."""


def measured(arguments: list[str]) -> tuple[int, float, float, float]:
    """Exit status, wall-clock seconds, processor seconds and MiB at the peak of one command."""
    started = time.perf_counter()
    quiet = os.open(os.devnull, os.O_WRONLY)
    files = [(os.POSIX_SPAWN_DUP2, quiet, 1), (os.POSIX_SPAWN_DUP2, quiet, 2)]
    child = os.posix_spawn(sys.executable, [sys.executable, *arguments], os.environ, file_actions=files)
    _, status, used = os.wait4(child, 0)
    os.close(quiet)
    seconds = time.perf_counter() - started
    return os.waitstatus_to_exitcode(status), seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of dcpbench plan, picture included.")
    parser.add_argument("--padding", choices=["minimal", "megatron"], default="minimal")
    padding = parser.parse_args().padding
    print(f"{'N':>6}{'samples':>9}{'seconds':>9}{'CPU s':>8}{'MiB':>7}")
    for ranks, samples in CASES:
        with tempfile.TemporaryDirectory() as folder:
            code, wall, processor, memory = measured(
                ["-m", "dcpbench", "plan", "mock_8xh200", "--ranks", str(ranks), "--samples", str(samples)]
                + ["--set", f"cases.padding={padding}", "--out", folder]
            )
        print(f"{ranks:>6}{samples:>9}{wall:>9.1f}{processor:>8.1f}{memory:>7.0f}{'' if code == 0 else '  failed'}")


if __name__ == "__main__":
    main()
