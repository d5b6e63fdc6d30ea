"""Operations as lines of text: what a spool file is made of.

A line is a JSON list whose first word is its kind. Beside the operations there are lines that are not sent:
the file's head, points that are held back (:class:`Held`), and what was written to another file before
(:class:`Taken`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from plait.tracking.operations import (
    EndRun,
    LogFile,
    LogFolder,
    LogPoints,
    LogText,
    OpenRun,
    Operation,
    Reopen,
    SetTags,
)

VERSION = 1
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Head:
    """The first line of a spool file.

    Attributes:
        parent_id: MLflow's id of the search's run, to which all runs of the file belong.
        parent: key of that run.
        store: address, without a password, of the store that the file is for.
    """

    parent_id: str
    parent: str
    store: str


@dataclass(frozen=True, slots=True)
class Held:
    """Points of a run's curve that were left out so far and may yet be wanted: its best and its newest."""

    run: str
    best: LogPoints | None
    last: LogPoints | None


@dataclass(frozen=True, slots=True)
class Taken:
    """Steps of a run that another file has: the last one of each metric, and those that came late."""

    run: str
    last: dict[str, int]
    late: tuple[int, ...]


Line = Head | Held | Taken | Operation


def encode(line: Line) -> bytes:
    """A line with its end."""
    return json.dumps(_plain(line), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _plain(line: Line) -> list[Any]:
    match line:
        case LogPoints():
            return _points(line)
        case SetTags():
            return ["tags", line.run, line.tags]
        case OpenRun():
            shown = (line.trial, line.parent_id, line.parameters, line.tags, line.time_ms, line.known)
            return ["open", line.run, *shown]
        case LogText():
            return ["text", line.run, line.path, line.text]
        case LogFile():
            return ["file", line.run, str(line.file), line.path]
        case LogFolder():
            return ["folder", line.run, str(line.folder), line.path]
        case EndRun():
            return ["end", line.run, line.status, line.time_ms]
        case Reopen():
            return ["reopen", line.run]
        case Held():
            held = (point and _points(point) for point in (line.best, line.last))
            return ["held", line.run, *held]
        case Taken():
            return ["taken", line.run, line.last, line.late]
        case Head():
            return ["spool", VERSION, line.parent_id, line.parent, line.store]
        case _:
            assert_never(line)


def _points(point: LogPoints) -> list[Any]:
    kind = "late" if point.late else "points"
    return [kind, point.run, point.step, point.time_ms, dict(point.values)]


def decode(text: bytes) -> Line:
    """What :func:`encode` made a line of.

    Raises:
        ValueError: it is none of its lines.
    """
    try:
        kind, *rest = json.loads(text)
        return _line(kind, rest)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"not a line of a spool: {text[:80]!r} ({error})") from error


def _line(kind: object, rest: list[Any]) -> Line:
    match kind:
        case "points" | "late":
            run, step, time_ms, values = rest
            return LogPoints(run, step, time_ms, tuple(values.items()), late=kind == "late")
        case "tags":
            run, tags = rest
            return SetTags(run, _pairs(tags))
        case "open":
            run, trial, parent_id, parameters, tags, time_ms, known = rest
            return OpenRun(run, trial, parent_id, _pairs(parameters), _pairs(tags), time_ms, known)
        case "text":
            run, path, content = rest
            return LogText(run, path, content)
        case "file" | "folder":
            run, place, path = rest
            return (LogFile if kind == "file" else LogFolder)(run, Path(place), path)
        case "end":
            run, status, time_ms = rest
            return EndRun(run, status, time_ms)
        case "reopen":
            (run,) = rest
            return Reopen(run)
        case "held":
            run, best, last = rest
            return Held(run, _held(best), _held(last))
        case "taken":
            run, steps, late = rest
            return Taken(run, dict(steps), tuple(late))
        case "spool":
            version, parent_id, parent, store = rest
            if version != VERSION:
                raise ValueError(f"a spool of version {version}; this program reads {VERSION}")
            return Head(parent_id, parent, store)
        case _:
            raise ValueError(f"no line of a spool is of the kind {kind!r}")


def _held(plain: list[Any] | None) -> LogPoints | None:
    if plain is None:
        return None
    point = _line(plain[0], plain[1:])
    if not isinstance(point, LogPoints):
        raise ValueError(f"a point is held, not {plain[0]!r}")
    return point


def _pairs(plain: list[list[str]]) -> Pairs:
    return tuple((key, value) for key, value in plain)
