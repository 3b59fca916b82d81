"""Attention and whole-model gradients on real gloo ranks against a single-rank float64 reference."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("cp_numerics_worker.py")
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    out = tmp_path_factory.mktemp("numerics") / "errors.json"
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=8", "--rdzv-backend=c10d",
         "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(WORKER), str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_attention_and_its_gradients_match_one_rank(errors: dict[str, dict[str, float]], size: int, dtype: str) -> None:
    assert errors["attention"][f"{size}/{dtype}"] < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("flavour", ["modern", "classic"])
def test_whole_model_gradients_match_one_rank(
    errors: dict[str, dict[str, float]], flavour: str, size: int, dtype: str
) -> None:
    assert errors["model"][f"{flavour}/{size}/{dtype}"] < TOLERANCE[dtype]
