"""Faults planted in the loss of one case of the real worker, in float32 on gloo ranks: loss parity catches each."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dcpbench import records
from dcpbench.data.prepare import prepare
from dcpbench.plan import build
from dcpbench.spec import Spec
from dcpbench.stats.parity import Parity, parity

LAUNCHER = Path(__file__).with_name("faulty_launches.py")
RANKS = 3
FAULTS = ("none", "scale", "shift", "drop")


def a_spec() -> Spec:
    return Spec.model_validate(
        {
            "model": {"layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 97},
            "topology": {"device": "cpu", "gpus_per_node": RANKS, "cp": RANKS},
            "training": {"iterations": 5, "warmup_iterations": 1, "global_batch_size": 5, "dtype": "float32"},
            "data": {"kind": "list", "lengths": [300, 40, 17, 90, 200, 33, 260], "tokens": "zipf"},
            "cases": {"max_seqlen_per_dp_cp_rank": 120},
            "launches": {"pairs": 1},
        }
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parity]:
    """Fault -> parity of a sound baseline and a dcp with it, with a back-stop of 5 % that catches little."""
    folder = tmp_path_factory.mktemp("faults")
    prepare(a_spec(), folder / "data")
    files, found = [], {}
    for fault in ("baseline", *FAULTS):
        case = 0 if fault == "baseline" else 1
        launch = build(a_spec(), folder / fault)[case].model_copy(update={"data": folder / "data"})
        launch.folder.mkdir(parents=True)
        launch.file.write_text(launch.model_dump_json())
        files.append(f"{fault}={launch.file}")
        found[fault] = launch.records
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(LAUNCHER), *files,
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[:3000]
    columns = {}
    for fault, path in found.items():
        rows = records.read(path).iterations
        columns[fault] = np.array([[row.loss for row in rows]]), np.array([[row.grad_norm for row in rows]])
    (loss, norm) = columns["baseline"]
    return {
        fault: parity(loss, columns[fault][0], 0.0, 0.05, norm, columns[fault][1], float32=True) for fault in FAULTS
    }


def test_without_a_fault_the_cases_agree(compared: dict[str, Parity]) -> None:
    assert compared["none"].passed
    assert compared["none"].max_abs_diff < 1e-5


@pytest.mark.parametrize("fault", ["scale", "shift", "drop"])
def test_a_planted_fault_fails_at_the_first_step(compared: dict[str, Parity], fault: str) -> None:
    failed = [gate.name for gate in compared[fault].failed]
    assert failed[0] == "L1", f"{fault}: {failed}"


def test_a_scale_of_a_thousandth_is_below_every_tolerance_but_those_of_the_early_gates(
    compared: dict[str, Parity],
) -> None:
    assert "L4" not in {gate.name for gate in compared["scale"].failed}
