"""Faults planted in the loss of one case of the real worker, in bfloat16 on two GPUs: loss parity catches each.

One process for each rank trains every launch in turn, so that the whole takes about as long as starting torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dcpbench import records
from dcpbench.data.prepare import prepare
from dcpbench.plan import build
from dcpbench.spec import Spec
from dcpbench.stats.parity import Parity, parity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
LAUNCHER = Path(__file__).parents[1] / "e2e" / "faulty_launches.py"
RANKS = 2
FAULTS = ("none", "scale", "shift", "drop")
LAUNCHED = ("baseline", "baseline again", *FAULTS)
SHIPPED = 2e-3
"""The back-stop of the shipped specs for two GPUs: twice the planted scale, so it does not see that."""


def a_spec(device: str = "cuda") -> Spec:
    # A wide initial distribution: where all tokens are about as likely, other labels have about the same loss.
    model = {
        "flavour": "classic",
        "layers": 2,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "attention_heads": 4,
        "vocab_size": 1009,
        "init_std": 0.1,
    }
    return Spec.model_validate(
        {
            "model": model,
            "topology": {"device": device, "gpus_per_node": RANKS, "cp": RANKS},
            "training": {"iterations": 20, "warmup_iterations": 1, "global_batch_size": 6, "dtype": "bfloat16"},
            "data": {"kind": "list", "lengths": [1900, 40, 17, 900, 1200, 33, 260], "tokens": "zipf"},
            "cases": {"max_seqlen_per_dp_cp_rank": 1000},
            "launches": {"pairs": 1},
        }
    )


def launched(folder: Path, device: str = "cuda") -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Launch -> its losses and gradient norms, each of shape (1, iterations)."""
    prepare(a_spec(device), folder / "data")
    found = {}
    for name in LAUNCHED:
        case = 0 if name.startswith("baseline") else 1
        launch = build(a_spec(device), folder / name.replace(" ", "-"))[case].model_copy(
            update={"data": folder / "data"}
        )
        launch.folder.mkdir(parents=True)
        launch.file.write_text(launch.model_dump_json())
        found[name] = launch
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(LAUNCHER),
        *(f"{name}={launch.file}" for name, launch in found.items()),
    ]  # fmt: skip
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    columns = {}
    for name, launch in found.items():
        rows = records.read(launch.records).iterations
        assert len(rows) == launch.spec.training.iterations, name
        columns[name] = np.array([[row.loss for row in rows]]), np.array([[row.grad_norm for row in rows]])
    return columns


def compared(columns: dict[str, tuple[np.ndarray, np.ndarray]], fault: str) -> Parity:
    """Two pairs: the sound baseline twice, so that rounding between launches has its floor, and one dcp twice."""
    baseline = [np.concatenate(pair) for pair in zip(columns["baseline"], columns["baseline again"], strict=True)]
    dcp = [np.concatenate([values, values]) for values in columns[fault]]
    return parity(baseline[0], dcp[0], 0.0, SHIPPED, baseline[1], dcp[1])


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return launched(tmp_path_factory.mktemp("faults"))


def test_without_a_fault_the_cases_agree(columns: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    found = compared(columns, "none")
    assert found.passed, [(gate.name, gate.statistic, gate.limit, gate.floor) for gate in found.failed]


@pytest.mark.parametrize("fault", ["scale", "shift", "drop"])
def test_a_planted_fault_fails_at_the_first_step(columns: dict[str, tuple[np.ndarray, np.ndarray]], fault: str) -> None:
    gates = {gate.name: gate for gate in compared(columns, fault).gates}
    assert gates["L1"].enforced
    assert not gates["L1"].passed, f"{fault}: {gates['L1'].statistic:.3g}, allowed {gates['L1'].limit:.3g}"


def test_one_launch_of_each_case_is_enough(columns: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """The first step's limit needs no floor: a planted fault shows in a single pair too."""
    (loss, norm) = columns["baseline"]
    for fault in ("scale", "shift", "drop"):
        found = parity(loss, columns[fault][0], 0.0, SHIPPED, norm, columns[fault][1])
        assert "L1" in {gate.name for gate in found.failed}, fault
    sound = parity(loss, columns["none"][0], 0.0, SHIPPED, norm, columns["none"][1])
    assert sound.passed, [(gate.name, gate.statistic, gate.limit) for gate in sound.failed]
