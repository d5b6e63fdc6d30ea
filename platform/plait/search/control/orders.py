"""The standing orders of a search's owner, for every worker wherever it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, get_args

Mode = Literal["running", "paused", "stopping", "cancelling"]


@dataclass(frozen=True, slots=True)
class Orders:
    """What holds until it is withdrawn, for every worker of the search.

    Attributes:
        mode: of the whole search.
        stops: numbers of the trials that are to end, as long as they are live.
        ended: how often orders were withdrawn because they had been carried out, and not by their owner; as a
            worker reads them, since it opened the study.
        was: the mode that was withdrawn last.
    """

    mode: Mode = "running"
    stops: tuple[int, ...] = ()
    ended: int = 0
    was: Mode = "running"

    def content(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def orders_in(content: Mapping[str, Any] | None) -> Orders:
    """What plain data order; nothing where they are something else. Further keys are passed over."""
    match content:
        case {"mode": mode, "stops": [*stops], "ended": int(ended), "was": was} if {mode, was} <= set(
            get_args(Mode)
        ) and all(isinstance(each, int) for each in stops):
            return Orders(mode, tuple(stops), ended, was)
    return Orders()


class StandingOrders(Protocol):
    """Where they are kept: with the study, which all workers share."""

    def read(self) -> Orders:
        """What holds now."""

    def set_mode(self, mode: Mode) -> None:
        """Change what the whole search is to do."""

    def stop_trial(self, number: int) -> None:
        """A trial is to end."""

    def withdraw(self) -> None:
        """Take all back: they have been carried out."""
