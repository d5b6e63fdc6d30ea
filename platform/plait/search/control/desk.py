"""What a running search does about its owner's requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plait.errors import InputError, SearchError
from plait.search.control.mailbox import Answer, Desk, Mailbox, Mode, Orders, Request
from plait.search.points import read_point
from plait.search.space import Space, Value

RUNNING = "running"


class Study(Protocol):
    """What the desk needs of the study."""

    def state(self, number: int) -> str | None:
        """ "running", "waiting", "complete", "pruned" or "failed"; None where there is no such trial."""

    def values(self, number: int) -> Mapping[str, Value]:
        """Of a trial's searched keys."""

    def enqueue(self, values: Mapping[str, Value], *, request: str, warm_from: Path | None = None) -> int:
        """Let a trial with these values come next, beyond those asked for; its number. One for a request."""


@dataclass(slots=True)
class Clerk:
    """Attends to the mailbox of one search, once in every iteration.

    Attributes:
        weights: the folder with a trial's newest saved weights, or None.
    """

    mailbox: Mailbox
    desk: Desk
    study: Study
    space: Space
    weights: Callable[[int], Path | None]

    def attend(self) -> Orders:
        """Act on what waits, if this process has the desk; what holds now, whoever has it."""
        if self.desk.take():
            for request in self.mailbox.waiting():
                self.mailbox.answer(request, self._act(request))
        return self.mailbox.orders

    def close(self) -> None:
        """The search is over: what was ordered for its end has been done."""
        if self.desk.take() and self.mailbox.orders != Orders():
            self.mailbox.set_mode("running")
            self.mailbox.set_stops(())

    def _act(self, request: Request) -> Answer:
        try:
            if request.verb == "stop" and request.trial is not None:
                return Answer(True, self._stop_trial(request.trial))
            if request.verb in _MODES:
                return self._change(request.verb)
            if request.verb == "add":
                return Answer(True, self._add(request, {}))
            if request.verb == "clone" and request.trial is not None:
                return Answer(True, self._clone(request, request.trial))
        except InputError as error:
            return Answer(False, str(error))
        return Answer(False, f"{request.verb!r} is not known to this version of Plait.")

    def _change(self, verb: str) -> Answer:
        mode, text = _MODES[verb]
        if self.mailbox.orders.mode == mode:
            return Answer(True, f"The search is {mode} already.")
        self.mailbox.set_mode(mode)
        return Answer(True, text)

    def _stop_trial(self, number: int) -> str:
        state = self._known(number)
        if state != RUNNING:
            raise SearchError(f"trial {number} is {state}", "Only a trial that runs can be stopped.")
        stops = self.mailbox.orders.stops
        self.mailbox.set_stops(tuple(sorted({*stops, number})))
        return f"Trial {number} ends after this step."

    def _add(self, request: Request, values: Mapping[str, Value], warm_from: Path | None = None) -> str:
        point = {**values, **read_point(self.space, request.overrides)}
        number = self.study.enqueue(point, request=request.id, warm_from=warm_from)
        return f"Trial {number} comes next, as soon as a place is free."

    def _clone(self, request: Request, number: int) -> str:
        self._known(number)
        warm_from = None
        if request.warm:
            warm_from = self.weights(number)
            if warm_from is None:
                raise SearchError(
                    f"trial {number} has no saved weights",
                    "A warm start begins with the weights of an adapter that was saved.",
                    "Wait for its next checkpoint, or clone it without --warm.",
                )
        return self._add(request, self.study.values(number), warm_from)

    def _known(self, number: int) -> str:
        state = self.study.state(number)
        if state is None:
            raise SearchError(f"trial {number}", "There is no such trial in this search.")
        return state


_MODES: dict[str, tuple[Mode, str]] = {
    "pause": ("paused", "All jobs are parked after this step; `plait control NAME resume` goes on."),
    "resume": ("running", "The search goes on."),
    "stop": ("stopping", "No further trial starts; those that run are trained to their end."),
    "cancel": ("cancelling", "Every trial ends after this step, and the search with them."),
}
