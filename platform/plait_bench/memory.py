"""Peak memory of one side of a comparison that shares its process with the other."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import TracebackType

import psutil

INTERVAL = 0.01  # seconds between two looks at the resident size


class Footprint:
    """Resident memory of what runs inside ``with`` blocks of this object, however many there are.

    Each block adds what it leaves behind; the peak is what earlier blocks left and the block's own growth.
    What others do between the blocks does not count. Freed memory is given back to the system around each
    block, so that one side does not grow inside what the other has freed.

    Attributes:
        held_bytes: left behind so far.
        peak_bytes: largest so far.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self.peak_bytes = 0
        self._process = psutil.Process()

    def __enter__(self) -> Footprint:
        _give_back()
        self._start = self._highest = self._resident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.look()
        _give_back()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + self._highest - self._start)
        self.held_bytes += self._resident() - self._start

    def look(self) -> None:
        """Note the resident size now; a thread does so all the time."""
        self._highest = max(self._highest, self._resident())

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            self.look()


def _give_back() -> None:
    """Ask the C library to return freed memory; other systems than Linux keep it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
        if trim is not None:
            trim(0)
