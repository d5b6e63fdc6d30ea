"""Tables that grow with a search: one row for each group step and one for each fit of a model.

They are JSON lines in the search's folder, to which restarts and several processes at once append. The
search's run in MLflow has the same table, thinned evenly if it is long. A step that is trained again after a
crash has a second row, because both took time. No search depends on them: what a full disk does not take is
left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from plait.core.messages import GroupStep, ModelFitted
from plait.utils.files import append_line

GROUP_STEPS_FILE = "group_steps.jsonl"  # below the search's folder
GROUP_STEPS_ARTIFACT = "group_steps.json"  # of the search's run
FITS_FILE = "fits.jsonl"
FITS_ARTIFACT = "fits.json"
TABLES = (GROUP_STEPS_FILE, FITS_FILE)
MOST_GROUP_STEPS = 2000  # rows of the artifact
MOST_FITS = 400
GROWTH = 1.25  # the artifact is rewritten when the table has grown by this factor: its cost stays linear
BLOCK = 2**20  # bytes that are looked at together


# The iteration is counted in the whole search here, over all processes and restarts.
GROUP_STEP_COLUMNS = (
    "iteration",
    "group",
    "jobs",
    "job_tokens",
    "capacity",
    "microbatches",
    "seconds",
    "predicted_seconds",
    "peak_bytes",
    "predicted_bytes",
    "bytes_by_rule",
)
FIT_COLUMNS = tuple(field.name for field in fields(ModelFitted))


class LineTable:
    """One table.

    Args:
        path: its folder is made if it is missing.
        columns: on disk, and as MLflow shows them. If the first column is "iteration", it is the row's
            number.
        most: most rows that MLflow shows.
    """

    def __init__(self, path: Path, columns: Sequence[str], most: int) -> None:
        self.path = path
        self._columns, self._most = columns, most
        path.parent.mkdir(parents=True, exist_ok=True)
        self._count = _count_lines(path)
        self._shown = 0

    def add(self, event: GroupStep | ModelFitted) -> None:
        """Append the row of an event."""
        row = {name: getattr(event, name) for name in self._columns}
        if isinstance(event, GroupStep):
            row["iteration"] = self._count + 1
        else:
            row["coefficients"] = json.dumps(dict(event.coefficients))
        with suppress(OSError):
            append_line(self.path, json.dumps(row).encode() + b"\n")
        self._count += 1

    @property
    def grown(self) -> bool:
        """Whether enough was added since :meth:`artifact` was called to write it again."""
        return self._count >= max(1, GROWTH * self._shown)

    @property
    def behind(self) -> bool:
        """Whether anything was added since :meth:`artifact` was called."""
        return self._count > self._shown

    def artifact(self) -> str:
        """The table in the form that MLflow shows, including the newest row. If there are more than ``most``
        rows, every k-th is parsed. A line that a crash left partial is ignored."""
        self._shown = self._count
        data, count = [], _count_lines(self.path)
        every = -(-count // self._most)
        with suppress(OSError), self.path.open("rb") as file:
            for number, line in enumerate(islice(file, count), 1):
                if (count - number) % every == 0:
                    with suppress(ValueError, KeyError):
                        data.append(self._cells(number, json.loads(line)))
        return json.dumps({"columns": self._columns, "data": data})

    def _cells(self, number: int, row: Mapping[str, Any]) -> list[Any]:
        first, *others = self._columns
        return [number if first == "iteration" else row[first], *(row[name] for name in others)]


class SearchTables:
    """Both tables of the search in ``folder``; ``show`` writes one to the search's run, by its path there."""

    def __init__(self, folder: Path, show: Callable[[str, str], None]) -> None:
        self._steps = LineTable(folder / GROUP_STEPS_FILE, GROUP_STEP_COLUMNS, MOST_GROUP_STEPS)
        self._fits = LineTable(folder / FITS_FILE, FIT_COLUMNS, MOST_FITS)
        self._paths = {GROUP_STEPS_ARTIFACT: self._steps, FITS_ARTIFACT: self._fits}
        self._show = show

    def handle(self, event: GroupStep | ModelFitted) -> None:
        """Add a row, and show the table if it has grown enough."""
        (self._steps if isinstance(event, GroupStep) else self._fits).add(event)
        for path, table in self._paths.items():
            if table.grown:
                self._show(path, table.artifact())

    def finish(self) -> None:
        """Show the final tables."""
        for path, table in self._paths.items():
            if table.behind:
                self._show(path, table.artifact())


def group_step(cells: Mapping[str, Any]) -> GroupStep:
    """A row as the event that it was, from its cells by column, which have lists for tuples."""
    tokens = tuple(cells["job_tokens"])
    return GroupStep(**{**cells, "jobs": tuple(cells["jobs"]), "job_tokens": tokens, "tokens": sum(tokens)})


def _count_lines(path: Path) -> int:
    """Number of complete lines of a file; 0 if there is no file."""
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK), b""))
    except OSError:
        return 0
