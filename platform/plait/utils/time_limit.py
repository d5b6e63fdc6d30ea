"""A limit of processor time for code from outside, such as a template that loops for ever.

A seam: it alone deals with signals of timers, and with tracing.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

LEAST_SECONDS = 0.001  # of a timer; 0 would stop it


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt Python code in this context that takes more processor time of this thread. There is no limit
    within one call of C.

    Raises:
        TimeoutError: it has taken so long.
    """
    limited = _by_timer if threading.current_thread() is threading.main_thread() else _by_tracing
    with limited(seconds):
        yield


@contextmanager
def _by_timer(seconds: float) -> Iterator[None]:
    """For the main thread, which alone receives signals. The timer counts the time of all threads; when it
    rings, it is set again to what this one has not used."""
    until = time.thread_time() + seconds

    def end(*_: object) -> None:
        left = until - time.thread_time()
        if left <= 0:
            raise _too_long(seconds)
        signal.setitimer(signal.ITIMER_VIRTUAL, max(left, LEAST_SECONDS))

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _by_tracing(seconds: float) -> Iterator[None]:
    """For other threads: each line of the functions that are called looks at the thread's clock, which makes
    them several times slower. An exception that another thread sends could arrive after the end instead."""
    until = time.thread_time() + seconds

    def look(_frame: FrameType, _event: str, _value: Any) -> Any:
        if time.thread_time() > until:
            raise _too_long(seconds)
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def _too_long(seconds: float) -> TimeoutError:
    return TimeoutError(f"not done after {seconds:g} s of processor time")
