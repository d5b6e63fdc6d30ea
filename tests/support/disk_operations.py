"""Counts what a process does to the disk, and ends it before one of these operations."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

DURABLE = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "write", "pwrite", "ftruncate")


class Operations:
    """Counts what this process does to the disk, in all of its threads.

    Args:
        last: before which it is killed; None: never.
    """

    def __init__(self, last: int | None) -> None:
        self.count = 0
        self._last = last
        self._lock = threading.Lock()
        for name in DURABLE:
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            with self._lock:
                self.count += 1
                if self.count == self._last:
                    os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **more)

        return counted
