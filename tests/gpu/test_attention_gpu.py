"""Attention on real GPUs: all backends against float32, on odd, tiny, huge and grouped packs (A-25 to A-35)."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

WORKER = Path(__file__).with_name("attention_gpu_worker.py")
BF16 = 8e-3
"""bfloat16 keeps 8 bits: outputs and gradients come with 2 to 4e-3 of rounding."""
SCALE = 5e-4
"""Rounding averages out of a projection over thousands of values; a factor of 1.001 does not."""


def measure(tmp_path: Path, *backends: str) -> list[dict[str, object]]:
    out = tmp_path / "results.json"
    count = min(8, torch.cuda.device_count())
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--standalone", str(WORKER),
         str(out), *([",".join(backends)] if backends else [])],
        env={**os.environ, "OMP_NUM_THREADS": "4"}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if "Error" in line or line.strip().startswith("[rank0]")]
    assert done.returncode == 0, "\n".join(errors[:40])
    return json.loads(out.read_text())


def test_our_backends_match_float32_and_repeat_bitwise(tmp_path: Path) -> None:
    results = measure(tmp_path)
    assert {r["backend"] for r in results} >= {"auto", "symmetric/flash", "collective/flash"}
    wrong = [r for r in results if max(r["errors"]) > BF16 or r["scale"] > SCALE or not r["repeatable"]]  # type: ignore[operator]
    assert not wrong


@pytest.mark.skipif(not find_spec("transformer_engine"), reason="needs Transformer Engine")
def test_transformer_engine_matches_float32(tmp_path: Path) -> None:
    results = measure(tmp_path, "te/p2p", "te/a2a", "te/all_gather")
    assert {r["backend"] for r in results} == {"te/p2p", "te/a2a", "te/all_gather"}
    wrong = [r for r in results if max(r["errors"]) > BF16 or r["scale"] > SCALE]  # type: ignore[type-var, operator]
    assert not wrong
