"""Leaving a computation that takes too long, without disturbing other timers."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from dcpbench.planner.timelimit import OutOfTime, at_most


def forever() -> None:
    while True:
        pass


def test_an_endless_loop_is_left() -> None:
    with pytest.raises(OutOfTime), at_most(0.05):
        forever()


def test_nothing_happens_to_a_block_that_ends_in_time() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with at_most(60):
        value = sum(range(100))
    assert value == 4950
    assert signal.getsignal(signal.SIGALRM) is before


def test_no_time_left_is_too_late_at_once() -> None:
    with pytest.raises(OutOfTime), at_most(0):
        pytest.fail("the block was entered")


def test_an_earlier_timer_still_rings() -> None:
    rung = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *_: rung.set())
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(OutOfTime), at_most(0.01):
            forever()
        assert not rung.is_set()
        deadline = time.monotonic() + 20
        while not rung.is_set() and time.monotonic() < deadline:
            pass
        assert rung.is_set()
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left, interval)


def test_other_threads_are_not_limited() -> None:
    done = []

    def work() -> None:
        with at_most(1e-6):
            time.sleep(0.01)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
