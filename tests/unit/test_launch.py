"""One launch with small agents in place of torchrun: limits, cleaning up, what is reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from dcpbench import launch as launch_module
from dcpbench.errors import ExitCode, UsageError
from dcpbench.launch import LaunchOutcome, environment
from dcpbench.launching.interrupts import Interrupts
from dcpbench.launching.processes import ProcessTree
from dcpbench.plan import Launch, build, torchrun
from dcpbench.records import IterationRecord
from dcpbench.spec import Spec

WRITE = """
import json, os, subprocess, sys, time
folder = sys.argv[1]
def write(kind, **fields):
    with open(folder + "/records.jsonl", "a") as file:
        file.write(json.dumps(dict(kind=kind, schema_version=1, **fields)) + "\\n")
def iterations(first, last):
    for i in range(first, last + 1):
        write("iteration", iteration=i, loss=1.0)
def end(n):
    write("end", iterations=n, seconds=1.0)
def sleeper(code="import time; time.sleep(600)"):
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    with open(folder + "/pids", "a") as file:
        file.write(f"{child.pid}\\n")
    return child
"""


class Listening:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.outcome: LaunchOutcome | None = None

    def planned(self, launches: list[Launch]) -> None:
        self.events.append(f"planned {len(launches)}")

    def phase(self, text: str) -> None:
        self.events.append(text)

    def note(self, text: str) -> None:
        self.events.append(text)

    def started(self, launch: Launch) -> None:
        self.events.append(f"started {launch.id}")

    def recorded(self, launch: Launch, record: IterationRecord) -> None:
        self.events.append(f"iteration {record.iteration}")

    def ended(self, launch: Launch, outcome: LaunchOutcome) -> None:
        self.events.append(f"ended {outcome.status}")
        self.outcome = outcome


def a_launch(folder: Path, *, ranks: int = 2, iterations: int = 3, **launches: object) -> Launch:
    spec = Spec.model_validate(
        {
            "topology": {"device": "cpu", "gpus_per_node": ranks, "cp": ranks},
            "training": {"iterations": iterations, "warmup_iterations": 0},
            "launches": {"grace": 0.5, "timeout": 60, **launches},
        }
    )
    return build(spec, folder)[0]


def run(
    launch: Launch, code: str, listener: Listening | None = None, interrupts: Interrupts | None = None
) -> LaunchOutcome:
    return launch_module.run(
        launch,
        listener=listener or Listening(),
        environ=os.environ,
        cpu=True,
        interrupts=interrupts or Interrupts(),
        argv=[sys.executable, "-c", WRITE + code, str(launch.folder)],
    )


def started_pids(launch: Launch) -> list[int]:
    return [int(line) for line in (launch.folder / "pids").read_text().split()]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_complete_launch(tmp_path: Path) -> None:
    launch, listener = a_launch(tmp_path), Listening()
    outcome = run(launch, "print('hello'); iterations(1, 3); end(3)", listener)
    assert (outcome.status, outcome.exit_code, outcome.reason, outcome.iterations) == ("completed", 0, None, 3)
    assert outcome.error() is None
    assert launch.log.read_bytes() == b"hello\n"
    assert listener.events == ["started 01-baseline", *(f"iteration {i}" for i in (1, 2, 3)), "ended completed"]


def test_a41_exit_code_of_the_worker_is_the_one_that_counts(tmp_path: Path) -> None:
    launch = a_launch(tmp_path, iterations=5)
    outcome = run(launch, "iterations(1, 3); sys.exit(7)")
    assert (outcome.status, outcome.exit_code, outcome.iterations) == ("failed", 7, 3)
    error = outcome.error()
    assert error is not None
    assert error.exit_code == ExitCode.LAUNCH_FAILED
    assert "01-baseline" in str(error)
    assert "code 7" in str(error)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("iterations(1, 2); end(2)", "2 of 3 iterations"),
        ("iterations(1, 3)", "3 of 3 iterations and no end mark"),
        ("pass", "0 of 3 iterations and no end mark"),
        ("iterations(1, 1); iterations(1, 1); iterations(1, 1); end(3)", "1 of 3 iterations"),
    ],
)
def test_a43_clean_exit_without_all_records_is_incomplete(tmp_path: Path, code: str, said: str) -> None:
    outcome = run(a_launch(tmp_path), code)
    assert outcome.status == "failed"
    error = outcome.error()
    assert error is not None
    assert error.exit_code == ExitCode.RECORDS
    assert said in str(error)


def test_a43_ranks_waiting_for_one_that_left_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_LOST_WORKER", 1.0)
    launch = a_launch(tmp_path, iterations=5)
    outcome = run(launch, "sleeper('import time; time.sleep(3)'); sleeper(); iterations(1, 2); time.sleep(600)")
    assert outcome.status == "failed"
    assert outcome.reason is not None
    assert "incomplete" in outcome.reason
    assert "iteration 2 of 5" in outcome.reason
    assert all(gone(pid) for pid in started_pids(launch))


def test_launch_that_says_nothing_any_more_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_STALL_MARGIN", 0.5)
    outcome = run(a_launch(tmp_path, collective_timeout=0.5), "iterations(1, 1); time.sleep(600)")
    assert outcome.status == "failed"
    assert outcome.reason is not None
    assert "collective_timeout" in outcome.reason


def test_time_limit(tmp_path: Path) -> None:
    launch = a_launch(tmp_path, timeout=1.0)
    outcome = run(launch, "sleeper(); iterations(1, 1); print('kept', flush=True); time.sleep(600)")
    assert outcome.status == "timeout"
    error = outcome.error()
    assert error is not None
    assert error.exit_code == ExitCode.TIMEOUT
    assert "launches.timeout" in str(error)
    assert launch.log.read_text() == "kept\n"
    assert all(gone(pid) for pid in started_pids(launch))


def test_a40_interrupt_leaves_no_process_even_one_that_ignores_sigterm(tmp_path: Path) -> None:
    launch = a_launch(tmp_path, iterations=5)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    listener = Listening()

    with Interrupts() as interrupts:

        class Interrupting(Listening):
            def recorded(self, launch: Launch, record: IterationRecord) -> None:
                super().recorded(launch, record)
                if record.iteration == 3:
                    os.kill(os.getpid(), signal.SIGINT)

        listener = Interrupting()
        outcome = None
        with pytest.raises(Exception, match="SIGINT"), interrupts.deferred():
            outcome = run(
                launch,
                f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); sleeper({stubborn!r}); time.sleep(1);"
                "iterations(1, 3); time.sleep(600)",
                listener,
                interrupts,
            )
    assert outcome is not None
    assert outcome.status == "interrupted"
    assert outcome.iterations == 3
    assert len((launch.folder / "records.jsonl").read_text().splitlines()) == 3
    assert all(gone(pid) for pid in started_pids(launch))


def test_second_interrupt_cuts_the_grace_period_short(tmp_path: Path) -> None:
    launch = a_launch(tmp_path, grace=500.0)
    with Interrupts() as interrupts:

        def press_twice() -> None:
            for _ in range(2):
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=press_twice).start()
        with pytest.raises(Exception, match="SIGINT"), interrupts.deferred():
            run(
                launch,
                "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); sleeper(); time.sleep(600)",
                interrupts=interrupts,
            )
    assert all(gone(pid) for pid in started_pids(launch))


def test_workers_outliving_a_killed_agent_are_ended(tmp_path: Path) -> None:
    """The agent dies at once (out of memory, say); its workers sit in sessions of their own."""
    launch = a_launch(tmp_path)
    outcome = run(launch, "sleeper(); sleeper(); time.sleep(1.5); os.kill(os.getpid(), 9)")
    assert (outcome.status, outcome.exit_code) == ("failed", -9)
    assert "SIGKILL" in str(outcome.error())
    assert all(gone(pid) for pid in started_pids(launch))


def test_processes_are_ended_when_the_listener_fails(tmp_path: Path) -> None:
    class Broken(Listening):
        def recorded(self, launch: Launch, record: IterationRecord) -> None:
            raise OSError("no space left")

    launch = a_launch(tmp_path)
    with pytest.raises(OSError, match="no space"):
        run(launch, "sleeper(); time.sleep(1); iterations(1, 1); time.sleep(600)", Broken())
    assert all(gone(pid) for pid in started_pids(launch))


def test_a_process_id_given_to_somebody_else_is_left_alone() -> None:
    root = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        tree = ProcessTree(root)
        reused = psutil.Process(stranger.pid)
        reused._create_time = 1.0  # what we noted was an older process of the same id
        reused._ident = (stranger.pid, 1.0)
        tree._known.add(reused)
        tree.end(0.1)
        assert root.poll() is not None
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("old", ["records.jsonl", "stdout.log"])
def test_a49_nothing_is_appended_to_an_earlier_attempt(tmp_path: Path, old: str) -> None:
    launch = a_launch(tmp_path)
    launch.folder.mkdir(parents=True)
    (launch.folder / old).write_text("earlier\n")
    with pytest.raises(UsageError, match="resume"):
        run(launch, "iterations(1, 3); end(3)")
    assert sorted(path.name for path in launch.folder.iterdir()) == [old]
    assert (launch.folder / old).read_text() == "earlier\n"


def test_failure_names_log_and_line(tmp_path: Path) -> None:
    launch = a_launch(tmp_path)
    outcome = run(launch, "iterations(1, 1); print('x', flush=True); raise ValueError('no such layer')")
    assert "ValueError: no such layer (launches/01-baseline/stdout.log:" in str(outcome.error())
    assert "iteration 1 of 3" in str(outcome.error())


def test_torn_and_foreign_lines_do_not_stop_the_watch(tmp_path: Path) -> None:
    code = """
