"""The calls that a search makes of the tracker, without the search: as many adapters and steps as asked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from plait.core.jobs import JobSpec
from plait.core.messages import (
    Event,
    GroupStep,
    JobAdmitted,
    JobEnded,
    JobEvaluated,
    JobProgress,
    ModelFitted,
)
from plait.core.objectives import Verdict
from plait.tracking import Tracker
from plait.tracking.tables import FITS_ARTIFACT, GROUP_STEPS_ARTIFACT, Fits, GroupSteps

TOKENS = 332  # of one step of one adapter: what its curves show, nothing depends on it
EVALUATIONS = 10  # of one adapter
COMMITS = 10  # checkpoints of a group
FITS_EVERY = 64  # iterations, of seconds and of bytes
COEFFICIENTS = 24  # of a fit of bytes, the longer one


@dataclass(frozen=True, slots=True)
class Script:
    """What is trained in the story that the tracker is told.

    Attributes:
        adapters: in all.
        steps: of each.
        together: adapters of one group; the next group begins when one is done.
        adapter: folder that every adapter leaves behind.
    """

    adapters: int
    steps: int
    together: int
    adapter: Path

    def loss(self, adapter: int, step: int) -> float:
        """Training loss of an adapter after a step: falling, with noise that can be told again."""
        return 4.0 / math.sqrt(step) + 0.1 * math.sin(step * (adapter + 1)) + 1.0

    def kept(self, points: int) -> set[int]:
        """Steps whose points are sent whatever their loss, where ``points`` are asked for."""
        stride = -(-self.steps // points)
        return {1, self.steps, *range(stride, self.steps + 1, stride)}

    def best(self, adapter: int) -> int:
        """The step of an adapter with the lowest training loss."""
        return min(range(1, self.steps + 1), key=lambda step: self.loss(adapter, step))

    def events(self, job: str, adapter: int, step: int) -> Iterator[Event]:
        """What one adapter's step makes known."""
        tokens, seconds = TOKENS * step, 0.25 * step
        yield JobProgress(job, step, self.loss(adapter, step), 1.0 / step, 1e-4, tokens, seconds, 1400.0)
        if step % max(1, self.steps // EVALUATIONS) == 0:
            yield JobEvaluated(job, step, self.loss(adapter, step) + 0.2, 4 * TOKENS)


class Teller:
    """Tells a tracker the story and measures how long the thread that trains is held up by it.

    Args:
        tracker: with its search begun.
        jobs: whose settings the adapters have, in turns.
        script: the story.
        folder: of the search, for its tables of group steps and of fits.
    """

    def __init__(self, tracker: Tracker, jobs: Sequence[JobSpec], script: Script, folder: Path) -> None:
        self._tracker = tracker
        self._jobs = [
            replace(jobs[at % len(jobs)], name=f"adapter-{at:04d}") for at in range(script.adapters)
        ]
        self._script = script
        self._steps, self._fits = GroupSteps(folder), Fits(folder)
        self._iteration = 0
        self.seconds = 0.0  # in the tracker's calls, waiting for anything included

    def tell(self, start: int, stop: int) -> None:
        """Train the adapters from ``start`` to ``stop``, a group after the other."""
        for first in range(start, stop, self._script.together):
            self._group(range(first, min(first + self._script.together, stop)))

    def _timed(self, call: Callable[[], object]) -> None:
        started = time.perf_counter()
        call()
        self.seconds += time.perf_counter() - started

    def _group(self, adapters: range) -> None:
        script, tracker = self._script, self._tracker
        jobs = {at: self._jobs[at] for at in adapters}
        names = tuple(job.name for job in jobs.values())
        for at, job in jobs.items():
            self._timed(partial(tracker.start_job, job, at))
            self._handle([JobAdmitted(job, 0, script.steps, "group-0")])
        for step in range(1, script.steps + 1):
            self._iteration += 1
            tokens = TOKENS * len(jobs)
            told = [event for at, job in jobs.items() for event in script.events(job.name, at, step)]
            each = (TOKENS,) * len(jobs)
            iteration = GroupStep(
                "group-0", self._iteration, names, 2, tokens, 2.0, 2**30, 2048, each, 1.9, 2**30
            )
            self._handle([*told, iteration])
            self._timed(partial(self._tables, iteration))
            if step % max(1, script.steps // COMMITS) == 0:
                self._timed(tracker.commit)
        for at, job in jobs.items():
            self._end(at, job.name)

    def _tables(self, iteration: GroupStep) -> None:
        """The tables of group steps and of fits, as a search keeps them."""
        self._steps.add(iteration)
        if self._steps.grown:
            self._tracker.record_table(GROUP_STEPS_ARTIFACT, self._steps.artifact())
        if self._iteration % FITS_EVERY:
            return
        for target, terms in (("seconds", COEFFICIENTS // 4), ("bytes", COEFFICIENTS)):
            found = tuple((f"term {at}", 1.0 / (self._iteration + at)) for at in range(terms))
            self._fits.add(ModelFitted(target, self._iteration, 256, found, 0.01, 0.02, 0.03, 0.05))
        if self._fits.grown:
            self._tracker.record_table(FITS_ARTIFACT, self._fits.artifact())

    def _end(self, at: int, job: str) -> None:
        script = self._script
        loss, tokens = script.loss(at, script.steps) + 0.2, TOKENS * script.steps
        seconds = 0.25 * script.steps
        ended = JobEnded(job, "finished", script.steps, "", loss, tokens, seconds, 900.0, script.adapter)
        self._handle([ended])
        self._timed(partial(self._tracker.judge, Verdict(job, "finished", loss)))

    def _handle(self, events: Sequence[Event]) -> None:
        def call() -> None:
            for event in events:
                self._tracker.handle(event)

        self._timed(call)
