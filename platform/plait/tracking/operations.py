"""What the writer does, as plain data: each operation may be repeated without changing the result.

Runs are named by a key (a job's name, or the search's), since a run's MLflow id is known only when the
writer has made it. Times are taken when the operation is made, not when it is sent: MLflow keeps a point
once however often the same one arrives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Make a job's run, or go on with the one that its search and trial already have."""

    run: str
    trial: int
    parent_id: str
    parameters: tuple[tuple[str, str], ...]
    tags: tuple[tuple[str, str], ...]
    time_ms: int


@dataclass(frozen=True, slots=True)
class LogPoints:
    """Metric values of one run at one step; all finite."""

    run: str
    step: int
    time_ms: int
    values: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class SetTags:
    """Set tags of a run; a later value replaces an earlier one."""

    run: str
    tags: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class LogText:
    """Write a text artifact; a later text of the same path replaces an earlier one.

    Where :func:`run_reference` stands in the text, the sender writes the run's MLflow id, which may not be
    known yet when the text is made.
    """

    run: str
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class LogFolder:
    """Copy a folder's files to a run's artifacts under ``path``."""

    run: str
    folder: Path
    path: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """Set a run's final status in MLflow's words."""

    run: str
    status: str
    time_ms: int


_REFERENCE = re.compile(r"@run\(([^()\s]*)\)")


def run_reference(run: str) -> str:
    """What stands for the MLflow id of a run in a text."""
    return f"@run({run})"


def resolve_references(text: str, ids: Mapping[str, str]) -> str:
    """The text with the ids of the runs it refers to; of a run that is not there, nothing."""
    return _REFERENCE.sub(lambda match: ids.get(match[1], ""), text)


Operation = OpenRun | LogPoints | SetTags | LogText | LogFolder | EndRun


@dataclass(frozen=True, slots=True)
class PointsOfRun:
    """Points of one run that go out together, in order."""

    run: str
    points: tuple[LogPoints, ...]


Request = OpenRun | PointsOfRun | SetTags | LogText | LogFolder | EndRun


def gather(operations: Iterable[Operation]) -> list[Request]:
    """Requests that do what the operations do, in few calls.

    Points of one run are joined, however the runs' points lie between each other; the order within a run
    stays. Of several texts for one path only the last is written.
    """
    listed = list(operations)
    last_text = {(item.run, item.path): at for at, item in enumerate(listed) if isinstance(item, LogText)}
    requests: list[Request] = []
    waiting: dict[str, list[LogPoints]] = {}

    def release(run: str) -> None:
        if points := waiting.pop(run, None):
            requests.append(PointsOfRun(run, tuple(points)))

    for at, item in enumerate(listed):
        if isinstance(item, LogPoints):
            waiting.setdefault(item.run, []).append(item)
        elif not isinstance(item, LogText) or last_text[item.run, item.path] == at:
            release(item.run)
            requests.append(item)
    for run in list(waiting):
        release(run)
    return requests


def count_points(operations: Sequence[Operation]) -> int:
    """Metric values among the operations."""
    return sum(len(item.values) for item in operations if isinstance(item, LogPoints))
