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
    """Ends a failed worker at once.

    Tearing down the process group after a failure would wait for peers that are inside other
    collectives; the agent sees the exit status and ends them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
