"""The cost profile refitted while the built-in worker trains on two gloo ranks, and what is left behind: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from dcpbench import records
from dcpbench.data.prepare import prepare
from dcpbench.dcp import refit_log
from dcpbench.dcp.cost_profiles import CostProfile, Iteration, coefficients_of
from dcpbench.dcp.costs import H200_1B
from dcpbench.plan import Launch, build
from dcpbench.records import LaunchRecords
from dcpbench.spec import Spec

LAUNCHER = Path(__file__).with_name("refit_launches.py")
HELPER = "dcpbench.worker.refit_helper"
WRONG = replace(H200_1B, token=H200_1B.token / 2, square=H200_1B.square * 6)


def a_spec(refit: int, iterations: int) -> Spec:
    return Spec.model_validate(
        {
            "model": {"layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 97},
            "topology": {"device": "cpu", "gpus_per_node": 2, "cp": 2},
            "training": {"iterations": iterations, "warmup_iterations": 2, "global_batch_size": 7, "lr": 0.01},
            "data": {"kind": "lognormal", "mean": 300, "sigma": 1.2, "max_length": 1200, "tokens": "zipf"},
            "cases": {"max_seqlen_per_dp_cp_rank": 700, "dcp": {"scheduler": "laminar"}},
            "schedule": {"refit": refit},
            "launches": {"pairs": 1, "timeout": 120, "grace": 5},
        }
    )


def a_launch(folder: Path, data: Path, refit: int, iterations: int) -> Launch:
    profile = CostProfile(
        name="wrong", kind="measured", coefficients=coefficients_of(WRONG), iteration=Iteration(seconds=0.002)
    )
    launch = build(a_spec(refit, iterations), folder, profile)[1].model_copy(update={"data": data})
    launch.folder.mkdir(parents=True)
    launch.file.write_text(launch.model_dump_json())
    return launch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refit") / "data"
    prepare(a_spec(8, 4000), folder)
    return folder


def command(*launches: Launch) -> list[str]:
    files = [str(launch.file) for launch in launches]
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(LAUNCHER), *files,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Launch, LaunchRecords]]:
    folder = tmp_path_factory.mktemp("trained")
    launches = {name: a_launch(folder / name, data, refit, 44) for name, refit in (("refitted", 12), ("plain", 0))}
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(*launches.values()), env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not [line for line in _processes() if str(folder) in line]
    return {name: (launch, records.read(launch.records)) for name, launch in launches.items()}


def _processes() -> list[str]:
    """The command lines of all helpers that run."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if HELPER in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(" ".join(words))
    return found


def test_coefficients_come_near_to_what_was_measured(trained: dict[str, tuple[Launch, LaunchRecords]]) -> None:
    log = refit_log.read(trained["refitted"][0].folder)
    assert log is not None
    assert [(refit.after, refit.applies_from) for refit in log.refits] == [(12, 24), (24, 36)]
    first = log.refits[0]
    assert first.adopted
    assert first.error_before is not None
    assert first.error_after is not None
    assert first.error_after < 0.05 < first.error_before
    assert first.coefficients is not None
    for name in ("token", "square"):
        true, wrong, found = (
            getattr(coefficients, name)
            for coefficients in (coefficients_of(H200_1B), coefficients_of(WRONG), first.coefficients)
        )
        assert abs(np.log(found / true)) < abs(np.log(wrong / true))
    assert refit_log.read(trained["plain"][0].folder) is None


def test_plans_change_where_coefficients_do_and_losses_do_not(
    trained: dict[str, tuple[Launch, LaunchRecords]],
) -> None:
    """Each iteration was checked for equal plans on all ranks by the worker, or it would not have ended."""
    refitted, plain = (trained[name][1] for name in ("refitted", "plain"))
    assert refitted.end is not None
    assert plain.end is not None
    same = [a.jobs == b.jobs for a, b in zip(refitted.iterations, plain.iterations, strict=True)]
    assert all(same[:23])
    assert not all(same[23:])
    losses = [[record.loss for record in found.iterations] for found in (refitted, plain)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def running(launch: Launch, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """All processes of a launch, once it trains."""
    while process.poll() is None and not (launch.records.exists() and launch.records.read_bytes().count(b"\n") > 3):
        time.sleep(0.05)
    assert process.poll() is None
    found = psutil.Process(process.pid).children(recursive=True)
    assert sum(HELPER in child.cmdline() for child in found) == 1
    return found


def gone(found: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(found, timeout=20)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive if process.is_running())


@pytest.mark.parametrize("how", ["the launch is terminated", "the worker is killed"])
def test_no_helper_is_left_behind(data: Path, tmp_path: Path, how: str) -> None:
    launch = a_launch(tmp_path, data, 500, 4000)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command(launch), env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        found = running(launch, process)
        if how == "the launch is terminated":
            process.terminate()
        else:
            (helper,) = [child for child in found if HELPER in child.cmdline()]
            worker = helper.parent()
            assert worker is not None
            worker.send_signal(signal.SIGKILL)
        process.wait(60)
        assert process.returncode != 0
        assert gone(found)
    finally:
        process.kill()
