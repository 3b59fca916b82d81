"""The symmetric transport itself, kernels and meetings, between processes that share memory; without a GPU."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("mapped_memory_worker.py")


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton, whose interpreter runs the kernels")
def test_partners_that_change_read_what_was_written_for_them(tmp_path: Path) -> None:
    out, memory = tmp_path / "found.json", tmp_path / "memory"
    memory.mkdir()
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--rdzv-backend=c10d",
         "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(WORKER), str(out), str(memory)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(out.read_text())
    for name in ("library", "own"):
        assert found[name]["compared"] > 100_000
        assert found[name]["wrong"] == 0
    # The whole domain met by the library's barrier beyond the one at the start, or by counters like any other group.
    assert found["library"]["barriers"] > 1
    assert found["own"]["barriers"] == 1
