"""The user's orders for a search, kept in its study: `plait control` writes them, and every worker obeys
them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from plait.search.storage import SharedStudy

ORDERS = "plait.orders"  # study: the orders, as plain data
ORDERED = "as requested with `plait control`"
POLL_SECONDS = 2.0  # interval at which a worker reads them

Mode = Literal["running", "paused", "stopping", "cancelling"]
ENDING: tuple[Mode, ...] = ("stopping", "cancelling")  # after these no further trial is suggested


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders that are in force for every worker of the search.

    Attributes:
        stops: numbers of the trials that must end.
        ended: how often orders were withdrawn because they had been carried out, not by the user; as read by
            a worker, counted since it opened the study.
        was: the mode that was withdrawn last.
    """

    mode: Mode = "running"
    stops: tuple[int, ...] = ()
    ended: int = 0
    was: Mode = "running"

    def describe(self, lift: str) -> str:
        """The mode in words; ``lift``: the command that ends a pause."""
        text = f"{self.mode}, {ORDERED}"
        return f"{text}; `{lift}` ends the pause" if self.mode == "paused" else text


class StudyOrders:
    """A study's orders.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, shared: SharedStudy, clock: Callable[[], float] = time.monotonic) -> None:
        self._shared = shared
        self._clock = clock
        self._ended_before = self._shared.patience(self._stored).ended
        self._polled = Orders()
        self._next_poll = -math.inf

    def read(self) -> Orders:
        """The orders in force now; ``ended`` counts since this process opened the study."""
        orders = self._shared.patience(self._stored)
        return replace(orders, ended=orders.ended - self._ended_before)

    def poll(self) -> Orders:
        """The orders as of at most ``POLL_SECONDS`` ago, because a worker asks before every iteration."""
        if self._clock() >= self._next_poll:
            self._next_poll = self._clock() + POLL_SECONDS
            self._polled = self.read()
        return self._polled

    def set_mode(self, mode: Mode) -> None:
        """Set the mode of the whole search."""
        self._change(lambda orders: replace(orders, mode=mode))

    def stop_trial(self, number: int) -> None:
        """Order a trial to end."""
        self._change(lambda orders: replace(orders, stops=tuple(sorted({*orders.stops, number}))))

    def withdraw(self) -> None:
        """Withdraw the orders at the end of a search: they were carried out, or came too late for any trial.

        A worker that waits for the others' trials ends with them if one of ``ENDING`` is withdrawn. Nothing
        changes if another worker has already withdrawn them.
        """
        self._change(
            lambda orders: (
                Orders(ended=orders.ended + 1, was=orders.mode)
                if orders.mode in ENDING
                else Orders(ended=orders.ended, was=orders.was)
            )
        )

    def _stored(self) -> Orders:
        stored: dict[str, Any] = self._shared.study.user_attrs.get(ORDERS, {})
        return Orders(**stored | {"stops": tuple(stored.get("stops", ()))})

    def _change(self, change: Callable[[Orders], Orders]) -> None:
        """Change the present orders; repeating this after a lost answer has no further effect."""

        def attempt() -> None:
            before = self._stored()
            after = change(before)
            if after != before:
                self._shared.study.set_user_attr(ORDERS, asdict(after))

        self._shared.locked(attempt)
