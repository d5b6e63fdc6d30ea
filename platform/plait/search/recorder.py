"""Passes what happens in a search on to tracking and to the terminal."""

from __future__ import annotations

from plait.engine.messages import Event
from plait.jobs import JobSpec
from plait.terminal import Terminal
from plait.tracking import Tracker


class SearchRecorder:
    """A tracker and a terminal view as one."""

    def __init__(self, tracker: Tracker, terminal: Terminal) -> None:
        self._tracker = tracker
        self._terminal = terminal

    def start_job(self, job: JobSpec, trial: int) -> None:
        """A job is about to be submitted."""
        self._tracker.start_job(job, trial)

    def handle(self, event: Event) -> None:
        """Something happened in the engine."""
        self._tracker.handle(event)
        self._terminal.handle(event)

    def judge(self, job: str, state: str, objective: float | None, reason: str) -> None:
        """The search's last word on a job."""
        self._tracker.judge(job, state, objective, reason)
        self._terminal.judged(job)

    def run_id(self, job: str) -> str:
        """MLflow's id of the job's run; "" while it is not known."""
        record = self._tracker.board.jobs.get(job)
        return record.run_id if record is not None else ""
