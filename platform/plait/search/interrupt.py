"""Ctrl-C: the first asks for an orderly end, the second ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """While entered, notes the first SIGINT and leaves the second to Python (KeyboardInterrupt).

    Outside of the main thread, where signals cannot be caught, it changes nothing.

    Args:
        announce: called once, at the first SIGINT, inside the signal handler: unbuffered output only.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        self._announce = announce
        self._before: Any = None
        self.requested = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._first)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _first(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._announce()
