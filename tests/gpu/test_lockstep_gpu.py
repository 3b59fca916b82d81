"""Lockstep on two GPUs, in bfloat16: the cases agree at equal weights, a fault planted in one of them is caught.

One process for each rank runs every launch in turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcpbench import plan, records
from dcpbench.analysis.pipeline import Analysis, analyze_run
from dcpbench.data.prepare import prepare
from dcpbench.runfolder import layout as runfolder
from dcpbench.runfolder import ledger
from dcpbench.spec import Spec
from dcpbench.stats.lockstep import GRAD_NORM, GRAD_NORM_BIAS, GRADIENT, LOSS_BIAS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
LAUNCHER = Path(__file__).parents[1] / "e2e" / "lockstep_launches.py"
ITERATIONS = 12
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sound": ("none", {}),
    "sharded": ("none", {"training": {"optimizer_sharding": True}}),
    "same": ("none", {"cases": {"dcp": {"scheduler": "dp_balanced"}}}),
    "scale": ("scale", {}),
    "gradient": ("gradient", {}),
}

CONTROLLED = ("sound", "scale")
"""Runs with an A/A control."""


def a_spec(changes: dict[str, Any]) -> Spec:
    parts: dict[str, Any] = {
        "mode": "lockstep",
        "model": {"flavour": "modern", "layers": 2, "hidden_size": 256, "ffn_hidden_size": 512, "attention_heads": 4,
                  "vocab_size": 1009, "init_std": 0.1},
        "topology": {"device": "cuda", "gpus_per_node": 2, "cp": 2},
        "training": {"iterations": ITERATIONS, "warmup_iterations": 2, "global_batch_size": 6, "dtype": "bfloat16"},
        "data": {"kind": "list", "lengths": [1900, 40, 17, 900, 1200, 33, 260], "tokens": "zipf"},
        "cases": {"max_seqlen_per_dp_cp_rank": 1000},
    }  # fmt: skip
    for name, change in changes.items():
        parts[name] = {**parts[name], **change}
    return Spec.model_validate(parts)


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Analysis]]:
    root = tmp_path_factory.mktemp("lockstep")
    arguments = []
    for name, (fault, changes) in RUNS.items():
        spec, folder = a_spec(changes), root / name
        launches = plan.build(spec, folder)
        if name in CONTROLLED and (control := plan.lockstep_control(launches)) is not None:
            launches.append(control)
        runfolder.describe(runfolder.RunFolder(folder), spec, launches)
        prepare(spec, folder / "data")
        for launch in launches:
            launch.folder.mkdir(parents=True)
            launch.file.write_text(launch.model_dump_json())
            planted = "none" if launch.id == plan.LOCKSTEP_CONTROL else fault
            arguments.append(f"{planted}={launch.file}")
            ledger.append(folder / "ledger.jsonl", "start", launch.id)
            ledger.append(folder / "ledger.jsonl", "end", launch.id, status="completed", exit_code=0, reason=None)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(LAUNCHER), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    return {name: (root / name, analyze_run(root / name)) for name in RUNS}


@pytest.mark.parametrize("run", ["sound", "sharded", "same"])
def test_cases_agree_at_equal_weights(analysed: dict[str, tuple[Path, Analysis]], run: str) -> None:
    folder, result = analysed[run]
    assert result.parity is not None
    shown = [(gate.name, gate.statistic, gate.limit) for gate in result.parity.gates]
    assert result.parity.passed, shown
    found = records.read(folder / "launches" / "01-lockstep" / "records.jsonl")
    for record in found.iterations:
        assert record.seconds is not None
        assert record.pass_seconds is not None
        assert record.update_seconds is not None
        assert 0 < record.update_seconds < record.seconds
        assert record.pass_seconds <= record.seconds <= record.pass_seconds + record.update_seconds + 1e-9
    differences = np.array([record.gradient_difference for record in found.iterations], dtype=float)
    assert differences.max() < 0.05
    if run != "same":
        assert differences.max() > 0


@pytest.mark.parametrize("run", CONTROLLED)
def test_the_control_shows_what_the_places_do_to_each_other(
    analysed: dict[str, tuple[Path, Analysis]], run: str
) -> None:
    result = analysed[run][1]
    control = result.lockstep_control
    assert control is not None, result.cautions
    assert (control.id, control.scheduler) == (plan.LOCKSTEP_CONTROL, "dp_balanced")
    assert control.iterations == ITERATIONS - 2
    assert control.interval is not None
    assert control.speedup == pytest.approx(1.0, abs=0.5)
    assert control.order_effect is not None
    assert control.memory_difference is not None
    # Both sides hold the same activations; only the allocator's rounding may differ.
    assert abs(control.memory_difference) < 2**26
    assert control.baseline_memory_beside_dcp is not None
    assert result.parity is not None
    gates = {gate.name: gate for gate in result.parity.gates}
    # The same computation twice cannot use up what a gate allows anyway: no limit is wider than without a control.
    limits = {"S2": LOSS_BIAS[False], "S3": GRAD_NORM[False], "S4": GRAD_NORM_BIAS[False], "S5": GRADIENT[False]}
    assert {name: gates[name].limit for name in limits} == pytest.approx(limits)
    floors = [gates[name].floor for name in ("S1", *limits)]
    assert all(floor is not None and np.isfinite(floor) for floor in floors), floors
    assert not gates["S4"].enforced
    assert control.loss_difference_max == gates["S1"].floor


def test_a_scale_of_a_thousandth_in_one_case_is_caught(analysed: dict[str, tuple[Path, Analysis]]) -> None:
    parity = analysed["scale"][1].parity
    assert parity is not None
    failed = {gate.name: gate for gate in parity.failed}
    assert {"S1", "S2"} <= set(failed)
    assert failed["S1"].where.startswith("first at iteration 1 of launch 1")
    assert "L4" not in failed


def test_a_gradient_that_no_loss_shows_is_placed(analysed: dict[str, tuple[Path, Analysis]]) -> None:
    parity = analysed["gradient"][1].parity
    assert parity is not None
    failed = {gate.name: gate for gate in parity.failed}
    assert "S1" not in failed
    assert failed["S5"].where.endswith("most in output")
