"""Where each job stands: waiting for a place, live in the group, or parked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from plait.engine.admission import Admission, Demand
from plait.engine.live import LiveJob
from plait.planner.admission import Admission as Chosen
from plait.planner.admission import Applicant, admit


class Roster:
    """Keeps the jobs of one worker, and says who trains next.

    Args:
        admission: predicts the memory of a group.
        max_jobs: most jobs that train at once; None leaves it to memory.

    Attributes:
        waiting: for a place, by priority, then arrival.
        live: on the worker, by name.
        parked: saved and not on the worker; they ask for no place until nothing holds them.
    """

    def __init__(self, admission: Admission, max_jobs: int | None) -> None:
        self._admission = admission
        self._asked_for = self._max_jobs = max_jobs
        self._every = 1  # ends, after which a group that is larger by one is tried, once memory ran out
        self._ends_left: int | None = None  # until then; None where memory never ran out
        self._tried = False  # since memory ran out last
        self.waiting: list[LiveJob] = []
        self.live: dict[str, LiveJob] = {}
        self.parked: dict[str, LiveJob] = {}

    def all(self) -> list[LiveJob]:
        """Every job that has not ended."""
        return [*self.live.values(), *self.waiting, *self.parked.values()]

    def find(self, name: str) -> LiveJob | None:
        """The job of this name, wherever it stands."""
        return next((job for job in self.all() if job.name == name), None)

    def queue(self, job: LiveJob) -> None:
        """Let a job wait for a place; whoever arrived first keeps that."""
        self.remove(job)
        self.waiting.append(job)
        self.waiting.sort(key=lambda each: each.standing)

    def start(self, job: LiveJob) -> None:
        """Give a job a place."""
        self.remove(job)
        self.live[job.name] = job

    def park(self, job: LiveJob) -> None:
        """Take a job from where it stands, until nothing holds it."""
        self.remove(job)
        self.parked[job.name] = job

    def remove(self, job: LiveJob) -> None:
        """Take a job from wherever it stands; nothing where it stands nowhere."""
        self.live.pop(job.name, None)
        self.parked.pop(job.name, None)
        self.waiting = [each for each in self.waiting if each is not job]

    def end(self, job: LiveJob) -> None:
        """Take out a job that is over."""
        self.remove(job)
        if self._ends_left is None or self._max_jobs is None or self._max_jobs == self._asked_for:
            return
        self._ends_left -= 1
        if self._ends_left == 0:
            self._max_jobs += 1
            self._ends_left, self._tried = self._every, True

    def choose(self) -> Chosen:
        """Who trains in the next iteration, by priority, then arrival (``plait.planner.admission.admit``).

        A job that has been taken can always train alone, whatever has been learned since.
        """
        jobs = {job.name: job for job in [*self.live.values(), *self.waiting]}

        def predict(group: Iterable[Applicant]) -> float:
            return self._admission.predicted([jobs[each.name].demand for each in group])

        applicants = [
            Applicant(
                name,
                job.spec.train.priority,
                job.arrival,
                job.demand.adapter_bytes,
                job.spec.adapter.rank,
                name in self.live,
            )
            for name, job in jobs.items()
        ]
        alone = max((predict([each]) for each in applicants), default=0.0)
        return admit(
            applicants,
            available=max(self._admission.budget, alone),
            predict=predict,
            max_jobs=self._max_jobs,
        )

    def room(self, most: int) -> int:
        """How many more jobs would start at once, were they as large as the largest that wants a place.

        At least 1 where none does: a job that has been taken can train alone.
        """
        taken = [job.demand for job in self.all() if job.keeps_place]
        largest = max(taken, key=lambda demand: demand.adapter_bytes, default=None) or self._admission.usual
        # Memory only grows with the jobs, so the first number that does not fit is found by halving.
        beyond = bisect_left(range(1, most + 1), True, key=lambda n: not self._fits([*taken, *[largest] * n]))
        return max(beyond, 0 if taken else 1)

    def shrink(self) -> None:
        """The live group ran out of memory, whatever was predicted: none as large is formed for a while.

        Other jobs may fit where these did not, so it is tried with one more after some have ended: after one
        the first time, then after 2, 4, 8. Where memory stays short, a search so runs out of it about as
        often as the number of its jobs can be halved.
        """
        self._max_jobs = len(self.live) - 1
        self._every *= 2 if self._tried else 1
        self._ends_left, self._tried = self._every, False

    def _fits(self, demands: list[Demand]) -> bool:
        few = self._max_jobs is None or len(demands) <= self._max_jobs
        return few and self._admission.fits(demands)
