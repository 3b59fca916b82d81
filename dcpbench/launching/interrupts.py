"""Ctrl-C, SIGTERM and SIGHUP: an exception in ordinary code, a flag while processes are looked after."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from dcpbench.errors import Interrupted


class Interrupts:
    """Context in which the three signals raise `Interrupted`, or only count while `deferred`.

    The first signal asks for an orderly end; a second one cuts the grace period short. Outside
    the main thread, where Python installs no handlers, the context changes nothing.
    """

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        self._deferred = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # Under nohup a hang-up is ignored, and stays so.
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.name = signal.Signals(number).name
        if not self._deferred:
            raise self.error()

    def error(self, what: str = "") -> Interrupted:
        """The exception for the signal that came."""
        return Interrupted(f"interrupted by {self.name}{what and ' ' + what}")

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A stretch of code in which a signal is only counted, and raises at its end.

        The code looks at `count` itself where it can stop sooner.
        """
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        if self.count and not self._deferred:
            raise self.error()