with open(folder + "/records.jsonl", "ab") as file:
    file.write(b'\\xff\\xfe not json\\n{"kind": "iteration", "schema_ver')
    file.flush(); time.sleep(0.5)
    file.write(b'sion": 1, "iteration": 1}\\n\\n')
iterations(2, 3); end(3)
"""
    assert run(a_launch(tmp_path), code).status == "completed"


HOSTILE = {
    "PATH": "/bin",
    "HOME": "/home/joe",
    "NCCL_DEBUG": "WARN",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "LC_ALL": "C",
    "HF_TOKEN": "planted-1",
    "WANDB_API_KEY": "planted-2",
    "NCCL_SECRET_KEY": "planted-3",
    "NVIDIA_API_KEY": "planted-4",
    "TORCH_PASSWORD": "planted-5",
    "AWS_SECRET_ACCESS_KEY": "planted-6",
    "DATABASE_URL": "postgres://joe:planted-7@host/db",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "elsewhere",
    "TORCHELASTIC_RUN_ID": "outer",
    "DATASET_PATH": "/data",
}


def test_only_named_variables_reach_the_workers(tmp_path: Path) -> None:
    passed = environment(HOSTILE, a_launch(tmp_path), cpu=True, cores=9)
    passed.pop("PYTHONPATH")
    assert passed == {
        "PATH": "/bin",
        "HOME": "/home/joe",
        "NCCL_DEBUG": "WARN",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "LC_ALL": "C",
        "OMP_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
    }


def test_threads_per_rank(tmp_path: Path) -> None:
    launch = a_launch(tmp_path, ranks=4)
    assert environment({}, launch, cpu=True, cores=2)["OMP_NUM_THREADS"] == "1"
    assert environment({}, launch, cpu=False, cores=64)["OMP_NUM_THREADS"] == "1"
    assert environment({}, launch, cpu=False, cores=64)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment({}, launch, cpu=True, cores=64)
    own = environment({"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"}, launch, cpu=False, cores=64)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in own
    assert environment({"OMP_NUM_THREADS": "3"}, launch, cpu=True, cores=64)["OMP_NUM_THREADS"] == "3"


def test_a60_no_secret_in_log_or_process_title(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = "hf_" + "Zq7" * 12
    monkeypatch.setenv("HF_TOKEN", planted)
    launch = a_launch(tmp_path)
    code = f"""
print("token in environment:", os.environ.get("HF_TOKEN"))
print("Authorization: Bearer {planted}")
print("caf\\u00e9 \\u2028 kept")
sys.stdout.flush()
os.write(1, b"\\xff kept\\r\\n")
iterations(1, 3); end(3)
"""
    assert run(launch, code).status == "completed"
    log = launch.log.read_bytes()
    assert planted.encode() not in log
    assert b"token in environment: None" in log or b"[redacted]" in log
    assert "caf\u00e9 \u2028 kept\n".encode() in log
    assert log.endswith(b"\xff kept\r\n")
    assert all(planted not in word for word in torchrun(launch))
    assert sorted(path.name for path in launch.folder.iterdir()) == ["records.jsonl", "stdout.log"]


def test_command_is_a_list_with_its_own_rendezvous(tmp_path: Path) -> None:
    launch = a_launch(tmp_path / "a folder; with $(odd) name")
    words = torchrun(launch)
    assert words[-1] == str(launch.file)
    assert "--rdzv-endpoint=127.0.0.1:0" in words
    assert json.loads(json.dumps(words)) == words
