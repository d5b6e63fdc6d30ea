"""A limit of processor time for code from outside, such as a template that loops for ever.

A seam: it alone deals with signals of timers.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LEAST_SECONDS = 0.001  # of a timer; 0 would stop it


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt Python code in this context that takes more processor time. There is no limit outside the
    main thread, which alone receives signals, and within one call of C.

    The timer counts the time of all threads; when it rings, it is set again to what this one has not used.

    Raises:
        TimeoutError: it has taken so long.
    """
    until = time.thread_time() + seconds

    def end(*_: object) -> None:
        left = until - time.thread_time()
        if left <= 0:
            raise TimeoutError(f"not done after {seconds:g} s of processor time")
        signal.setitimer(signal.ITIMER_VIRTUAL, max(left, LEAST_SECONDS))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
