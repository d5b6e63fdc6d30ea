"""Passes what happens in a search on to tracking and to the terminal."""

from __future__ import annotations

from plait.core.jobs import JobSpec
from plait.core.messages import Event, GroupStep, ModelFitted, Notice
from plait.terminal.view import Terminal
from plait.tracking import Tracker
from plait.tracking.tables import FITS_ARTIFACT, GROUP_STEPS_ARTIFACT, Fits, GroupSteps, LineTable


class SearchRecorder:
    """A tracker, a terminal view and the table of group steps as one."""

    def __init__(self, tracker: Tracker, terminal: Terminal, steps: GroupSteps) -> None:
        self._tracker = tracker
        self._terminal = terminal
        self._steps = steps
        self._fits = Fits(steps.path.parent)

    def start_job(self, job: JobSpec, trial: int) -> None:
        """A job is about to be submitted."""
        self._tracker.start_job(job, trial)

    def handle(self, event: Event) -> None:
        """Something happened in the engine."""
        if isinstance(event, Notice):
            self._terminal.note(event.text)
            return
        if isinstance(event, ModelFitted):
            self._fits.add(event)
            self._show(self._fits, FITS_ARTIFACT, due=self._fits.grown)
            return
        self._tracker.handle(event)
        self._terminal.handle(event)
        if isinstance(event, GroupStep):
            self._steps.add(event)
            self._show(self._steps, GROUP_STEPS_ARTIFACT, due=self._steps.grown)

    def show_tables(self) -> None:
        """Keep the tables of group steps and of fits with the search's run, as they are at the end."""
        self._show(self._steps, GROUP_STEPS_ARTIFACT, due=self._steps.behind)
        self._show(self._fits, FITS_ARTIFACT, due=self._fits.behind)

    def _show(self, table: LineTable, name: str, *, due: bool) -> None:
        if due:
            self._tracker.record_table(name, table.artifact())

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
