"""The cost profile refitted while two GPUs train: ranks plan alike, losses stay, and the helper holds no GPU."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from dcpbench import records
from dcpbench.data.prepare import prepare
from dcpbench.dcp import refit_log
from dcpbench.plan import Launch, build
from dcpbench.spec import Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
HELPER = "dcpbench.worker.refit_helper"


def a_spec(refit: int) -> Spec:
    return Spec.model_validate(
        {
            "model": {"layers": 4, "hidden_size": 512, "ffn_hidden_size": 2048, "vocab_size": 1009},
            "topology": {"device": "cuda", "gpus_per_node": 2, "cp": 2},
            "training": {
                "iterations": 80,
                "warmup_iterations": 8,
                "global_batch_size": 16,
                "lr": 1e-4,
                "dtype": "float32",
            },
            "data": {"kind": "lognormal", "mean": 1024, "sigma": 1.3, "max_length": 7000, "tokens": "zipf"},
            "cases": {"max_seqlen_per_dp_cp_rank": 4096, "dcp": {"scheduler": "laminar"}},
            "schedule": {"refit": refit},
            "launches": {"pairs": 1},
        }
    )


def command(launch: Launch) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "-m", "dcpbench.worker", str(launch.file),
    ]  # fmt: skip


def gpu_files(helper: psutil.Process) -> list[str]:
    """The device files of GPUs that a process has open or mapped."""
    links = [os.readlink(link) for link in Path(f"/proc/{helper.pid}/fd").iterdir()]
    return [path for path in [*links, *(one.path for one in helper.memory_maps())] if "/dev/nvidia" in path]


def test_refits_change_plans_alike_on_both_ranks_and_no_loss(tmp_path: Path) -> None:
    prepare(a_spec(10), tmp_path / "data")
    losses = []
    for name, refit in (("plain", 0), ("refitted", 10)):
        launch = build(a_spec(refit), tmp_path / name)[1].model_copy(update={"data": tmp_path / "data"})
        launch.folder.mkdir(parents=True)
        launch.file.write_text(launch.model_dump_json())
        with (tmp_path / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command(launch), env=dict(os.environ), stdout=log, stderr=log)
        helpers: list[psutil.Process] = []
        while process.poll() is None and not (refit and launch.records.exists()):
            time.sleep(0.05)
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            helpers = [child for child in children if HELPER in child.cmdline()]
            assert len(helpers) == 1
            assert gpu_files(helpers[0]) == []
        assert process.wait(240) == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
        assert not any(helper.is_running() for helper in helpers)
        losses.append([record.loss for record in records.read(launch.records).iterations])
    log_of_refits = refit_log.read(tmp_path / "refitted" / "launches" / "01-dcp")
    assert log_of_refits is not None
    assert [one.after for one in log_of_refits.refits] == [20, 30, 40, 50, 60, 70]
    assert all(one.error_after is not None for one in log_of_refits.refits)
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)
