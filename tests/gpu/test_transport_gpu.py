"""Transports on real GPUs, two or more of one host: what arrives is what was sent, whoever a rank meets next."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

WORKER = Path(__file__).parent.parent / "e2e" / "transport_worker.py"


def test_any_ranks_in_a_row_carry_exactly_what_was_sent(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={min(8, torch.cuda.device_count())}",
         "--standalone", str(WORKER), str(out), "cuda"],
        env={**os.environ, "OMP_NUM_THREADS": "4"}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert set(found) == {"collective", "symmetric", "symmetric, own barrier"}
    for name, numbers in found.items():
        assert numbers["compared"] > 100_000, name
        assert numbers["wrong"] == 0, name
