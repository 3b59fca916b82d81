"""Losses and gradients do not depend on how a batch is split: known faults A-18 to A-21 and A-36 on 8 gloo ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("normalisation_worker.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("normalisation") / "found.json"
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=8", "--rdzv-backend=c10d",
         "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(WORKER), str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(out.read_text())


def test_a18_mean_of_per_rank_means(found: dict[str, Any]) -> None:
    assert found["statistics"]["ranks"] == 1.75


def test_a19_metric_summed_over_ranks_that_hold_the_same_number(found: dict[str, Any]) -> None:
    plans = found["plans"]
    for cp in (2, 4, 8):
        assert plans[f"fixed {cp}"]["loss"] == pytest.approx(plans["fixed 1"]["loss"], rel=1e-5)


def test_a20_extra_factor_of_the_cp_size(found: dict[str, Any]) -> None:
    plans = found["plans"]
    assert len(plans["dynamic"]["sizes"]) > 1
    assert plans["dynamic"]["loss"] == pytest.approx(plans["fixed 4"]["loss"], rel=1e-5)
    for cp in (1, 2, 4, 8):
        assert plans["dynamic"]["norm"] == pytest.approx(plans[f"fixed {cp}"]["norm"], rel=1e-5)


def test_a21_microbatch_means_averaged(found: dict[str, Any]) -> None:
    assert found["statistics"]["microbatches"] == 1.75


def test_a36_memory_per_communicator(found: dict[str, Any]) -> None:
    # Sizes 1, 2, 4 and 8 on 8 ranks: four pairs and two fours, of which each rank is in one and one.
    # Without Transformer Engine there is the domain's communicator and no other.
    assert found["groups"] == {"all": 6, "own": 2, "parent": 0}
