"""Losses and gradients under plans in which ranks have different jobs are those of every other plan."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("laminar_worker.py")


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_loss_and_gradients_do_not_depend_on_the_scheduler(ranks: int, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d",
         "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(WORKER), str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(out.read_text())
    for name in ("default_dynamic_cp", "laminar", "laminar any", "laminar even", "walking"):
        assert found[name]["loss"] == pytest.approx(found["dp_balanced"]["loss"], rel=1e-5), name
        assert 0 < found[name]["difference"] < 1e-5, name
        assert len(found[name]["sizes"]) > 1, name
    assert found["walking"]["sizes"] == list(range(1, ranks + 1))
    assert set(found["idle laminar"]["jobs"]) == {0, 1}  # ranks really have different numbers of jobs
    assert found["idle laminar"]["loss"] == pytest.approx(found["idle dp_balanced"]["loss"], rel=1e-5)
    assert found["idle laminar"]["difference"] < 1e-5
