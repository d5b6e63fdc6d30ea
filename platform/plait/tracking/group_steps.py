"""The table of group steps: what every iteration of a group took, beside what was expected of it.

A search that is gone on with adds to its table, so a step that is trained again after a crash stands there
twice: both took their seconds. Iterations are numbered as they stand there, whichever process they are of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from plait.core.messages import GroupStep
from plait.tracking.line_table import LineTable, numbered_rows, table_errors

GROUP_STEPS_FILE = "group_steps.jsonl"  # below the search's folder
GROUP_STEPS_ARTIFACT = "group_steps.json"  # of the search's run
MOST_ROWS = 2000  # of the artifact


@dataclass(frozen=True, slots=True)
class GroupStepRow:
    """One iteration of a group.

    Attributes:
        iteration: of the search, from 1, by whichever process, counted on over restarts.
        job_tokens: real tokens by job, in the order of ``jobs``.
        seconds: from the first microbatch to the last job's optimiser step.
        predicted_seconds, predicted_bytes: known before it ran; None where nothing was.
        peak_bytes: None where the device cannot tell.
        bytes_by_rule: ``predicted_bytes`` is an upper bound, of before anything was observed.
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


COLUMNS = tuple(field.name for field in fields(GroupStepRow))


class GroupSteps(LineTable):
    """The table of one search.

    Args:
        folder: of the search; made where it is not there.

    Raises:
        StorageError: the folder cannot be made or the table cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / GROUP_STEPS_FILE, COLUMNS, MOST_ROWS, _cells)

    def add(self, step: GroupStep) -> None:
        """Append one iteration.

        Raises:
            StorageError: it cannot be written.
        """
        self.append({"iteration": self.count + 1} | {name: getattr(step, name) for name in COLUMNS[1:]})


def read_group_steps(path: Path, most: int | None = None) -> list[GroupStepRow]:
    """Rows of a table, oldest first; none where there is no table.

    Args:
        path: of the table.
        most: rows to read; of more, every k-th up to the newest. None reads all.

    Raises:
        StorageError: it cannot be read, or is no such table.
    """
    with table_errors(path):
        return [_row(number, raw) for number, raw in numbered_rows(path, most)]


def _row(number: int, raw: Mapping[str, Any]) -> GroupStepRow:
    lists = {name: tuple(raw[name]) for name in ("jobs", "job_tokens")}
    return GroupStepRow(**{**raw, **lists, "iteration": number})


def _cells(number: int, raw: Mapping[str, Any]) -> list[Any]:
    row = _row(number, raw)
    return [getattr(row, name) for name in COLUMNS]
