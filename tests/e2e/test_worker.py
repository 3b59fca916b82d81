"""The built-in worker on real gloo ranks: however the work is divided and kept, the training is the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dcpbench import records
from dcpbench.data.prepare import prepare
from dcpbench.plan import Launch, build
from dcpbench.records import LaunchRecords
from dcpbench.spec import Spec

LAUNCHER = Path(__file__).with_name("worker_launches.py")
RANKS = 3
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {"overlap_gradient_reduction": False, "save_path": "saved-plain"},
    "overlapped": {},
    "sharded": {"optimizer_sharding": True, "save_path": "saved-sharded"},
    "sharded late": {"optimizer_sharding": True, "overlap_gradient_reduction": False},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "full sharded": {"recompute": "full", "optimizer_sharding": True},
    "deterministic": {"deterministic": True},
}
CONTINUED: dict[str, dict[str, object]] = {
    "plain": {"load_path": "saved-sharded/01-dcp"},
    "sharded": {"load_path": "saved-plain/01-dcp", "optimizer_sharding": True},
}
"""Each starts with what the other way of keeping weights has written."""


def a_spec(flavour: str, training: dict[str, object]) -> Spec:
    return Spec.model_validate(
        {
            "model": {"flavour": flavour, "layers": 3, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 97},
            "topology": {"device": "cpu", "gpus_per_node": RANKS, "cp": RANKS},
            "training": {
                "iterations": 4,
                "warmup_iterations": 1,
                "global_batch_size": 5,
                "lr": 0.01,
                "clip_grad": 0.5,
                **training,
            },
            "data": {"kind": "list", "lengths": [300, 40, 17, 90, 200, 33, 260], "tokens": "zipf"},
            "cases": {"max_seqlen_per_dp_cp_rank": 120},
            "launches": {"pairs": 1},
        }
    )


def launches_of(folder: Path, flavour: str) -> dict[tuple[str, str], Launch]:
    """(variant, case) -> its launch; all share the data."""
    result = {}
    variants = {**VARIANTS, **{f"continued {name}": training for name, training in CONTINUED.items()}}
    for number, (variant, training) in enumerate(variants.items()):
        root = folder / str(number)
        paths = {key: folder / str(value) for key, value in training.items() if key.endswith("_path")}
        for planned in build(a_spec(flavour, {**training, **paths}), root):
            launch = planned.model_copy(update={"data": folder / "data"})
            launch.folder.mkdir(parents=True)
            launch.file.write_text(launch.model_dump_json())
            result[variant, launch.case] = launch
    return result


@pytest.fixture(scope="module", params=["classic", "modern"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp(request.param)
    launches = launches_of(folder, request.param)
    prepare(a_spec(request.param, {}), folder / "data")
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(LAUNCHER),
        *(str(launch.file) for launch in launches.values()),
    ]  # fmt: skip
    result = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr[:3000]
    return {key: records.read(launch.records) for key, launch in launches.items()}


def losses(found: LaunchRecords) -> np.ndarray:
    assert found.end is not None
    assert not found.malformed
    return np.array([[record.loss, record.grad_norm] for record in found.iterations])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", ["baseline", "dcp"])
def test_losses_and_gradient_norms_are_those_of_the_plain_baseline(trained: dict, variant: str, case: str) -> None:
    expected, got = losses(trained["plain", "baseline"]), losses(trained[variant, case])
    assert expected.shape == (4, 2)
    assert expected[-1, 0] < expected[0, 0]
    np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_sharding_keeps_a_part_of_weights_and_moments_on_each_rank(trained: dict) -> None:
    plain, sharded = trained["plain", "dcp"].header, trained["sharded", "dcp"].header
    assert plain.optimizer_bytes == 2 * plain.gradient_bytes
    assert sharded.optimizer_bytes == 2 * sharded.gradient_bytes / RANKS
    # Float32 compute: the weights that forward and backward read are the float32 weights themselves.
    assert sharded.parameter_bytes == sharded.gradient_bytes


def test_both_cases_used_groups_that_may_and_that_may_not_reduce_early(trained: dict) -> None:
    sizes = [record.cp_sizes for record in trained["plain", "dcp"].iterations]
    assert any(1 in histogram for histogram in sizes)
    assert any(max(histogram) > 1 for histogram in sizes)
    assert json.dumps(sizes) != json.dumps([record.cp_sizes for record in trained["plain", "baseline"].iterations])


def test_a_checkpoint_of_shards_and_one_of_whole_weights_are_the_same(trained: dict) -> None:
    one, other = losses(trained["continued plain", "dcp"]), losses(trained["continued sharded", "dcp"])
    np.testing.assert_allclose(one, other, rtol=2e-5)
    # They go on where the first training ended, not where it began.
    first = losses(trained["plain", "dcp"])
    assert one[0, 0] < first[0, 0]
    assert one[0, 0] != pytest.approx(first[-1, 0], rel=1e-6)
