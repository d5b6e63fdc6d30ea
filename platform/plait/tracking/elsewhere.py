"""What other processes train of the same search, read from the store now and then, in the background: the one
that trains here waits for no store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from plait.tracking.board import JobRecord

PAUSE = 15.0  # seconds between two looks at least
SHARE = 0.005  # of the time may go into looking


class Elsewhere:
    """Jobs of a search as the store has them.

    Args:
        there: whether anything is to be learned: other processes train the search, or the store was away
            when this one began.
        read: all its jobs.
        pause: seconds between two looks at least.
    """

    def __init__(
        self,
        there: Callable[[], bool],
        read: Callable[[], Sequence[JobRecord]],
        *,
        pause: float = PAUSE,
    ) -> None:
        self._there = there
        self._read = read
        self._pause = pause
        self._found: Sequence[JobRecord] | None = None
        self._over = threading.Event()
        threading.Thread(target=self._now_and_then, name="plait-elsewhere", daemon=True).start()

    def take(self) -> Sequence[JobRecord] | None:
        """What was read since this was last asked; None where nothing was."""
        found, self._found = self._found, None
        return found

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def _now_and_then(self) -> None:
        pause = self._pause
        while not self._over.wait(pause):
            begun = time.monotonic()
            with suppress(Exception):  # a store that is away is told by those who write to it
                if self._there():
                    self._found = self._read()
            pause = max(self._pause, (time.monotonic() - begun) / SHARE)
