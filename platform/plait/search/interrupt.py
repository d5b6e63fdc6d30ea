"""Ctrl-C, SIGTERM and SIGHUP: the first asks for an orderly end, the second ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

# Who closes a terminal sends SIGHUP more than once: further ones ask for nothing more.
SECOND: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_IGN,
}


class Interrupts:
    """While entered, notes the first of these signals and leaves the second to Python (KeyboardInterrupt) or
    to the system.

    Outside of the main thread, where signals cannot be caught, it changes nothing. SIGTERM and SIGHUP stay
    ignored where they were (nohup).

    Args:
        announce: called once, at the first signal, inside the signal handler: unbuffered output only.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        self._announce = announce
        self._before: dict[signal.Signals, Any] = {}
        self.requested = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SECOND:
                before = signal.getsignal(number)
                if number == signal.SIGINT or before not in (signal.SIG_IGN, None):
                    self._before[number] = before
                    signal.signal(number, self._first)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def _first(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        for number in self._before:
            signal.signal(number, SECOND[number])
        self._announce()
