"""How long a search will still take, from how fast its jobs have been stepping and what remains of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean

from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import Event, GroupStep, JobAdmitted, JobPaused
from plait.tracking.board import Board, JobRecord

DECAY = 0.99  # of an iteration's weight with each that follows it
LEAST_ITERATIONS = 5  # before the time left is told


class Pace:
    """Seconds for one optimiser step of one job, of late.

    Time in which nobody trained here, since all were paused or waited at rungs, is not counted.

    Args:
        board: the tracker's, which has seen each event before.
        clock: seconds, never going back.
    """

    def __init__(self, board: Board, clock: Callable[[], float]) -> None:
        self._board = board
        self._clock = clock
        self._training: set[str] = set()  # here: on the board there are those of other processes, too
        self._last: float | None = None  # when an iteration ended; None where nobody trained since
        self._iterations = 0
        self._interrupted = False
        self._seconds = self._steps = 0.0

    def handle(self, event: Event) -> None:
        """Learn from an event."""
        if isinstance(event, JobAdmitted):
            self._last = self._last if self._training else None
            self._training.add(event.job.name)
        elif isinstance(event, (JobPaused, JobResult)):
            self.lose(event.job)
            self._interrupted |= isinstance(event, JobResult) and event.state == JobState.PAUSED
        elif isinstance(event, GroupStep):
            now = self._clock()
            seconds = event.seconds if self._last is None else now - self._last
            self._seconds = DECAY * self._seconds + seconds
            self._steps = DECAY * self._steps + len(event.jobs)
            self._iterations += 1
            self._last = now

    def lose(self, job: str) -> None:
        """A job trains here no more."""
        self._training.discard(job)

    @property
    def seconds_left(self) -> float | None:
        """Of the whole search, on the wall clock; None before it can be told."""
        if self._iterations < LEAST_ITERATIONS or self._interrupted:
            return None
        left = steps_left(list(self._board.jobs.values()), self._board.trials)
        return None if left is None else left * self._seconds / self._steps


def steps_left(jobs: Sequence[JobRecord], trials: int) -> float | None:
    """Optimiser steps that will still be taken, if those that have ended tell how the others will.

    A job is expected to come as far as those on average did that ended further on than where it stands; one
    not yet drawn, as far as all that ended. Where none ended, each takes all its steps.

    Args:
        jobs: those drawn.
        trials: how many there will be at least.

    Returns:
        None before the first job has begun.
    """
    plans = [job.steps for job in jobs if _planned(job)]
    if not plans:
        return None
    usual = fmean(plans)
    ends = sorted(_share(job, usual) for job in jobs if job.ended)
    sums = [0.0, *accumulate(reversed(ends))]  # of the furthest ones

    def expected(share: float) -> float:
        further = len(ends) - bisect_right(ends, share)
        return (sums[further] / further if further else 1.0) - share

    begun = sum((job.steps or usual) * expected(_share(job, usual)) for job in jobs if not job.ended)
    drawn = fmean(ends) if ends else 1.0
    return begun + (max(trials, len(jobs)) - len(jobs)) * usual * drawn


def _planned(job: JobRecord) -> bool:
    """Whether ``steps`` is what it was to take. Of one that an earlier process ended it is the last step that
    it took, and of one that has not begun 0."""
    return job.steps > job.step or (job.steps > 0 and (not job.ended or job.state == JobState.FINISHED))


def _share(job: JobRecord, usual: float) -> float:
    """How far a job came of what it was to take, or would be, where it was to take as many as is usual."""
    if job.state == JobState.FINISHED:
        return 1.0
    return job.step / (job.steps if _planned(job) else max(usual, job.step, 1))
