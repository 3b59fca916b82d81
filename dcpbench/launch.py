"""One torchrun: start it, watch it, stop it in time, leave nothing behind.

The command is an argument list, the console goes straight into the launch's log (no pipe whose
reader could fall behind or hide an exit status), and only environment variables named here reach
the workers.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import dcpbench
from dcpbench import plan, redact
from dcpbench.errors import DcpbenchError, Interrupted, LaunchError, LaunchTimeout, RecordsError, UsageError
from dcpbench.launching.failure import ended, first_failure
from dcpbench.launching.following import follow
from dcpbench.launching.interrupts import Interrupts
from dcpbench.launching.processes import ProcessTree
from dcpbench.plan import Launch
from dcpbench.records import IterationRecord, RunEnd

Status = Literal["completed", "failed", "timeout", "interrupted"]

_POLL = 0.1
"""Seconds between two looks at a launch."""
_RECORD_PROCESSES = 2.0
"""Seconds between two looks for new processes, once the launch has run for that long."""
_LOST_WORKER = 30.0
"""Seconds without a new record after a rank has gone while others stay; then they wait for it in vain."""
_STALL_MARGIN = 60.0
"""Seconds beyond the collective time-out without any output; the time-out itself should have ended the ranks."""

_MACHINE = {
    *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "CC", "CXX", "CPATH", "LIBRARY_PATH"),
    *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONFAULTHANDLER"),
}
_MACHINE_FAMILIES = ("LC_", "OMP_", "MKL_", "KMP_", "GOMP_", "NVIDIA_", "NVSHMEM_", "UCX_", "FI_", "IB_", "MALLOC_")
"""What workers need to start on this machine; passed on, but not among what `redact` lets anyone write down."""


class Listener(Protocol):
    """What is told during a run; `launching/progress.py` shows it."""

    def planned(self, launches: list[Launch]) -> None:
        """These launches will be made, in this order."""

    def phase(self, text: str) -> None:
        """Other work than a launch begins."""

    def note(self, text: str) -> None:
        """A fact worth a line; what is being done stays the same."""

    def started(self, launch: Launch) -> None:
        """The launch is about to start."""

    def recorded(self, launch: Launch, record: IterationRecord) -> None:
        """An iteration has been recorded."""

    def ended(self, launch: Launch, outcome: LaunchOutcome) -> None:
        """The launch and all its processes have ended."""


@dataclass(frozen=True)
class LaunchOutcome:
    """How a launch ended.

    `exit_code` is that of the worker that failed first where it is known, else torchrun's; negative
    means ended by that signal. `iterations` counts the records that were seen.
    """

    launch: str
    status: Status
    exit_code: int | None
    reason: str | None
    seconds: float
    iterations: int

    def error(self) -> DcpbenchError | None:
        """The exception that ends a run with this outcome; None when the launch completed."""
        if self.status == "completed":
            return None
        sentence = f"{self.launch} {self.reason}"
        if self.status == "timeout":
            return LaunchTimeout(sentence)
        if self.status == "interrupted":
            return Interrupted(sentence)
        return RecordsError(sentence) if self.exit_code == 0 else LaunchError(sentence)


def environment(environ: Mapping[str, str], launch: Launch, *, cpu: bool, cores: int) -> dict[str, str]:
    """What a launch's processes see: names from an allow-list, never one that looks like a secret's.

    Args:
        environ: the variables of this process.
        launch: supplies the number of ranks.
        cpu: whether the ranks compute on the CPU and so share its cores.
        cores: how many cores there are to share.
    """
    passed = {
        name: value
        for name, value in environ.items()
        if (name in _MACHINE or name.startswith(_MACHINE_FAMILIES) or name in redact.allowed_environment({name: value}))
        and not redact.is_secret_name(name)
    }
    ranks = launch.spec.topology.gpus_per_node
    passed.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks) if cpu else 1))
    if not cpu and not passed.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
        # Microbatches differ in shape: fixed segments would have the allocator ask the driver for new
        # ones, and wait for it, far into a run.
        passed["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    passed["PYTHONUNBUFFERED"] = "1"
    # A file that happens to lie in the current folder must not shadow a module.
    passed["PYTHONSAFEPATH"] = "1"
    root = Path(dcpbench.__file__).resolve().parents[1]
    if root.name not in {"site-packages", "dist-packages"}:
        paths = [str(root), *filter(None, [passed.get("PYTHONPATH")])]
        passed["PYTHONPATH"] = os.pathsep.join(paths)
    return passed


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(
    launch: Launch,
    *,
    listener: Listener,
    environ: Mapping[str, str],
    cpu: bool,
    interrupts: Interrupts,
    argv: list[str] | None = None,
) -> LaunchOutcome:
    """Run one launch to its end, whatever that is; when this returns, none of its processes is left.

    Args:
        launch: its folder is made here if need be.
        listener: told of the start, each record and the end.
        environ: the variables of this process; see `environment`.
        cpu: whether the ranks compute on the CPU.
        interrupts: looked at while the launch runs; the caller has deferred it.
        argv: the argument list; default: that of `plan.command(launch)`.

    Raises:
        UsageError: the folder holds records or a log of an earlier attempt.
    """
    for old in (launch.records, launch.log):
        if old.exists():
            raise UsageError(f"{old} exists: a launch is never repeated into the same folder; use --resume")
    launch.folder.mkdir(parents=True, exist_ok=True)
    command = plan.command(launch, environ)
    listener.started(launch)
    started = time.monotonic()
    with launch.log.open("xb") as log:
        process = subprocess.Popen(
            argv or command.argv,
            cwd=command.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(environ, launch, cpu=cpu, cores=cores()) | dict(command.environment),
            start_new_session=True,  # Ctrl-C on the terminal reaches dcpbench alone, which passes it on in order
        )
    tree = ProcessTree(process)
    watch = _Watch(launch, process, tree, listener, interrupts)
    try:
        stopped = watch.until_end_or_limit()
    finally:
        grace = launch.spec.launches.grace if process.poll() is None else 0.0
        tree.end(grace, hurry=lambda: interrupts.count > 1)
        watch.follow()  # before lines change their length
        _redact(launch.log)
    outcome = _judge(launch, process.returncode, stopped, watch, time.monotonic() - started)
    listener.ended(launch, outcome)
    return outcome


class _Watch:
    """Follows a running launch: its records, its processes, its limits."""

    def __init__(
        self,
        launch: Launch,
        process: subprocess.Popen[bytes],
        tree: ProcessTree,
        listener: Listener,
        interrupts: Interrupts,
    ) -> None:
        self.iterations: set[int] = set()
        self.end: RunEnd | None = None
        self._launch = launch
        self._process = process
        self._tree = tree
        self._listener = listener
        self._interrupts = interrupts
        self._records = follow(launch)
        self._log_size = 0
        self._most_workers = 0

    def until_end_or_limit(self) -> tuple[Status, str] | None:
        """Returns when the launch has ended by itself (None) or has to be stopped (status and reason)."""
        limits = self._launch.spec.launches
        begin = moved = recorded = time.monotonic()
        next_look = begin
        whole_since = begin
        while True:
            try:
                self._process.wait(_POLL)
                return None
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            if now >= next_look:
                self._tree.record()
                if self._all_ranks_there():
                    whole_since = now
                next_look = now + min(_RECORD_PROCESSES, max(_POLL, now - begin))
            if self.follow():
                recorded = moved = now
            elif self._log_grew():
                moved = now
            if self._interrupts.count:
                return "interrupted", f"was stopped by {self._interrupts.name} {self.progress()}"
            if now - begin > limits.timeout:
                return "timeout", (
                    f"ran longer than the limit of {limits.timeout:g} s (launches.timeout), {self.progress()}"
                )
            if not self.ending and now - max(whole_since, recorded) > _LOST_WORKER:
                return "failed", f"is incomplete: a rank ended and the others waited for it {self.progress()}"
            if now - moved > limits.collective_timeout + _STALL_MARGIN:
                return "failed", (
                    f"is incomplete: it wrote nothing for {now - moved:.0f} s {self.progress()}; if that is no hang, "
                    "raise launches.collective_timeout"
                )

    def follow(self) -> bool:
        """Reads the records written since the last call; true when there was one."""
        seen = False
        for record in self._records.read():
            seen = True
            if isinstance(record, IterationRecord):
                self.iterations.add(record.iteration)
                self._listener.recorded(self._launch, record)
            else:
                self.end = record
        return seen

    @property
    def ending(self) -> bool:
        """Whether ranks may go, one after the other: the launch said that it ends, or cannot but has all records."""
        return self.end is not None or (not self._records.marks_its_end and self.complete)

    @property
    def missing_end(self) -> bool:
        """Whether an end mark should be there and is not."""
        return self._records.marks_its_end and self.end is None

    @property
    def complete(self) -> bool:
        """Whether every iteration is recorded and, where the runner writes one, the end mark."""
        return not self.missing_end and len(self.iterations) >= self._launch.spec.training.iterations

    def _all_ranks_there(self) -> bool:
        workers = self._tree.children()
        self._most_workers = max(self._most_workers, workers)
        return workers >= min(self._most_workers, self._launch.spec.topology.gpus_per_node)

    def _log_grew(self) -> bool:
        size = self._launch.log.stat().st_size
        grew = size != self._log_size
        self._log_size = size
        return grew

    def progress(self) -> str:
        return f"after iteration {max(self.iterations, default=0)} of {self._launch.spec.training.iterations}"


def _redact(log: Path) -> None:
    """Take secrets, home directory, user and host names out of a log that nobody writes any more."""
    clean = log.with_suffix(".clean")
    line_redactor = redact.LineRedactor()
    changed = False
    # Bytes that are no UTF-8 stay as they are; only "\n" ends a line, a progress bar's "\r" does not.
    with (
        log.open(encoding="utf-8", errors="surrogateescape", newline="\n") as before,
        clean.open("w", encoding="utf-8", errors="surrogateescape", newline="") as after,
    ):
        for line in before:
            kept = line_redactor(line)
            changed |= kept != line
            after.write(kept)
    if changed:
        clean.replace(log)
    else:
        clean.unlink()


def _judge(
    launch: Launch, code: int | None, stopped: tuple[Status, str] | None, watch: _Watch, seconds: float
) -> LaunchOutcome:
    done, wanted = len(watch.iterations), launch.spec.training.iterations

    def outcome(status: Status, exit_code: int | None, reason: str | None) -> LaunchOutcome:
        return LaunchOutcome(launch.id, status, exit_code, reason, seconds, done)

    if stopped is not None:
        return outcome(stopped[0], None, stopped[1])
    if code == 0 and watch.complete:
        return outcome("completed", 0, None)
    if code == 0:
        mark = " and no end mark" if watch.missing_end else ""
        return outcome("failed", 0, f"is incomplete: it exited with code 0 after {done} of {wanted} iterations{mark}")
    failure = first_failure(launch.log)
    log = Path(*launch.log.parts[-3:])  # within the run folder: launches/<id>/stdout.log
    why = failure.sentence(str(log)) or f"torchrun {ended(code if code is not None else 1)}; see {log}"
    exit_code = failure.exit_code if failure.exit_code is not None else code
    return outcome("failed", exit_code, f"failed {watch.progress()}: {why}")
