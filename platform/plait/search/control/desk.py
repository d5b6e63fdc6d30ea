"""What a running search does about its owner's requests."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from plait.core.errors import InputError, SearchError
from plait.core.lifecycle import JobState
from plait.core.space import Space, Value
from plait.search.attributes import PRIORITY_KEY
from plait.search.control.mailbox import Answer, Desk, Mailbox, Request
from plait.search.control.orders import Mode, Orders, StandingOrders
from plait.search.control.targets import check_target
from plait.search.points import read_point

LOOK_SECONDS = 2.0  # between two looks at orders that came in elsewhere
_BEFORE = ", or a trial of lower priority makes room"


class Study(Protocol):
    """What the desk needs of the study."""

    @property
    def orders(self) -> StandingOrders:
        """The standing orders."""

    def trial_states(self) -> Sequence[JobState]:
        """The states of all trials, by number."""

    def values(self, number: int) -> Mapping[str, Value]:
        """Of a trial's searched keys."""

    def enqueue(
        self,
        values: Mapping[str, Value],
        *,
        request: str,
        warm_from: Path | None = None,
        priority: int | None = None,
    ) -> int:
        """Let a trial with these values come next, beyond those asked for; its number. One for a request."""


@dataclass(slots=True)
class Clerk:
    """Attends to the mailbox of one search, once in every iteration.

    Attributes:
        weights: a copy of a trial's newest saved weights, under a name of its own; None where there are none.
        save: has a live trial of this process saved at the next boundary; False for any other.
        describe: how the search stands, in lines.
        facts: the same for programs, as plain data.
        say: shown where the search runs, since who asked may have stopped waiting.
        name: of the search, for what its owner may type next.
        whole: a point must name every searched key, since the sampler draws none: a grid's.
    """

    mailbox: Mailbox
    desk: Desk
    study: Study
    space: Space
    weights: Callable[[int, str], Path | None]
    save: Callable[[int], bool]
    describe: Callable[[Mode], str]
    facts: Callable[[Mode], Mapping[str, object]]
    say: Callable[[str], None]
    name: str
    whole: bool = False
    clock: Callable[[], float] = time.monotonic
    _awaited: set[str] = field(default_factory=set)  # requests that a state was asked for, once
    _orders: Orders = field(default_factory=Orders)
    _stamp: tuple[int, int] | None = None
    _next_look: float = -math.inf

    def attend(self) -> Orders:
        """Act on what waits, if this process has the desk; what holds now, whoever ordered it where."""
        if self.desk.take():
            for request in self.mailbox.waiting():
                answer = self._act(request)
                if answer is None:
                    continue
                self.mailbox.answer(request, answer)
                if not answer.done:
                    refused = " ".join([request.verb, *request.overrides])
                    self.say(f"plait control {refused}: refused. {answer.text.splitlines()[0]}")
        stamp, now = self.mailbox.orders_stamp, self.clock()
        if stamp != self._stamp or now >= self._next_look:
            self._stamp, self._next_look = stamp, now + LOOK_SECONDS
            self._look()
        return self._orders

    def withdraw(self) -> None:
        """What was ordered has been done."""
        self.study.orders.withdraw()
        self._look()

    def begin_anew(self) -> None:
        """Whatever was asked for was about an earlier search of this name; so were orders, which went with
        its study."""
        if self.desk.take():
            self.mailbox.empty()

    def _look(self) -> None:
        self._orders = self.study.orders.read()
        if self.desk.take():
            self.mailbox.show_orders(self._orders)

    def close(self) -> None:
        """Leave the desk to others."""
        self.desk.close()

    def _act(self, request: Request) -> Answer | None:
        """The answer; None where it must wait for the next boundary."""
        try:
            if request.verb == "stop" and request.trial is not None:
                return Answer(True, self._stop_trial(request.trial))
            if request.verb in _MODES:
                return self._change(request.verb)
            if request.verb == "status":
                return Answer(True, self.describe(self.study.orders.read().mode))
            if request.verb == "facts":
                return Answer(True, json.dumps(self.facts(self.study.orders.read().mode), indent=2))
            if request.verb == "add":
                return Answer(True, self._add(request, {}))
            if request.verb == "clone" and request.trial is not None:
                return self._clone(request, request.trial)
        except InputError as error:
            return Answer(False, str(error))
        return Answer(False, f"{request.verb!r} is not known to this version of Plait.")

    def _change(self, verb: str) -> Answer:
        mode, text = _MODES[verb]
        if self.study.orders.read().mode == mode:
            return Answer(True, f"The search is {mode} already.")
        self.study.orders.set_mode(mode)
        self._look()
        return Answer(True, text.format(name=shlex.quote(self.name)))

    def _stop_trial(self, number: int) -> str:
        check_target("stop", number, self.study.trial_states(), self.name)
        self.study.orders.stop_trial(number)
        self._look()
        return f"Trial {number} ends after this step."

    def _add(self, request: Request, values: Mapping[str, Value], warm_from: Path | None = None) -> str:
        overrides, priority = self._priority(request.overrides)
        point = {**values, **read_point(self.space, overrides)}
        keys = [dimension.name for dimension in self.space.dimensions]
        if self.whole and (missing := [key for key in keys if key not in point]):
            raise SearchError(
                f"{' '.join(request.overrides)}: without {', '.join(missing)}",
                "A grid (search.sampler=grid) draws no values for what is left open.",
                f"Give every key: {', '.join(keys)}.",
            )
        number = self.study.enqueue(point, request=request.id, warm_from=warm_from, priority=priority)
        return (
            f"Trial {number} comes next, as soon as a place is free{_BEFORE if priority is not None else ''}."
        )

    def _priority(self, overrides: Sequence[str]) -> tuple[list[str], int | None]:
        """A trial may have a priority of its own, which changes nothing of what it comes to: apart from the
        values that are searched."""
        key = f"{PRIORITY_KEY}="
        given = [each for each in overrides if each.startswith(key)]
        if not given or any(dimension.name == PRIORITY_KEY for dimension in self.space.dimensions):
            return list(overrides), None
        try:
            return [each for each in overrides if each not in given], int(given[-1].removeprefix(key))
        except ValueError:
            raise SearchError(given[-1], "A priority is a whole number.", f"Give {key}5.") from None

    def _clone(self, request: Request, number: int) -> Answer | None:
        check_target("clone", number, self.study.trial_states(), self.name)
        warm_from = None
        if request.warm:
            _check_warm(request.overrides)
            warm_from = self.weights(number, request.id)
            if warm_from is None and request.id not in self._awaited and self.save(number):
                self._awaited.add(request.id)
                return None
            if warm_from is None:
                raise SearchError(
                    f"trial {number} has no saved weights",
                    "A warm start begins with the weights of an adapter that was saved.",
                    "Ask again after its next step, or clone it without --warm.",
                )
        return Answer(True, self._add(request, self.study.values(number), warm_from))


def _check_warm(overrides: Sequence[str]) -> None:
    for override in overrides:
        if override.startswith(("adapter.rank=", "adapter.target_modules=")):
            raise SearchError(
                f"--warm {override}",
                "A warm start keeps the shape of the adapter: its rank and its target modules.",
                "Leave this key as it is, or clone without --warm.",
            )


_MODES: dict[str, tuple[Mode, str]] = {
    "pause": ("paused", "All jobs are parked after this step; `plait control {name} resume` goes on."),
    "resume": ("running", "The search goes on."),
    "stop": ("stopping", "No further trial starts; those that run are trained to their end."),
    "cancel": ("cancelling", "Every trial ends after this step, and the search with them."),
}
