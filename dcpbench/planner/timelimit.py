"""A limit on how long a computation may take, for code that does not look at a clock itself."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(Exception):
    """The block took longer than it was allowed to."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """A block that is left with `OutOfTime` once it has run for so long.

    Rests on SIGALRM, whose earlier handler and timer are put back. Compiled code is interrupted when it returns.
    Outside the main thread, where Python handles no signal, nothing is limited.

    Raises:
        OutOfTime: after `seconds`, or at once where none is left.
    """
    if seconds <= 0:
        raise OutOfTime
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    started = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - (time.monotonic() - started)), interval)
