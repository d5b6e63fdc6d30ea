"""Counts the losses of processes that a run makes up for.

A seam: the coordinator counts those of the run, and a launched process its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WITHIN = 3600.0  # seconds


class Losses:
    """How many losses there were lately.

    Args:
        limit: that are made up for within an hour (``cluster.restarts``).
        clock: seconds, rising.

    Attributes:
        count: of all.
        seconds: that it took to come together again.
        steps: that were lost with them, of all jobs.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._times: list[float] = []
        self.count, self.seconds, self.steps = 0, 0.0, 0

    def another(self) -> bool:
        """Count a loss; whether the run is to make up for it."""
        now = self._clock()
        self.count += 1
        self._times = [each for each in self._times if now - each < WITHIN] + [now]
        return len(self._times) <= self._limit
