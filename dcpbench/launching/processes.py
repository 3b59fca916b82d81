"""The processes that a launch started, remembered by id and start time so that each can be ended.

torchrun starts its workers in sessions of their own, so neither a process group nor a session
reaches all of them, and a worker whose parent died is nobody's child. Ids are therefore noted while
the launch runs. A process is known by its id *and* its start time: an id that the system has given
to somebody else in the meantime is never signalled.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import psutil

_STEP = 0.05
"""Seconds between two looks at processes that are being ended."""
_KILL_BOUND = 10.0
"""Seconds after SIGKILL within which the system has to remove a process."""


class ProcessTree:
    """A started process and everything below it.

    Args:
        root: the process that `dcpbench` started; it is reaped here.
    """

    def __init__(self, root: subprocess.Popen[bytes]) -> None:
        self._popen = root
        self._known: set[psutil.Process] = set()
        try:
            self._root: psutil.Process | None = psutil.Process(root.pid)
        except psutil.NoSuchProcess:
            self._root = None
        self.record()

    def record(self) -> None:
        """Note every process that is below the root, or below a noted one, now."""
        found = _descendants(self._root) if self._root else set()
        for process in self._known - found:
            found |= _descendants(process)
        self._known |= found

    def children(self) -> int:
        """How many direct children the root has now."""
        if self._root is None:
            return 0
        try:
            return sum(_lives(child) for child in self._root.children())
        except psutil.Error:
            return 0

    def living(self) -> list[psutil.Process]:
        """The noted processes that still run, without the root."""
        return [process for process in self._known if _lives(process)]

    def end(self, grace: float, hurry: Callable[[], bool] = lambda: False) -> int:
        """SIGTERM to the root, `grace` seconds of time, then SIGKILL to all that is left.

        Args:
            grace: seconds between the two.
            hurry: asked every few hundredths of a second; true cuts the grace period short.

        Returns:
            How many processes had to be killed.
        """
        self.record()
        if self._popen.poll() is None:
            self._popen.terminate()
        deadline = time.monotonic() + grace
        while self._anything() and time.monotonic() < deadline and not hurry():
            self.record()
            time.sleep(_STEP)
        return self._kill()

    def _anything(self) -> bool:
        return self._popen.poll() is None or bool(self.living())

    def _kill(self) -> int:
        # The root first: it must not start anything in place of what is taken from it.
        killed = 0
        if self._popen.poll() is None:
            self._popen.kill()
            killed += 1
        hit: set[psutil.Process] = set()
        deadline = time.monotonic() + _KILL_BOUND
        while self._anything() and time.monotonic() < deadline:
            self.record()  # a process may have forked between the last look and its end
            for process in self.living():
                try:
                    process.kill()
                except psutil.Error:
                    continue
                hit.add(process)
            time.sleep(_STEP)
        return killed + len(hit)


def _descendants(process: psutil.Process) -> set[psutil.Process]:
    try:
        return set(process.children(recursive=True))
    except psutil.Error:
        return set()


def _lives(process: psutil.Process) -> bool:
    # A zombie has ended; who has to reap it (an init that does not) is not ours to say.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
