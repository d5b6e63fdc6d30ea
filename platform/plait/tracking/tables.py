"""Tables that grow with a search: one row for each group step and one for each fit of a model.

They are JSON-lines logs in the search's folder, appended over restarts and by several processes at once; the
search's run in MLflow has the same as a table, thinned evenly where it is long. A step that is trained again
after a crash has a second row: both took their seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from plait.core.errors import StorageError
from plait.core.messages import GroupStep, ModelFitted
from plait.utils.line_log import LineLog

GROUP_STEPS_FILE = "group_steps.jsonl"  # below the search's folder
GROUP_STEPS_ARTIFACT = "group_steps.json"  # of the search's run
FITS_FILE = "fits.jsonl"
FITS_ARTIFACT = "fits.json"
TABLES = (GROUP_STEPS_FILE, FITS_FILE)
MOST_GROUP_STEPS = 2000  # rows of the artifact
MOST_FITS = 400
GROWTH = 1.25  # the artifact is rewritten when the table has grown by this factor: its cost stays linear
BLOCK = 2**20  # bytes that are looked at together
Cells = Callable[[int, Mapping[str, Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class GroupStepRow:
    """One iteration of a group.

    Attributes:
        iteration: number in the search, from 1, over all processes and restarts.
        job_tokens: real tokens by job, in the order of ``jobs``.
        seconds: from the first microbatch to the last job's optimiser step.
        predicted_seconds, predicted_bytes: known before it ran; None where nothing was.
        peak_bytes: None where the device cannot tell.
        bytes_by_rule: ``predicted_bytes`` is an upper bound, made before anything was observed.
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
    bytes_by_rule: bool = False


GROUP_STEP_COLUMNS = tuple(field.name for field in fields(GroupStepRow))
FIT_COLUMNS = tuple(field.name for field in fields(ModelFitted))


class LineTable:
    """One table.

    Args:
        path: its folder is made where it is missing.
        columns: as MLflow shows them; the first is the first key of every row.
        most: rows that MLflow is to have.
        cells: a row's values in the columns, given its number from 1 and its line.

    Raises:
        StorageError: from every method, where the file cannot be read or written or is another table.
    """

    def __init__(self, path: Path, columns: Sequence[str], most: int, cells: Cells) -> None:
        self.path = path
        self._columns, self._most, self._cells = columns, most, cells
        with _table_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._count = _count_lines(path)
            for number, row in islice(_numbered_rows(path), 1):
                cells(number, row)
        self._shown = 0

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        begins = f'{{"{self._columns[0]}":'.encode()
        with _table_errors(self.path):
            while not _append(self.path, begins, json.dumps(row).encode() + b"\n"):
                pass  # the file was removed between its opening and its lock
        self._count += 1

    @property
    def count(self) -> int:
        """Rows that were there at the start, and those added here since."""
        return self._count

    @property
    def grown(self) -> bool:
        """Whether enough was added since :meth:`artifact` to write it again."""
        return self._count >= max(1, GROWTH * self._shown)

    @property
    def behind(self) -> bool:
        """Whether anything was added since :meth:`artifact`."""
        return self._count > self._shown

    def artifact(self) -> str:
        """The table in the form that MLflow shows, the newest row in it."""
        self._shown = self._count
        with _table_errors(self.path):
            data = [list(self._cells(*each)) for each in _numbered_rows(self.path, self._most)]
        return json.dumps({"columns": self._columns, "data": data})


class GroupSteps(LineTable):
    """The group steps of the search in ``folder``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / GROUP_STEPS_FILE, GROUP_STEP_COLUMNS, MOST_GROUP_STEPS, _group_step_cells)

    def add(self, step: GroupStep) -> None:
        """Append one iteration."""
        measured = {name: getattr(step, name) for name in GROUP_STEP_COLUMNS[1:]}
        self.append({"iteration": self.count + 1} | measured)


class Fits(LineTable):
    """The fits of the models of seconds and of bytes of the search in ``folder``, with their errors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FITS_FILE, FIT_COLUMNS, MOST_FITS, _fit_cells)

    def add(self, fitted: ModelFitted) -> None:
        """Append one fit."""
        self.append(asdict(fitted) | {"coefficients": dict(fitted.coefficients)})


class SearchTables:
    """Both tables of the search in ``folder``; ``show`` writes one to the search's run, by its path there."""

    def __init__(self, folder: Path, show: Callable[[str, str], None]) -> None:
        self._steps, self._fits = GroupSteps(folder), Fits(folder)
        self._show = show

    def handle(self, event: GroupStep | ModelFitted) -> None:
        """Add a row, and show the table where it has grown."""
        if isinstance(event, GroupStep):
            self._steps.add(event)
        else:
            self._fits.add(event)
        for table, path in ((self._steps, GROUP_STEPS_ARTIFACT), (self._fits, FITS_ARTIFACT)):
            if table.grown:
                self._show(path, table.artifact())

    def finish(self) -> None:
        """Show the tables as they are at the end."""
        for table, path in ((self._steps, GROUP_STEPS_ARTIFACT), (self._fits, FITS_ARTIFACT)):
            if table.behind:
                self._show(path, table.artifact())


def read_group_steps(path: Path, most: int | None = None) -> list[GroupStepRow]:
    """Rows of a table, oldest first; none where there is no table.

    Args:
        path: of the table.
        most: rows to read; of more, every k-th up to the newest. None reads all.

    Raises:
        StorageError: it cannot be read, or is no such table.
    """
    with _table_errors(path):
        return [_group_step(number, raw) for number, raw in _numbered_rows(path, most)]


def _group_step(number: int, raw: Mapping[str, Any]) -> GroupStepRow:
    lists = {name: tuple(raw[name]) for name in ("jobs", "job_tokens")}
    return GroupStepRow(**{**raw, **lists, "iteration": number})


def _group_step_cells(number: int, raw: Mapping[str, Any]) -> list[Any]:
    row = _group_step(number, raw)
    return [getattr(row, name) for name in GROUP_STEP_COLUMNS]


def _fit_cells(_number: int, raw: Mapping[str, Any]) -> list[Any]:
    """MLflow shows coefficients as JSON text."""
    return [json.dumps(raw[name]) if name == "coefficients" else raw[name] for name in FIT_COLUMNS]


def _numbered_rows(path: Path, most: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a table with their numbers from 1, oldest first; of more than ``most`` every k-th is
    parsed, up to the newest. What a crash left of a line is no row."""
    if (count := _count_lines(path)) == 0:
        return
    every = 1 if most is None else -(-count // most)
    with path.open("rb") as file:
        for number, line in enumerate(islice(file, count), 1):
            if (count - number) % every == 0:
                yield number, json.loads(line)


def _append(path: Path, begins: bytes, line: bytes) -> bool:
    with LineLog(path, begins) as log:
        if locked := log.lock():
            log.append(line)
        return locked


def _count_lines(path: Path) -> int:
    """Whole lines of a file; 0 where there is none."""
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK), b""))
    except FileNotFoundError:
        return 0


@contextmanager
def _table_errors(path: Path) -> Iterator[None]:
    """What goes wrong with a table inside, as a StorageError that names its file."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        said = (
            error.strerror if isinstance(error, OSError) else f"a row has missing or unknown fields: {error}"
        )
        raise StorageError(
            f"{path}: {said or error}",
            "Plait keeps tables of the search's iterations and fits there.",
            "Make room or the folder writable, or move the file away (a new table is begun), and start the "
            "same command again: it resumes.",
        ) from error
