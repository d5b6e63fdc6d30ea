"""The owner's standing orders as an attribute of the study: all workers share that, but not always a disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from optuna.study import Study

from plait.search.control.orders import Mode, Orders, orders_in
from plait.search.storage import Patience

ORDERS = "plait.orders"  # study: see control/orders.py


class StudyOrders:
    """A study's orders.

    Args:
        study: where they are kept.
        patience: for a storage that is away.
        locked: does something that one process at a time does, with patience.
    """

    def __init__(
        self, study: Study, patience: Patience, locked: Callable[[Callable[[], None]], None]
    ) -> None:
        self._study = study
        self._patience = patience
        self._locked = locked
        self._ended_before = self._patience(self._stored).ended

    def read(self) -> Orders:
        """What holds now; of those carried out, the ones since this process opened the study count."""
        orders = self._patience(self._stored)
        return replace(orders, ended=orders.ended - self._ended_before)

    def set_mode(self, mode: Mode) -> None:
        """Change what the whole search is to do."""
        self._change(lambda orders: replace(orders, mode=mode))

    def stop_trial(self, number: int) -> None:
        """A trial is to end."""
        self._change(lambda orders: replace(orders, stops=tuple(sorted({*orders.stops, number}))))

    def withdraw(self) -> None:
        """Take all back: they have been carried out. Where another worker did so already, nothing is done."""
        self._change(
            lambda orders: (
                orders if orders.mode == "running" else Orders(ended=orders.ended + 1, was=orders.mode)
            )
        )

    def _stored(self) -> Orders:
        return orders_in(self._study.user_attrs.get(ORDERS))

    def _change(self, change: Callable[[Orders], Orders]) -> None:
        """Change what is there at this moment; again after an answer that got lost changes no more."""

        def attempt() -> None:
            before = self._stored()
            after = change(before)
            if after != before:
                self._study.set_user_attr(ORDERS, after.content())

        self._locked(attempt)
