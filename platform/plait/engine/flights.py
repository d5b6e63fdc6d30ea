"""What was sent to a pipeline and is not done: windows of steps, planned one after another while it trains.

A seam: the coordinator decides about jobs and knows no pipeline. A job's next step is planned before the step
in flight is done, unless something is to be decided after that one: at its end, at a rung, at an evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from plait.core.messages import RunSchedule
from plait.core.plans import Microbatch
from plait.core.settings import RunSettings
from plait.engine.jobs import LiveJob
from plait.engine.packer import Packer
from plait.engine.predictions import Around, Expected
from plait.engine.worker import WorkerFacts
from plait.planner.verify import verify_contents
from plait.planner.windows import Windows

OPEN_ORDERS = ("plait", "lorafusion")  # the others drain the pipeline after each step
Microbatches = Sequence[Microbatch]
Expect = Callable[[Microbatches, Mapping[str, LiveJob], "Around"], Expected]


@dataclass(slots=True)
class Flight:
    """A window that is not done, with what was expected of it, and when it was sent."""

    jobs: dict[str, LiveJob]
    expected: Expected
    sent: float


class Flights:
    """The windows of one pipeline that are not done, oldest first.

    Args:
        expect: predicts a window, given the attached jobs and what is in flight beside it.
    """

    def __init__(self, stages: int, order: str, packer: Packer, expect: Expect) -> None:
        capacity = packer.capacity
        self._stages, self._order, self._capacity, self._expect = stages, order, capacity, expect
        self._flights: deque[Flight] = deque()
        self._before: Microbatches = ()  # the last that were sent, as many as may be in flight
        self._windows = Windows(
            stages,
            capacity,
            lambda batches: packer.bins(batches, capacity),
            filling=order == "plait",
        )

    def next(self, jobs: Iterable[LiveJob], now: float) -> RunSchedule | None:
        """The next window: a step of each of these jobs that may take one. If none may, one that drains the
        pipeline; None if it is drained."""
        attached = {job.name: job for job in jobs}
        own = {name: job for name, job in attached.items() if job.may_fly}
        if not own:
            self._windows.drained()
            self._before = ()
            return RunSchedule((), self._order) if self._flights else None
        batches = [job.next_batch() for job in own.values()]
        microbatches = self._windows.plan(batches)
        filled = tuple(each for each in microbatches if each.segments)
        verify_contents(filled, batches, {0: self._capacity})
        steps = [job.next_step() for job in own.values()]
        for job in own.values():
            job.flying += 1
        before = [_of(each, attached) for each in self._before]
        around = Around(before, self._after(microbatches, own))
        self._flights.append(Flight(own, self._expect(microbatches, attached, around), now))
        self._before = [*self._before, *microbatches][-(self._stages - 1) :]
        return RunSchedule((*microbatches, *steps), self._order, drained=False)

    def _after(self, window: Microbatches, jobs: Mapping[str, LiveJob]) -> Microbatches:
        """What will probably follow a window, as far as it meets it: the same of the jobs that fly on, each
        when its batch is back (the bubble lemma)."""
        ready = {
            each.job: place + self._stages for place, own in enumerate(window) for each in own.segments
        }  # of several places the last
        flying = {name for name, job in jobs.items() if job.may_fly}
        places = range(len(window), len(window) + self._stages - 1)
        return [
            _of(window[place % len(window)], {name for name in flying if place >= ready[name]})
            for place in places
        ]

    def landed(self) -> Flight:
        """The oldest window, which is done now."""
        flight = self._flights.popleft()
        for job in flight.jobs.values():
            job.flying -= 1
        return flight


def _of(microbatch: Microbatch, jobs: Container[str]) -> Microbatch:
    """A microbatch with the segments of these jobs alone."""
    return replace(microbatch, segments=tuple(each for each in microbatch.segments if each.job in jobs))


def flights_of(facts: WorkerFacts, settings: RunSettings, packer: Packer, expect: Expect) -> Flights | None:
    """The flights of a single pipeline whose order leaves it undrained; None for any other worker."""
    stages, order, tensor = facts.stages, settings.engine.schedule, facts.parts[0][0].tensor
    if tensor > 1 or len(stages) != 1 or stages[0] == 1 or order not in OPEN_ORDERS:
        return None
    return Flights(stages[0], order, packer, expect)
