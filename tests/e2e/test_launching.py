"""Real torchrun, real gloo ranks: free ports, failures, stranded ranks, Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import yaml

from dcpbench import launch as launch_module
from dcpbench.launch import LaunchOutcome
from dcpbench.launching.interrupts import Interrupts
from dcpbench.launching.progress import PlainProgress
from dcpbench.plan import Launch, build, torchrun
from dcpbench.runfolder import ledger
from dcpbench.spec import Spec

WORKER = """
import json, os, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
folder, mode, total = os.path.dirname(sys.argv[1]), {mode!r}, {total}
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
def write(**fields):
    if rank == 0:
        with open(folder + "/records.jsonl", "a") as file:
            file.write(json.dumps(dict(schema_version=1, **fields)) + "\\n")
for i in range(1, total + 1):
    if mode == "leave" and rank == 1 and i == 2:
        os._exit(0)
    dist.all_reduce(torch.ones(1))
    write(kind="iteration", iteration=i, loss=1.0)
    if mode == "exit 7" and i == 3 and rank == 1:
        time.sleep(0.5)
        sys.exit(7)
write(kind="end", iterations=total, seconds=1.0)
dist.destroy_process_group()
"""


def a_launch(folder: Path, case: int = 0, iterations: int = 5) -> Launch:
    spec = Spec.model_validate(
        {
            "topology": {"device": "cpu", "gpus_per_node": 2, "cp": 2},
            "training": {"iterations": iterations, "warmup_iterations": 0},
            "launches": {"timeout": 120, "grace": 5},
        }
    )
    return build(spec, folder)[case]


def run(launch: Launch, mode: str) -> LaunchOutcome:
    script = launch.folder.parent / f"{launch.case}.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(WORKER.format(mode=mode, total=launch.spec.training.iterations))
    words = torchrun(launch)
    at = words.index("dcpbench.worker")
    assert words[at - 1] == "-m"
    argv = [*words[: at - 1], str(script), *words[at + 1 :]]
    listener = PlainProgress(sys.stderr)
    return launch_module.run(
        launch, listener=listener, environ=os.environ, cpu=True, interrupts=Interrupts(), argv=argv
    )


def test_a39_usual_ports_are_taken_and_both_cases_start_at_once(tmp_path: Path) -> None:
    with ExitStack() as held:
        for port in (29500, 29400):
            holder = held.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Where somebody else holds the port already, it is as taken as it has to be.
            with suppress(OSError):
                holder.bind(("127.0.0.1", port))
                holder.listen()
        outcomes = [run(a_launch(tmp_path, case, iterations=2), "well") for case in (0, 1)]
    assert [(outcome.launch, outcome.status) for outcome in outcomes] == [
        ("01-baseline", "completed"),
        ("01-dcp", "completed"),
    ]


def test_a41_worker_that_prints_three_records_and_exits_7(tmp_path: Path) -> None:
    outcome = run(a_launch(tmp_path), "exit 7")
    assert (outcome.status, outcome.exit_code) == ("failed", 7)
    assert outcome.iterations >= 3
    assert "rank 1 exited with code 7" in str(outcome.error())


def test_a43_rank_1_exits_0_in_iteration_2_of_5(tmp_path: Path) -> None:
    outcome = run(a_launch(tmp_path), "leave")
    assert outcome.status == "failed"
    assert outcome.iterations < 5
    assert outcome.reason is not None
    assert "of 5" in outcome.reason


def test_a40_ctrl_c_in_iteration_3_of_the_first_case(tmp_path: Path) -> None:
    """The real command with its real workers, interrupted as a terminal does it."""
    spec = {
        "name": "interrupted",
        "topology": {"device": "cpu", "gpus_per_node": 2, "cp": 2},
        "training": {"iterations": 5_000, "warmup_iterations": 0, "global_batch_size": 2},
        "data": {"kind": "list", "lengths": [32, 64]},
        "launches": {"grace": 5},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "dcpbench", "run", str(tmp_path / "spec.yaml"), "--out", str(tmp_path / "run")]
    records = tmp_path / "run" / "launches" / "01-baseline" / "records.jsonl"
    with (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)
        me = psutil.Process(process.pid)
        while process.poll() is None and (not records.exists() or records.read_bytes().count(b"\n") < 4):
            time.sleep(0.02)
        started = me.children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        stdout, _ = process.communicate(timeout=60)
    errors = (tmp_path / "stderr").read_text()
    assert process.returncode == 130, errors
    assert len(started) >= 3  # torchrun and two ranks
    assert all(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in started)
    assert stdout == b""
    assert errors.splitlines()[-1].startswith("dcpbench: error: interrupted by SIGINT")
    assert "Traceback" not in errors
    launches = tmp_path / "run" / "launches"
    assert [folder.name for folder in launches.iterdir()] == ["01-baseline"]
    assert b"iteration 3/5000" in (launches / "01-baseline" / "stdout.log").read_bytes()
    assert [(e.event, e.status) for e in ledger.read(tmp_path / "run" / "ledger.jsonl")] == [
        ("start", None),
        ("end", "interrupted"),
    ]


def test_sigterm_while_the_ranks_start(tmp_path: Path) -> None:
    """A scheduler ends the job before the first iteration; nothing is left and the code is 130."""
    spec = {
        "topology": {"device": "cpu", "gpus_per_node": 2, "cp": 2},
        "data": {"kind": "list", "lengths": [32, 64]},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "dcpbench", "run", str(tmp_path / "spec.yaml"), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    me = psutil.Process(process.pid)
    started: list[psutil.Process] = []
    while process.poll() is None and len(started) < 3:
        time.sleep(0.05)
        started = me.children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert all(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in started)
