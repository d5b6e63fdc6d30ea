"""Counts how often a run restarted after processes were lost.

A seam: the coordinator counts the restarts of the run, and a launched process its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from plait.utils.counts import counted

WITHIN = 3600.0  # seconds


class Restarts:
    """The restarts of a run, of which only so many are allowed within an hour.

    Args:
        limit: most restarts within an hour (``cluster.restarts``).
        clock: seconds, rising.

    Attributes:
        count: times that processes were lost so far.
        seconds: spent on gathering processes again.
        steps: optimiser steps of all jobs that were lost and trained again.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._times: list[float] = []
        self.count, self.seconds, self.steps = 0, 0.0, 0

    def another(self) -> bool:
        """Count one more time that processes were lost; whether the run may restart."""
        now = self._clock()
        self.count += 1
        self._times = [each for each in self._times if now - each < WITHIN] + [now]
        return len(self._times) <= self._limit

    def account(self, checkpoints: int, seconds: float) -> str:
        """What so many checkpoints have cost, next to what lost processes have; "" if there were none."""
        words = f"{checkpoints} took {seconds:.1f} s"
        if not self.count:
            return words if checkpoints else ""
        times = f"{self.count} restart{'s' * (self.count > 1)} after lost processes"
        return f"{words}; {times} took {self.seconds:.1f} s and repeated {counted(self.steps, 'step')}"
