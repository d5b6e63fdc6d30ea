"""When the states of live jobs are saved while they train, and which of them are kept.

A state is saved at the start of an iteration: by then everything that happened before has been handed to
whoever follows the run, and ``commit`` makes that durable before the state is published. So a state on disk
means that every step up to it is recorded; after a crash none is missing, and what is trained again is
recorded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from plait.core.errors import StorageError
from plait.core.messages import Command, Event, JobSaved, Notice, SaveState
from plait.core.settings import EngineSettings
from plait.engine.live import LiveJob
from plait.engine.saved import prune, state_folder

RETRY_SECONDS = 10.0  # until a job that waits to be parked, and could not be saved, is tried again


@dataclass(slots=True)
class _Mark:
    """Of one job: its last state and that state's step; step and time from which the schedule counts; when a
    state could not be written, since the last one that could."""

    when: float
    step: int = 0
    state: Path | None = None
    counted: int = 0
    failed: float | None = None


class Checkpointing:
    """Saves jobs that are due.

    Args:
        settings: ``checkpoint_steps``, ``checkpoint_minutes``, ``checkpoint_keep``.
        folder: for the jobs' folders of states.
        send: carries a command out.
        clock: seconds, rising.
    """

    def __init__(
        self,
        settings: EngineSettings,
        folder: Path,
        send: Callable[[Command], object],
        clock: Callable[[], float],
    ) -> None:
        self.commit: Callable[[], None] = lambda: None
        self._settings = settings
        self._folder = folder
        self._send = send
        self._clock = clock
        self._marks: dict[str, _Mark] = {}
        self._wanted: set[str] = set()

    def folder_of(self, job: str) -> Path:
        """A job's folder of states."""
        return self._folder / job

    def admitted(self, job: LiveJob, state: Path | None = None) -> None:
        """A job starts, or goes on from a state: the next is counted from here."""
        self._marks[job.name] = _Mark(self._clock(), job.step, state, job.step)

    def left(self, job: str) -> None:
        """A job is over."""
        self._marks.pop(job, None)
        self._wanted.discard(job)

    def want(self, job: str) -> None:
        """Save a job at the next boundary, whatever the schedule says."""
        self._wanted.add(job)

    def save_due(self, jobs: Iterable[LiveJob]) -> list[Event]:
        """Save the jobs whose time has come."""
        due = [job for job in jobs if self._due(job)]
        self._wanted.clear()
        return list(self._save(due))

    def save(self, jobs: Iterable[LiveJob], *, urgent: bool = True) -> tuple[dict[str, Path], list[Event]]:
        """Save jobs now, those that have moved since their last state; by name, where each is found again.

        A job without steps has no state: it starts afresh. Unless it is ``urgent``, one whose state could not
        be written a moment ago is left for later.
        """
        asked = list(jobs)
        moved = [job for job in asked if job.step > self._mark(job).step]
        events = list(self._save([job for job in moved if urgent or not self._just_failed(job)]))
        found = {job.name: self._mark(job).state for job in asked}
        return {name: state for name, state in found.items() if state is not None}, events

    def _mark(self, job: LiveJob) -> _Mark:
        return self._marks.setdefault(job.name, _Mark(self._clock()))

    def _just_failed(self, job: LiveJob) -> bool:
        failed = self._mark(job).failed
        return failed is not None and self._clock() - failed < RETRY_SECONDS

    def _due(self, job: LiveJob) -> bool:
        mark = self._mark(job)
        if job.done or job.step <= mark.step:
            return False
        every, minutes = self._settings.checkpoint_steps, self._settings.checkpoint_minutes
        by_steps = every is not None and job.step // every > mark.counted // every
        by_time = minutes is not None and self._clock() - mark.when >= 60 * minutes
        return by_steps or by_time or job.name in self._wanted

    def _save(self, jobs: list[LiveJob]) -> Iterator[Event]:
        """One commit for all, then each state. One that cannot be written harms no job: the states before
        it stay, and the next is tried when it is due."""
        trouble = self._committed() if jobs else ""
        for job in jobs:
            mark, folder = self._mark(job), self.folder_of(job.name)
            mark.counted, mark.when = job.step, self._clock()
            directory = state_folder(folder, job.step)
            cursor = job.cursor_at(self._clock())
            if reason := trouble or self._written(SaveState(job.name, directory, cursor)):
                mark.failed = self._clock()
                before = f"the last state is that of step {mark.step}" if mark.step else "it has no state yet"
                yield Notice(f"{job.name} could not be saved at step {job.step} ({reason}); {before}")
                continue
            mark.step, mark.state, mark.failed = job.step, directory, None
            prune(folder, self._settings.checkpoint_keep, newest=job.step)
            yield JobSaved(job.name, job.step, directory)

    def _committed(self) -> str:
        """Commit; what went wrong, if anything did."""
        try:
            self.commit()
        except StorageError as error:
            return error.value
        return ""

    def _written(self, command: SaveState) -> str:
        """Save; what went wrong, if anything did."""
        try:
            self._send(command)
        except StorageError as error:
            return error.value
        return ""
