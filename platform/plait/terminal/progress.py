"""How much of a search's training is done, and how much is left, both in optimiser steps.

A seam: pure functions of the leaderboard. The share that is done and the time that is left have one measure,
so that they agree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean

from plait.core.lifecycle import JobState
from plait.tracking.leaderboard import JobRecord, Leaderboard


def share_done(board: Leaderboard) -> float:
    """Share of the search's training that is done, in [0, 1]: the steps taken, of these and those left.

    While no job's budget is known, every trial counts the same.
    """
    jobs = list(board.jobs.values())
    left = steps_left(jobs, board.trials)
    if left is None:
        return sum(job.ended for job in jobs) / max(board.trials, len(jobs), 1)
    done = sum(job.step for job in jobs)
    return done / (done + left) if done + left else 1.0


def steps_left(jobs: Sequence[JobRecord], trials: int) -> float | None:
    """Remaining optimiser steps, estimated from the jobs that have ended.

    A job is expected to get as far as the average of those that ended beyond its present step; a trial that
    is not suggested yet, as far as the average of all. If none has ended, each takes all its steps.

    Args:
        trials: least total number of trials.

    Returns:
        The estimate; None before the first job has started.
    """
    plans = [job.steps for job in jobs if _planned(job)]
    if not plans:
        return None
    usual = fmean(plans)
    trained = (job for job in jobs if job.ended and job.state != JobState.INFEASIBLE)
    ends = sorted(_share(job, usual) for job in trained)
    sums = [0.0, *accumulate(reversed(ends))]  # of the furthest ones

    def expected(share: float) -> float:
        further = len(ends) - bisect_right(ends, share)
        return (sums[further] / further if further else 1.0) - share

    begun = sum((job.steps or usual) * expected(_share(job, usual)) for job in jobs if not job.ended)
    to_come = fmean(ends) if ends else 1.0
    return begun + (max(trials, len(jobs)) - len(jobs)) * usual * to_come


def _planned(job: JobRecord) -> bool:
    """Whether ``steps`` is the job's budget. For a job that ended in an earlier process it is its last step,
    and 0 for one that has not started."""
    return job.steps > job.step or (job.steps > 0 and (not job.ended or job.state == JobState.FINISHED))


def _share(job: JobRecord, usual: float) -> float:
    """The share of its budget, or of the usual budget if that is not known, that a job has done."""
    if job.state == JobState.FINISHED:
        return 1.0
    return job.step / (job.steps if _planned(job) else max(usual, job.step, 1))
