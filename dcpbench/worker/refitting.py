"""Plans with refitted coefficients, changed on all ranks in the same iteration, beside the training.

Rank 0 has a helper process (`refit_helper.py`) that refits. All that happens here happens in the thread that
prepares batches, before the plan of an iteration is made: rank 0 asks the helper once the records it needs are written,
passes its answer on through the launch's store as soon as it is there, and every rank takes it up before
the plan of the iteration that was fixed beforehand, be it late or early: so all ranks plan alike.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from pydantic import ValidationError

from dcpbench.dcp import refit_log
from dcpbench.dcp.refit_log import READY, Refitted
from dcpbench.errors import LaunchError
from dcpbench.plan import Launch
from dcpbench.worker.batches import BatchBuilder, RankBatch

LAG = 4
"""The batch of iteration i is prepared when iteration i - LAG has been recorded, or will be within that iteration."""
WAIT = 120.0
"""Seconds that ranks wait for a refit that is not ready when it is to apply."""
START_WAIT = 120.0
"""Seconds that rank 0 waits for its helper to load."""
_POLL = 0.005
_END = 5.0
"""Seconds within which the system has to remove a killed process."""
_ADVICE = "set schedule.refit to 0 to plan with the same coefficients throughout"


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None:
        """Makes a value known to all ranks."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have a value."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that has one."""


def store_of(launch: Launch) -> Store:
    """This launch's part of the ranks' store, through a connection of its own: waits must not block others' use."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=launch.spec.launches.collective_timeout),
    )
    found: Store = dist.PrefixStore(f"refits of {launch.folder}", store)  # type: ignore[attr-defined]
    return found


class Helper:
    """The process that refits. `argv` is its command.

    Raises:
        LaunchError: from all methods but `close`: it has ended, or says something that is no answer.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        # A new interpreter rather than a copy of this process: no GPU context, no threads, no memory of ours. Where the
        # worker dies without a word, the helper's input ends, and Linux kills it besides.
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")},
        )
        self._read = b""
        self._reading = threading.Lock()

    @classmethod
    def of(cls, launch: Launch, backend: str) -> Helper:
        """The helper of a launch whose attention runs on `backend`."""
        return cls([sys.executable, "-m", "dcpbench.worker.refit_helper", str(launch.file), backend])

    def ask(self, after: int) -> None:
        """Asks for a refit after an iteration."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{after}\n".encode())
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._ended() from None

    def answer(self, seconds: float) -> str | None:
        """Its next line, if that is there within so many seconds."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        with self._reading:
            while b"\n" not in self._read:
                left = max(0.0, deadline - time.monotonic())
                if self._process.stdout.closed:
                    raise self._ended()
                if not select.select([self._process.stdout], [], [], left)[0]:
                    return None
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise self._ended()
                self._read += piece
            line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        """Ends the process; twice does no harm. Another thread's wait for an answer ends with it."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        with self._reading:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what nobody will read any more
                        pipe.close()

    def _ended(self) -> LaunchError:
        try:
            code = self._process.wait(_END)
        except subprocess.TimeoutExpired:
            return LaunchError(f"the process that refits the cost profile answers no more; {_ADVICE}")
        return LaunchError(f"the process that refits the cost profile ended with exit code {code}; {_ADVICE}")


class Refits:
    """The refits of a launch as one rank sees them.

    Args:
        launch: what is trained.
        store: shared by all ranks.
        helper: on rank 0 only.
        wait: seconds that the ranks wait for a refit that is not ready in time, at most those of a collective.
    """

    def __init__(self, launch: Launch, store: Store, helper: Helper | None, wait: float = WAIT) -> None:
        interval = launch.spec.schedule.refit
        self._due = {after + interval: after for after in refit_log.starts(launch.spec.training, interval)}
        self._asked = {after + LAG: after for after in self._due.values()}
        self._store, self._helper = store, helper
        self._wait = min(wait, launch.spec.launches.collective_timeout)
        self._answers: dict[int, str] = {}
        self._open: list[int] = []
        self._closed = threading.Event()

    def ready(self) -> None:
        """Waits until rank 0's helper is loaded.

        Raises:
            LaunchError: it is not within two minutes.
        """
        if self._helper is not None and self._helper.answer(START_WAIT) != READY:
            raise LaunchError(f"the process that refits the cost profile did not start; {_ADVICE}")

    def before(self, iteration: int) -> Refitted | None:
        """The refit that applies from this iteration on, adopted or not; to be called for every iteration in turn.

        Raises:
            LaunchError: it could not be made, on any rank with the same sentence, or did not come in time.
        """
        if self._helper is not None:
            self._serve(self._helper, iteration)
        after = self._due.get(iteration)
        if after is None:
            return None
        text = self._answers.pop(after) if self._helper is not None else self._received(after, iteration)
        try:
            return Refitted.model_validate_json(text)
        except ValidationError:
            raise LaunchError(_failure_in(text)) from None

    def close(self) -> None:
        """Ends the helper, and any wait."""
        self._closed.set()
        if self._helper is not None:
            self._helper.close()

    def _serve(self, helper: Helper, iteration: int) -> None:
        """Asks, and passes on what has been answered; waits only for what is due."""
        try:
            if iteration in self._asked:
                self._open.append(self._asked[iteration])
                helper.ask(self._asked[iteration])
            while self._open:
                due = self._open[0] == self._due.get(iteration)
                text = helper.answer(self._wait if due else 0.0)
                if text is None and due:
                    raise LaunchError(_late(self._open[0], iteration, self._wait))
                if text is None:
                    return
                after = self._open.pop(0)
                self._answers[after] = text
                self._store.set(_key(after), text)
        except LaunchError as error:
            # Where the launch ends for another reason, that one is to be told.
            for after in [] if self._closed.is_set() else self._open:
                self._store.set(_key(after), json.dumps({"failed": str(error)}))
            raise

    def _received(self, after: int, iteration: int) -> str:
        # Rank 0 says when it gives up; this is for when it cannot.
        deadline = time.monotonic() + 2 * self._wait
        while not self._store.check([_key(after)]):
            if self._closed.wait(_POLL):
                raise LaunchError("the launch ends")
            if time.monotonic() > deadline:
                raise LaunchError(_late(after, iteration, 2 * self._wait))
        return self._store.get(_key(after)).decode()


def _key(after: int) -> str:
    return f"after {after}"


def _late(after: int, iteration: int, seconds: float) -> str:
    return (
        f"the refit after iteration {after} was not ready {seconds:g} s after the plan of iteration {iteration} needed "
        f"it; raise schedule.refit, or {_ADVICE}"
    )


def _failure_in(text: str) -> str:
    try:
        return str(json.loads(text)["failed"])
    except (ValueError, KeyError, TypeError):
        return f"the process that refits the cost profile gave no answer that can be read; {_ADVICE}"


class RefittedBuilder:
    """Batches as `BatchBuilder` makes them, planned with the coefficients in force.

    Args:
        builder: plans with what the launch began with.
        refits: what changes them.
        replanned: a builder that plans with the coefficients of an adopted refit.
    """

    def __init__(self, builder: BatchBuilder, refits: Refits, replanned: Callable[[Refitted], BatchBuilder]) -> None:
        self._builder, self._refits, self._replanned = builder, refits, replanned

    def build(self, iteration: int) -> RankBatch:
        """This rank's share of the global batch of `iteration`, from 1 and in turn.

        Raises:
            LaunchError: a refit that applies from here on could not be made, or did not come in time.
        """
        found = self._refits.before(iteration)
        if found is not None and found.adopted:
            self._builder = self._replanned(found)
        return self._builder.build(iteration)
