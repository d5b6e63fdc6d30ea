"""What the replicas of a search did, and when: kept in its folder, and written as a trace.

``spans.jsonl`` has a line for each event :class:`~plait.core.messages.SpansTaken`, of all processes that
share the folder. Where it has grown to ``MOST_BYTES`` it becomes ``spans-before.jsonl``, in place of an
earlier one: the newest spans are kept. No search depends on them: what a full disk does not take is left out.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Semaphore
from typing import Any

from plait.core.errors import StorageError
from plait.core.messages import SpansTaken
from plait.core.spans import Span
from plait.utils.counts import listed
from plait.utils.files import append_line
from plait.utils.trace_events import TraceEvents

SPANS_FILE = "spans.jsonl"  # below the search's folder
BEFORE_FILE = "spans-before.jsonl"
SPAN_FILES = (BEFORE_FILE, SPANS_FILE)
MOST_BYTES = 32 * 2**20  # of each file
MOST_SPANS = 200_000  # newest ones in a trace: viewers take as many well
MOST_WAITING = 64  # events that the disk has not taken yet
MOST_NAMED = 3  # jobs in the name of a span; its arguments have all
DIGITS = 6  # of seconds


class SpanLog:
    """Keeps spans as they come, in a thread: of many replicas that takes milliseconds.

    Args:
        folder: of the search, which exists.
        worker: which of the search's processes writes; unique in the folder.
    """

    def __init__(self, folder: Path, worker: str) -> None:
        self._path, self._before = folder / SPANS_FILE, folder / BEFORE_FILE
        self._worker = worker
        self._zero = time.time() - time.monotonic()  # of the coordinator's clock, since 1970
        self._thread = ThreadPoolExecutor(1, "spans")  # starts none before it is used
        self._room = Semaphore(MOST_WAITING)

    def add(self, event: SpansTaken) -> None:
        """Append an event; where the disk does not keep up, some are left out."""
        if self._room.acquire(blocking=False):
            self._thread.submit(self._write, event)

    def close(self) -> None:
        """Return when everything is written."""
        self._thread.shutdown()

    def _write(self, event: SpansTaken) -> None:
        self._room.release()
        jobs: dict[str, int] = {}
        rows = [
            [*(getattr(each, name) for name in _HEAD), [_row(span, jobs) for span in each.spans]]
            for each in event.replicas
        ]
        line = {"spans": rows, "jobs": list(jobs), "worker": self._worker, "zero": self._zero}
        self._rotate()
        with suppress(OSError):
            append_line(self._path, json.dumps(line).encode() + b"\n")

    def _rotate(self) -> None:
        """Move the file aside if it is full, unless another process has just done so."""
        with suppress(OSError), self._path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            still = os.path.samestat(os.fstat(file.fileno()), self._path.stat())
            if still and file.tell() > MOST_BYTES:
                self._path.replace(self._before)


_HEAD = ("replica", "host", "pid", "device", "offset", "error")


def _row(span: Span, jobs: dict[str, int]) -> list[Any]:
    """A span as it is kept; ``jobs`` numbers the names of its line's jobs."""
    work = [[jobs.setdefault(job, len(jobs)), step] for job, step in span.work]
    times = round(span.start, DIGITS), round(span.end, DIGITS)
    return [span.kind, *times, work, span.tokens, span.bytes, span.overlapping]


@dataclass(slots=True)
class _Track:
    """The spans of one replica of one worker, in order.

    Attributes:
        offset, error: of its clock, as last measured.
        ends: of the last span in the process's own thread, and in others.
    """

    name: str
    offset: float = 0.0
    error: float = 0.0
    spans: list[Span] = field(default_factory=list)
    ends: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def take(self, rows: list[Any], jobs: Sequence[str], zero: float) -> None:
        """Add spans as a line has them, with the names of its jobs and the beginning of its clock."""
        for kind, start, end, numbered, tokens, received, overlapping in rows:
            # An offset that is measured again differs by microseconds: spans do not overlap by these.
            begun = max(start + zero, self.ends[overlapping])
            self.ends[overlapping] = max(end + zero, begun)
            work = tuple((jobs[number], step) for number, step in numbered)
            self.spans.append(Span(kind, begun, self.ends[overlapping], work, tokens, received, overlapping))


def write_trace(folder: Path) -> str | None:
    """What the replicas of the search in ``folder`` did, as trace-event JSON: a process for each replica of
    each worker; None where nothing is kept.

    The newest ``MOST_SPANS`` spans are shown. ``clocks`` says how far each process's clock is from its
    coordinator's, and how well that is known.

    Raises:
        StorageError: what is kept cannot be read.
    """
    tracks: dict[tuple[Any, ...], _Track] = {}
    for name in SPAN_FILES:
        _read(folder / name, tracks)
    newest = sorted((span.start for track in tracks.values() for span in track.spans), reverse=True)
    if not newest:
        return None
    since = newest[:MOST_SPANS][-1]
    events = TraceEvents()
    for number, key in enumerate(sorted(tracks), 1):
        _draw(events, number, tracks[key], since)
    clocks = {
        track.name: {"offset_seconds": track.offset, "error_seconds": track.error}
        for track in tracks.values()
    }
    left_out = max(0, len(newest) - MOST_SPANS)
    return events.text(otherData={"clocks": clocks, "seconds_since_1970": since, "left_out": left_out})


def _read(path: Path, tracks: dict[tuple[Any, ...], _Track]) -> None:
    try:
        for line in _lines(path):
            for *head, rows in line["spans"]:
                track = _track(tracks, line["worker"], dict(zip(_HEAD, head, strict=True)))
                track.take(rows, line["jobs"], line["zero"])
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise StorageError(
            f"{path}: {error}", "Plait keeps the timeline of a search in this file.", "Remove the file."
        ) from error


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, without those that a crash left partial; none where there is no file."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                with suppress(ValueError):
                    yield json.loads(line)


def _track(tracks: dict[tuple[Any, ...], _Track], worker: str, head: Mapping[str, Any]) -> _Track:
    named = f"replica {head['replica']} on {head['device']} ({head['host']}, pid {head['pid']})"
    track = tracks.setdefault((worker, head["replica"], head["host"], head["pid"]), _Track(named))
    track.offset, track.error = head["offset"], head["error"]
    return track


def _draw(events: TraceEvents, number: int, track: _Track, since: float) -> None:
    events.name_process(number, track.name)
    events.name_thread(number, 1, "work")
    if any(span.overlapping for span in track.spans):
        events.name_thread(number, 2, "exchange in its thread")
    for span in track.spans:
        if span.start < since:
            continue
        jobs = [f"{job}#{step}" for job, step in span.work]
        name = f"{span.kind} {listed(jobs, MOST_NAMED)}".rstrip()
        said = {"jobs": jobs, "tokens": span.tokens, "received_bytes": span.bytes}
        arguments = {key: value for key, value in said.items() if value}
        events.span(
            name,
            span.kind,
            (number, 2 if span.overlapping else 1),
            span.start - since,
            span.end - since,
            arguments,
        )
