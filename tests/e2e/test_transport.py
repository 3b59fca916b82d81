"""What arrives is what was sent, to the bit, whoever a rank meets next; on gloo ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("transport_worker.py")


@pytest.mark.parametrize("ranks", [5])
def test_collectives_of_any_ranks_in_a_row_carry_exactly_what_was_sent(ranks: int, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d",
         "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(WORKER), str(out), "cpu"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["collective"]["compared"] > 1_000_000
    assert found["collective"]["wrong"] == 0
