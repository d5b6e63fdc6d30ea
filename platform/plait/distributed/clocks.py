"""How far another process's clock is from the coordinator's, from requests and their answers.

A seam: pure, so that it is tested with made-up clocks and delays.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

NEWEST = (
    8  # round trips that are looked at: clocks of two hosts drift apart by some ten microseconds a second
)


@dataclass(slots=True)
class ClockOffset:
    """The offset of a process's clock, as NTP finds it (RFC 5905, section 8): the midpoint of the request and
    that of its processing are the same moment, but for half of the time that the messages took. Of the newest
    round trips the shortest is taken."""

    _trips: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NEWEST))

    def learn(self, sent: float, began: float, ended: float, received: float) -> None:
        """Take in one request.

        Args:
            sent, received: when it was sent and its answer received, by the coordinator's clock.
            began, ended: when the process took it and was done with it, by the process's clock.
        """
        travelled = (received - sent) - (ended - began)
        self._trips.append((travelled, ((sent - began) + (received - ended)) / 2))

    @property
    def seconds(self) -> float:
        """What to add to the process's times for those of the coordinator's clock; 0 before any request."""
        return min(self._trips)[1] if self._trips else 0.0

    @property
    def error(self) -> float:
        """By how much the offset may be wrong, at most: half of the time that the messages took."""
        return max(0.0, min(self._trips)[0] / 2) if self._trips else 0.0
