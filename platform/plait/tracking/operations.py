"""What the writer does, as plain data: each operation may be repeated without changing the result.

Runs are named by a key (a job's name, or the search's), since a run's MLflow id is known only when the
writer has made it. Times are taken when the operation is made, not when it is sent: MLflow keeps a point
once however often the same one arrives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Make a job's run, or go on with the one that its search and trial already have.

    ``known`` says that it is known which of its points are written; else the store is asked.
    """

    run: str
    trial: int
    parent_id: str
    parameters: tuple[tuple[str, str], ...]
    tags: tuple[tuple[str, str], ...]
    time_ms: int
    known: bool = False


@dataclass(frozen=True, slots=True)
class LogPoints:
    """Metric values of one run at one step; all finite.

    ``late`` says that points of later steps went before, or others of this one.
    """

    run: str
    step: int
    time_ms: int
    values: tuple[tuple[str, float], ...]
    late: bool = False


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
class LogFile:
    """Write a text artifact with what the file has when it is sent; else as :class:`LogText`."""

    run: str
    file: Path
    path: str


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


@dataclass(frozen=True, slots=True)
class Reopen:
    """Set a run that is there, and may have ended, to running."""

    run: str


_REFERENCE = re.compile(r"@run\(([^()\s]*)\)")


def run_reference(run: str) -> str:
    """What stands for the MLflow id of a run in a text."""
    return f"@run({run})"


def resolve_references(text: str, ids: Mapping[str, str]) -> str:
    """The text with the ids of the runs it refers to; of a run that is not there, nothing."""
    return _REFERENCE.sub(lambda match: ids.get(match[1], ""), text)


Operation = OpenRun | LogPoints | SetTags | LogText | LogFile | LogFolder | EndRun | Reopen


@dataclass(frozen=True, slots=True)
class UpdateRun:
    """Points and tags of one run that go out together; the points in order, each tag once."""

    run: str
    points: tuple[LogPoints, ...]
    tags: tuple[tuple[str, str], ...]


Request = OpenRun | UpdateRun | LogText | LogFile | LogFolder | EndRun | Reopen


@dataclass(slots=True)
class _Gathered:
    """What is to be done with one run, from one OpenRun to the next."""

    run: str
    opened: OpenRun | None = None
    points: list[LogPoints] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    folders: dict[str, LogFolder] = field(default_factory=dict)
    status: EndRun | Reopen | None = None

    def requests(self) -> Iterator[Request]:
        if self.opened is not None:
            yield self.opened
        if self.points or self.tags:
            yield UpdateRun(self.run, tuple(self.points), tuple(self.tags.items()))
        yield from self.folders.values()
        if self.status is not None:
            yield self.status


def gather(operations: Iterable[Operation]) -> list[Request]:
    """Requests that leave every run as the operations would, in few calls.

    Points and tags of one run are joined, however the runs' operations lie between each other; of several
    values of a tag, texts of a path or final states the last one goes out. Texts come last, so that the runs
    they refer to are there.
    """
    gathered: list[_Gathered] = []
    newest: dict[str, _Gathered] = {}
    texts: dict[tuple[str, str], LogText | LogFile] = {}
    for item in operations:
        if isinstance(item, LogText | LogFile):
            texts.pop((item.run, item.path), None)
            texts[item.run, item.path] = item
            continue
        if item.run not in newest or isinstance(item, OpenRun):
            newest[item.run] = _Gathered(item.run)
            gathered.append(newest[item.run])
        _take(newest[item.run], item)
    return [request for one in gathered for request in one.requests()] + list(texts.values())


def _take(gathered: _Gathered, item: OpenRun | LogPoints | SetTags | LogFolder | EndRun | Reopen) -> None:
    match item:
        case OpenRun():
            gathered.opened = item
        case LogPoints():
            gathered.points.append(item)
        case SetTags():
            gathered.tags.update(item.tags)
        case LogFolder():
            gathered.folders[item.path] = item
        case EndRun() | Reopen():
            gathered.status = item


def count_points(operations: Sequence[Operation]) -> int:
    """Metric values among the operations."""
    return sum(len(item.values) for item in operations if isinstance(item, LogPoints))
