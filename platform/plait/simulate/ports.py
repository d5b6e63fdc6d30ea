"""Ports that messages share, as connections of TCP share them in the mean.

Messages from one port to another go one after another. Those between different ports go at once: those that
share a port get equal parts of it, and what one cannot use goes to the others (max-min fairness).

A seam: it knows messages and ports, and neither stages nor their work.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

End = tuple[int, int, Literal["sends", "receives"]]  # of a replica: a port in one direction
Way = tuple[End, End]  # from one port to another
Arrived = Callable[[], None]


@dataclass(slots=True)
class _Message:
    left: float  # seconds that it would still take alone
    arrived: Arrived


class Ports:
    """All messages that are on their way."""

    def __init__(self) -> None:
        self.ways: dict[Way, deque[_Message]] = {}
        self.shares: dict[Way, float] = {}  # of those on which a message goes
        self.known: dict[tuple[Way, ...], dict[Way, float]] = {}  # the few sets of ways come again and again
        self.now: float = 0

    def send(self, now: float, way: Way, seconds: float, arrived: Arrived) -> None:
        """Put a message on its way that takes so many seconds alone."""
        self._pass(now)
        self.ways.setdefault(way, deque()).append(_Message(seconds, arrived))
        self._share()

    def next(self) -> tuple[float, Way] | None:
        """When and where the next message arrives if no other is sent until then."""
        ends = ((self.now + self.ways[way][0].left / share, way) for way, share in self.shares.items())
        return min(ends, key=lambda each: each[0], default=None)

    def take(self, now: float, way: Way) -> Arrived:
        """Take the message off that arrives there; what to call."""
        self._pass(now)
        message = self.ways[way].popleft()
        self._share()
        return message.arrived

    def _pass(self, now: float) -> None:
        for way, share in self.shares.items():
            self.ways[way][0].left -= share * (now - self.now)
        self.now = now

    def _share(self) -> None:
        used = tuple(way for way, messages in self.ways.items() if messages)
        if used not in self.known:
            self.known[used] = fair_shares(used)
        self.shares = self.known[used]


def fair_shares(ways: Sequence[Way]) -> dict[Way, float]:
    """The part of its ports that a message on each way gets."""
    left = dict.fromkeys(chain.from_iterable(ways), 1.0)
    shares: dict[Way, float] = {}
    while waiting := [way for way in ways if way not in shares]:
        users = Counter(chain.from_iterable(waiting))
        fullest = min(users, key=lambda end: left[end] / users[end])
        share = left[fullest] / users[fullest]
        for way in waiting:
            if fullest in way:
                shares[way] = share
                for end in way:
                    left[end] -= share
    return shares
