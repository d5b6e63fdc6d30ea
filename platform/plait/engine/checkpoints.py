"""Decides when checkpoints are taken, where they are, and which are kept. It does not touch tensors.

A checkpoint is taken at the start of an iteration, after all earlier events have been passed on, and
``commit`` makes their records durable before the checkpoint is published. So a checkpoint on disk means that
every step up to it is recorded: after a crash none is missing, and a step that is trained again is recorded
once.

A job's checkpoints are in one folder, each named after its step; :mod:`plait.engine.checkpoint_files` writes
and reads one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from plait.core.errors import StorageError
from plait.core.messages import Command, Cursor, Notice, SaveCheckpoint
from plait.core.settings import EngineSettings
from plait.engine.jobs import LiveJob

HEADER = "checkpoint.json"  # written last: a folder with it is a checkpoint
PREFIX = "step-"
RETRY_SECONDS = 10.0  # delay before another attempt to save a job that must be paused


# ---- folders ------------------------------------------------------------------------------------------


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint after ``step`` steps, in a job's folder of checkpoints."""
    return f"{PREFIX}{step:08d}"


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints at a path, newest first: the path itself, or those in a job's folder.

    They were written completely, but may have been damaged since.
    """
    if (path / HEADER).exists():
        return [path]
    try:
        found = [child for child in path.iterdir() if _step(child) is not None]
    except OSError:  # it does not exist, or is not a folder
        return []
    return sorted(found, key=lambda child: _step(child) or 0, reverse=True)


def newest_step(path: Path | None) -> int:
    """The step of the newest checkpoint at a path; 0 if there is none."""
    found = [] if path is None else checkpoints(path)
    return (_step(found[0]) or 0) if found else 0


def prune(folder: Path, keep: int, *, newest: int) -> None:
    """Remove all but ``keep`` checkpoints up to step ``newest``, and partial ones of killed processes.

    Checkpoints beyond ``newest`` were skipped as damaged when the job resumed from an earlier one. Raises
    nothing, because a checkpoint that cannot be removed only takes space.
    """
    found = checkpoints(folder)
    beyond = [path for path in found if (_step(path) or 0) > newest]
    _remove([*beyond, *found[len(beyond) + keep :]])
    _remove(folder.glob(".*"))


def remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints of a job that has ended; raises nothing."""
    _remove([folder])


def _step(path: Path) -> int | None:
    digits = path.name.removeprefix(PREFIX)
    return int(digits) if path.name.startswith(PREFIX) and digits.isdecimal() else None


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


# ---- schedule -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _SaveRecord:
    """What is known about one job's checkpoints.

    Attributes:
        tried_at: time of the last attempt; minutes count from it.
        tried_step: step of the last attempt; steps count from it.
        step: of the last checkpoint.
        folder: of the last checkpoint.
        cursor: how far the job had come by then.
        failed_at: time of the last attempt, if it failed.
    """

    tried_at: float
    tried_step: int = 0
    step: int = 0
    folder: Path | None = None
    cursor: Cursor = field(default_factory=Cursor)
    failed_at: float | None = None


class Checkpointer:
    """Takes checkpoints of the jobs that are due.

    Attributes:
        count: checkpoints taken.
        seconds: time they took.
    """

    def __init__(
        self,
        settings: EngineSettings,
        folder: Path,
        send: Callable[[Command], object],
        clock: Callable[[], float],
        commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.count, self.seconds = 0, 0.0
        self._commit = commit
        self._settings = settings
        self._folder = folder
        self._send = send
        self._clock = clock
        self._records: dict[str, _SaveRecord] = {}

    def admitted(self, job: LiveJob, checkpoint: Path | None = None) -> None:
        """Note that a job starts or resumes from a checkpoint; the next one is due counting from here."""
        self._records[job.name] = _SaveRecord(self._clock(), job.step, job.step, checkpoint, job.cursor)

    def ended(self, job: str) -> None:
        """Forget a job."""
        self._records.pop(job, None)

    def fall_back(self, job: LiveJob) -> int:
        """Put a job whose worker is lost back to its last checkpoint; how many steps are lost."""
        record, before = self._record(job), job.step
        job.fall_back(record.cursor, record.folder and record.folder.parent)
        return before - job.step

    def save_due(self, jobs: Iterable[LiveJob]) -> list[Notice]:
        """Save the jobs whose checkpoints are due."""
        return self._save([job for job in jobs if self.due(job)])

    def save(self, jobs: Iterable[LiveJob], *, urgent: bool = True) -> tuple[dict[str, Path], list[Notice]]:
        """Save the jobs that have trained since their last checkpoint.

        A job without steps has no checkpoint, and starts from scratch. Unless ``urgent``, a job that could
        not be saved a moment ago is left for later.

        Returns:
            The last checkpoint of each job that has one, by name, and what could not be saved.
        """
        asked = list(jobs)
        changed = [job for job in asked if job.step > self._record(job).step]
        notices = self._save([job for job in changed if urgent or not self._just_failed(job)])
        found = {job.name: self._record(job).folder for job in asked}
        return {name: folder for name, folder in found.items() if folder is not None}, notices

    def _record(self, job: LiveJob) -> _SaveRecord:
        return self._records.setdefault(job.name, _SaveRecord(self._clock()))

    def _just_failed(self, job: LiveJob) -> bool:
        failed_at = self._record(job).failed_at
        return failed_at is not None and self._clock() - failed_at < RETRY_SECONDS

    def due(self, job: LiveJob) -> bool:
        """Whether a job is to be saved now."""
        record = self._record(job)
        if job.done or job.step <= record.step:
            return False
        every, minutes = self._settings.checkpoint_steps, self._settings.checkpoint_minutes
        by_steps = every is not None and job.step // every > record.tried_step // every
        by_time = minutes is not None and self._clock() - record.tried_at >= 60 * minutes
        return by_steps or by_time

    def _save(self, jobs: list[LiveJob]) -> list[Notice]:
        """Commit once for all jobs, then write each checkpoint. A failed one harms no job: earlier ones are
        kept, and the next is tried when it is due."""
        if not jobs:
            return []
        began = self._clock()
        trouble, unsaved = _trouble(self._commit), dict[str, list[str]]()  # by reason
        for job in jobs:
            record, folder = self._record(job), self._folder / job.name
            record.tried_step, record.tried_at = job.step, self._clock()
            directory = folder / checkpoint_name(job.step)
            command = SaveCheckpoint(job.name, directory, job.cursor_at(self._clock()))
            if reason := trouble or _trouble(partial(self._send, command)):
                record.failed_at = self._clock()
                last = f"last saved at step {record.step}" if record.step else "not saved yet"
                same = reason.replace(str(directory), str(self._folder))
                unsaved.setdefault(same, []).append(f"{job.name} at step {job.step} ({last})")
                continue
            record.step, record.folder, record.failed_at = job.step, directory, None
            record.cursor = command.cursor
            self.count += 1
            prune(folder, self._settings.checkpoint_keep, newest=job.step)
        self.seconds += self._clock() - began
        return [Notice(f"{reason}: could not save {', '.join(those)}") for reason, those in unsaved.items()]


def _trouble(action: Callable[[], object]) -> str:
    """Run an action, and return the disk's error as text, "" if there was none."""
    try:
        action()
    except StorageError as error:
        return error.value
    return ""
