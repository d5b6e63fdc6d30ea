"""Before every iteration: what the search's user orders, and what its views learn from the study."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from plait.search.orders import Orders
from plait.search.ownership import DeadWorker
from plait.search.trials import Trial
from plait.tracking.leaderboard import Leaderboard, orphan

LOOK_SECONDS = 5.0  # between two looks at what other processes added to the search


class Source(Protocol):
    """What is asked of the study."""

    @property
    def revision(self) -> int:
        """Rises when this process draws, enqueues or ends a trial."""

    @property
    def total(self) -> int:
        """How many trials there are to be."""

    @property
    def own(self) -> Set[int]:
        """Numbers of the trials that this process trains."""

    def dead_workers(self) -> Sequence[DeadWorker]:
        """The workers that were detected as dead since the last call."""


@dataclass(slots=True)
class Attend:
    """Called before every iteration.

    Attributes:
        source: of the trials.
        board: what the views show.
        say: shows a line to the user.
        read_orders: the orders of the search's user.
        unreachable: why the tracking store does not answer; empty where it does.
        store: what it is called.
        clock: seconds, rising.
    """

    source: Source
    board: Leaderboard
    say: Callable[[str], None]
    read_orders: Callable[[], Orders]
    unreachable: Callable[[], str] = str
    store: str = ""
    clock: Callable[[], float] = time.monotonic
    _revision: int | None = None
    _next_look: float = -math.inf
    _away: bool | None = None  # None: not asked yet

    def __call__(self) -> Orders:
        """The orders that hold now."""
        for worker in self.source.dead_workers():
            left = worker.trials.keys() - self.source.own  # what was free is adopted at once
            orphan(self.board.jobs.values(), {Trial(number).name for number in left})
            self.say(worker.describe())
        self._watch_store()
        orders = self.read_orders()
        now = self.clock()
        if self.source.revision != self._revision or now >= self._next_look:  # each look reads all trials
            self._revision, self.board.trials = self.source.revision, self.source.total
            self._next_look = now + LOOK_SECONDS
        return orders

    def _watch_store(self) -> None:
        """Say it when the tracking store goes away, and when it is back."""
        why = self.unreachable()
        away, was = bool(why), self._away
        self._away = away
        if was is None or was == away:
            return
        self.say(
            f"{self.store} does not answer ({why}). Records are buffered on disk; training continues."
            if away
            else f"{self.store} answers again; buffered records are being sent."
        )
