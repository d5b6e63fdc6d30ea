"""The time a search still needs, from how fast its jobs have been stepping and what remains of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean

from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import Event, GroupStep, JobAdmitted, JobPaused
from plait.tracking.leaderboard import JobRecord, Leaderboard

DECAY = 0.99  # of an iteration's weight with each that follows it
LEAST_ITERATIONS = 5  # before the remaining time is estimated


class Pace:
    """Recent seconds for one optimiser step of one job.

    Time in which no job trained here, since all were paused, is not counted.

    Args:
        board: the tracker's; it handles each event first.
        clock: seconds, never going back.
    """

    def __init__(self, board: Leaderboard, clock: Callable[[], float]) -> None:
        self._board = board
        self._clock = clock
        self._training: set[str] = set()  # in this process: the board also has those of others
        self._last: float | None = None  # end of the last iteration; None if no job has trained since
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
        """Stop counting a job: it no longer trains here."""
        self._training.discard(job)

    @property
    def seconds_left(self) -> float | None:
        """Wall-clock seconds that the whole search still needs; None before they can be estimated."""
        if self._iterations < LEAST_ITERATIONS or self._interrupted:
            return None
        left = steps_left(list(self._board.jobs.values()), self._board.trials)
        return None if left is None else left * self._seconds / self._steps


def steps_left(jobs: Sequence[JobRecord], trials: int) -> float | None:
    """Optimiser steps that are still to come, estimated from the jobs that have ended.

    A job is expected to get as far as the average of those that ended beyond its present step; a trial that
    is not suggested yet, as far as the average of all. Where none has ended, each takes all its steps.

    Args:
        jobs: those of suggested trials.
        trials: least number of trials in all.

    Returns:
        None before the first job has started.
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
    to_come = fmean(ends) if ends else 1.0
    return begun + (max(trials, len(jobs)) - len(jobs)) * usual * to_come


def _planned(job: JobRecord) -> bool:
    """Whether ``steps`` is the job's budget. For a job that an earlier process ended it is the last step it
    took, and 0 for one that has not started."""
    return job.steps > job.step or (job.steps > 0 and (not job.ended or job.state == JobState.FINISHED))


def _share(job: JobRecord, usual: float) -> float:
    """The share of its budget that a job has done; of the usual budget where its own is not known."""
    if job.state == JobState.FINISHED:
        return 1.0
    return job.step / (job.steps if _planned(job) else max(usual, job.step, 1))
