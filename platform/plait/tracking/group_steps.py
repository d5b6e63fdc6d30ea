"""The table of group steps: what every iteration of a group took, beside what was expected of it.

One JSON object a line, appended as training goes, below the search's folder; the same columns as a table of
the search's run in MLflow. A search that is gone on with adds to its table, so a step that is trained again
after a crash stands there twice: both took their seconds. Several processes may add to one table: iterations
are numbered as they stand there.
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from plait.engine.messages import GroupStep
from plait.errors import StorageError

GROUP_STEPS_FILE = "group_steps.jsonl"  # below the search's folder
GROUP_STEPS_ARTIFACT = "group_steps.json"  # of the search's run
MOST_ROWS = 2000  # of the artifact
GROWTH = 1.25  # the artifact is written anew when the table has grown by this much: its cost stays linear


@dataclass(frozen=True, slots=True)
class GroupStepRow:
    """One iteration of a group.

    Attributes:
        iteration: of the search, from 1, by whichever process, counted on over restarts.
        job_tokens: real tokens by job, in the order of ``jobs``.
        seconds: from the first microbatch to the last job's optimiser step.
        predicted_seconds, predicted_bytes: known before it ran; None where nothing was.
        peak_bytes: None where the device cannot tell.
    """

    iteration: int
    group: str
    jobs: tuple[str, ...]
    job_tokens: tuple[int, ...]
    capacity: int
    microbatches: int
    seconds: float
    predicted_seconds: float | None
    peak_bytes: int | None
    predicted_bytes: int | None


COLUMNS = tuple(field.name for field in fields(GroupStepRow))


class GroupSteps:
    """The table of one search, in its folder.

    Args:
        folder: of the search; made where it is not there.

    Raises:
        StorageError: the folder cannot be made or the table cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / GROUP_STEPS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._mend()
        except OSError as error:
            raise _trouble(self.path, error) from error
        self._count = len(read_group_steps(self.path))
        self._shown = 0

    def add(self, step: GroupStep) -> None:
        """Append one iteration.

        Raises:
            StorageError: it cannot be written.
        """
        row = GroupStepRow(
            iteration=self._count + 1,
            group=step.group,
            jobs=step.jobs,
            job_tokens=step.job_tokens,
            capacity=step.capacity,
            microbatches=step.microbatches,
            seconds=step.seconds,
            predicted_seconds=step.predicted_seconds,
            peak_bytes=step.peak_bytes,
            predicted_bytes=step.predicted_bytes,
        )
        try:
            with self.path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # a line is whole before another process reads or writes
                file.write(json.dumps(asdict(row)).encode() + b"\n")
        except OSError as error:
            raise _trouble(self.path, error) from error
        self._count += 1

    @property
    def grown(self) -> bool:
        """Whether enough was added since :meth:`artifact` to write that anew."""
        return self._count >= max(1, GROWTH * self._shown)

    def artifact(self) -> str:
        """The table in the form that MLflow shows, thinned evenly to at most ``MOST_ROWS`` rows."""
        self._shown = self._count
        rows = read_group_steps(self.path)
        kept = rows[:: max(1, -(-len(rows) // MOST_ROWS))]
        return json.dumps({"columns": COLUMNS, "data": [list(asdict(row).values()) for row in kept]})

    def _mend(self) -> None:
        """Cut off a last line that a crash left unfinished."""
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            whole = file.read()
            end = whole.rfind(b"\n") + 1
            if end < len(whole):
                file.truncate(end)


def read_group_steps(path: Path) -> list[GroupStepRow]:
    """All rows of a table, oldest first; none where there is no table. An unfinished last line is left out.

    Raises:
        StorageError: it cannot be read, or is no such table.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [_row(json.loads(line) | {"iteration": at}) for at, line in enumerate(lines, 1)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _trouble(path, error) from error


def _row(raw: dict[str, Any]) -> GroupStepRow:
    return GroupStepRow(**raw | {"jobs": tuple(raw["jobs"]), "job_tokens": tuple(raw["job_tokens"])})


def _trouble(path: Path, error: Exception) -> StorageError:
    return StorageError(
        f"{path}: {error}",
        "The search's folder keeps a table of its group steps.",
        "Make room, or move the file away: a new table is begun.",
    )
