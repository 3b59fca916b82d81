"""The real worker on two GPUs: overlap, sharding and recomputation change memory and time, not the training."""

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
from dcpbench.records import LaunchRecords
from dcpbench.spec import Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
LAUNCHER = Path(__file__).parents[1] / "e2e" / "worker_launches.py"
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {"overlap_gradient_reduction": False},
    "overlapped": {},
    "sharded": {"optimizer_sharding": True},
    "full sharded": {"recompute": "full", "optimizer_sharding": True},
    "selective": {"recompute": "selective"},
}
TYPES = {"float32": ("collective/sdpa", 2e-4), "bfloat16": ("collective/flash", 2e-2)}


def a_spec(dtype: str, training: dict[str, object]) -> Spec:
    return Spec.model_validate(
        {
            "model": {
                "flavour": "classic",
                "layers": 3,
                "hidden_size": 256,
                "ffn_hidden_size": 512,
                "attention_heads": 4,
                "vocab_size": 1009,
            },
            "topology": {"device": "cuda", "gpus_per_node": 2, "cp": 2},
            "training": {
                "iterations": 4,
                "warmup_iterations": 1,
                "global_batch_size": 6,
                "lr": 0.003,
                "dtype": dtype,
                **training,
            },
            "data": {"kind": "list", "lengths": [1900, 40, 17, 900, 1200, 33, 260], "tokens": "zipf"},
            "cases": {"max_seqlen_per_dp_cp_rank": 1000, "attention": TYPES[dtype][0]},
            "launches": {"pairs": 1},
        }
    )


@pytest.fixture(scope="module", params=TYPES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, dict]:
    folder = tmp_path_factory.mktemp(request.param)
    prepare(a_spec(request.param, {}), folder / "data")
    launches = {}
    for number, (variant, training) in enumerate(VARIANTS.items()):
        for planned in build(a_spec(request.param, training), folder / str(number)):
            launch = planned.model_copy(update={"data": folder / "data"})
            launch.folder.mkdir(parents=True)
            launch.file.write_text(launch.model_dump_json())
            launches[variant, launch.case] = launch
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(LAUNCHER),
        *(str(launch.file) for launch in launches.values()),
    ]  # fmt: skip
    result = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr[:3000]
    return TYPES[request.param][1], {key: records.read(launch.records) for key, launch in launches.items()}


def losses(found: LaunchRecords) -> np.ndarray:
    assert found.end is not None
    return np.array([[record.loss, record.grad_norm] for record in found.iterations])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", ["baseline", "dcp"])
def test_losses_and_gradient_norms_are_those_of_the_plain_baseline(
    trained: tuple[float, dict], variant: str, case: str
) -> None:
    tolerance, found = trained
    expected = losses(found["plain", "baseline"])
    assert expected[-1, 0] < expected[0, 0]
    np.testing.assert_allclose(losses(found[variant, case]), expected, rtol=tolerance)


def test_memory_of_the_parts_is_in_the_records(trained: tuple[float, dict]) -> None:
    _, found = trained
    plain, sharded = found["plain", "dcp"], found["sharded", "dcp"]
    assert plain.header.optimizer_bytes == 2 * plain.header.gradient_bytes
    assert sharded.header.optimizer_bytes == sharded.header.gradient_bytes
    last = plain.iterations[-1]
    assert last.reserved_memory_bytes >= last.peak_memory_bytes
    assert last.peak_memory_bytes > plain.header.parameter_bytes + plain.header.gradient_bytes
