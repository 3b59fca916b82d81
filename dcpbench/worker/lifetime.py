"""How a worker process ends: with its parent, and never waiting for ranks that will not come."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Asks Linux to kill this process when the launcher agent that started it dies, however it dies."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # The agent died between the two calls; the request came too late.
            os._exit(1)


def leave(code: int) -> NoReturn:
    """Ends this worker at once.

    After a failure, tearing down the process group would wait for peers that are inside other collectives; the
    agent sees the exit status and ends them. After success, the end of the interpreter races with threads that
    libraries have left behind ("terminate called without an active exception", seen with gloo in 1 of 25
    launches on a busy machine), which would make a complete launch a failed one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
