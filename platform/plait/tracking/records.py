"""Records for the tracking store, as plain data; carrying out a record again does not change the result.

Runs are named by a key (a job's or the search's name), because a run's MLflow id is known only after the
writer has made it. Times are taken when a record is made, not when it is sent, because MLflow then stores a
point once however often it arrives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

VERSION = 5  # of the lines


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Make a job's run, or resume the one that its search and trial already have; MLflow shows ``name``."""

    run: str
    trial: int
    parent_id: str
    parameters: Mapping[str, str]
    tags: Mapping[str, str]
    time_ms: int
    name: str


@dataclass(frozen=True, slots=True)
class UseData:
    """Log the data set that a run trains on, as MLflow's dataset input; ``source`` and ``profile`` are
    JSON."""

    run: str
    name: str
    digest: str
    source: str
    profile: str


@dataclass(frozen=True, slots=True)
class LogPoints:
    """Metric values of one run at one step; all finite.

    ``late`` values are added to those that the step already has.
    """

    run: str
    step: int
    time_ms: int
    values: Mapping[str, float]
    late: bool = False


@dataclass(frozen=True, slots=True)
class SetTags:
    """Set tags of a run; a later value replaces an earlier one."""

    run: str
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LogText:
    """Write a text artifact with the content that ``file`` has when it is sent; a later one for the same path
    replaces it."""

    run: str
    file: str
    path: str


@dataclass(frozen=True, slots=True)
class LogFolder:
    """Copy a folder's files to a run's artifacts under ``path``."""

    run: str
    folder: str
    path: str


@dataclass(frozen=True, slots=True)
class SetStatus:
    """Set a run's status, in MLflow's terms."""

    run: str
    status: str
    time_ms: int


@dataclass(frozen=True, slots=True)
class Head:
    """The first line of a log.

    Attributes:
        parent_id: MLflow's id of the search's run, to which all runs of the log belong.
        parent: key of that run.
        store: address, without a password, of the log's store.
    """

    parent_id: str
    parent: str
    store: str
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Written:
    """The last step of each metric of a run that another log has, and the run's device time; not sent."""

    run: str
    steps: Mapping[str, int]
    device_seconds: float


Record = OpenRun | UseData | LogPoints | SetTags | LogText | LogFolder | SetStatus
Line = Head | Written | Record
KINDS: Mapping[str, type[Line]] = {
    "log": Head,
    "written": Written,
    "open": OpenRun,
    "data": UseData,
    "points": LogPoints,
    "tags": SetTags,
    "text": LogText,
    "folder": LogFolder,
    "status": SetStatus,
}
BEGINS = b'["'  # the beginning of every line
_FIELDS = {made: (kind, tuple(field.name for field in fields(made))) for kind, made in KINDS.items()}
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def encode(line: Line) -> bytes:
    """A line with its end: a JSON list of its kind and its values."""
    kind, names = _FIELDS[type(line)]
    return _ENCODER.encode([kind, *(getattr(line, name) for name in names)]).encode() + b"\n"


def decode(text: bytes) -> Line:
    """The line that :func:`encode` wrote.

    Raises:
        ValueError: it is not such a line, or has another version.
    """
    try:
        kind, *values = json.loads(text)
        line = KINDS[kind](*values)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"not a line of an event log: {text[:80]!r} ({error})") from error
    if isinstance(line, Head) and line.version != VERSION:
        raise ValueError(f"an event log of version {line.version}; this program reads {VERSION}")
    return line
