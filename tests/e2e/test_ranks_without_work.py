"""The built-in worker on real gloo ranks of which some have no microbatch, and others several, in an iteration."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dcpbench import records
from dcpbench.data.prepare import prepare
from dcpbench.plan import build
from dcpbench.records import LaunchRecords
from dcpbench.spec import Spec

LAUNCHER = Path(__file__).with_name("worker_launches.py")
RANKS = 4
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {"overlap_gradient_reduction": False},
    "overlapped": {},
    "sharded": {"optimizer_sharding": True},
}


def a_spec(training: dict[str, object]) -> Spec:
    return Spec.model_validate(
        {
            # An odd number of layers: ranks that have met different partners have run different numbers of operations.
            "model": {"layers": 3, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 97},
            "topology": {"device": "cpu", "gpus_per_node": RANKS, "cp": RANKS},
            "training": {
                "iterations": 5,
                "warmup_iterations": 1,
                "global_batch_size": 3,
                "lr": 0.01,
                "clip_grad": 0.5,
                **training,
            },
            "data": {"kind": "list", "lengths": [30, 50, 17, 44, 21, 60, 230, 40, 33, 470, 110, 20], "tokens": "zipf"},
            "cases": {"max_seqlen_per_dp_cp_rank": 120, "dcp": {"scheduler": "laminar"}},
            "launches": {"pairs": 1},
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], LaunchRecords]:
    folder = tmp_path_factory.mktemp("idle")
    prepare(a_spec({}), folder / "data")
    launches = {}
    for variant, training in VARIANTS.items():
        for planned in build(a_spec(training), folder / variant):
            if planned.case == "baseline" and variant != "plain":
                continue
            launch = planned.model_copy(update={"data": folder / "data"})
            launch.folder.mkdir(parents=True)
            launch.file.write_text(launch.model_dump_json())
            launches[variant, str(launch.case)] = launch
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--rdzv-backend=c10d",
         "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(LAUNCHER),
         *(str(launch.file) for launch in launches.values())],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[:3000]
    return {key: records.read(launch.records) for key, launch in launches.items()}


def test_some_iterations_leave_ranks_without_work_and_others_share_samples(
    trained: dict[tuple[str, str], LaunchRecords],
) -> None:
    sizes = [record.cp_sizes for record in trained["overlapped", "dcp"].iterations]
    assert any(sum(size * jobs for size, jobs in histogram.items()) < RANKS for histogram in sizes)
    assert any(max(histogram) > 1 for histogram in sizes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_rank_joins_the_one_reduction_of_gradients(
    trained: dict[tuple[str, str], LaunchRecords], variant: str
) -> None:
    found = {}
    for key in (("plain", "baseline"), (variant, "dcp")):
        assert trained[key].end is not None
        found[key] = np.array([[record.loss, record.grad_norm] for record in trained[key].iterations])
    expected, got = found.values()
    assert expected.shape == (5, 2)
    assert (np.diff(expected[:, 0]) != 0).all()
    np.testing.assert_allclose(got, expected, rtol=2e-5)
