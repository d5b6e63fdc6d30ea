"""Passes what happens in a search on to tracking and to the terminal."""

from __future__ import annotations

from plait.core.jobs import JobSpec
from plait.core.messages import Event, ModelFitted, Notice
from plait.terminal.view import Terminal
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
        if isinstance(event, Notice):
            self._terminal.note(event.text)
            return
        self._tracker.handle(event)
        if not isinstance(event, ModelFitted):
            self._terminal.handle(event)

    def lose(self, job: str) -> None:
        """Another process trains the job from here on: nothing more is written of it."""
        self._tracker.lose(job)
        self._terminal.lose(job)

    def commit(self) -> None:
        """Return when all that was handed over survives a crash."""
        self._tracker.commit()

    def run_id(self, job: str) -> str:
        """MLflow's id of the job's run; "" while it is not known."""
        return self._tracker.run_id(job)
