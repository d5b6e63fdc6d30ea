"""Writes trace-event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Processes and threads are numbered from 1: viewers take 0 for the idle one. Times are given in seconds and
written in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MICROSECONDS = 1_000_000


class TraceEvents:
    """The events of one trace."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []

    def name_process(self, process: int, name: str) -> None:
        """What a process is called."""
        self._name("process_name", process, 1, name)

    def name_thread(self, process: int, thread: int, name: str) -> None:
        """What a track of a process is called."""
        self._name("thread_name", process, thread, name)

    def _name(self, kind: str, process: int, thread: int, name: str) -> None:
        event = {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
        self._events.append(event)

    def span(
        self,
        name: str,
        kind: str,
        place: tuple[int, int],
        start: float,
        end: float,
        arguments: Mapping[str, Any],
    ) -> None:
        """Something from ``start`` to ``end`` at ``place``, a process and its thread."""
        process, thread = place
        times = {"ts": start * MICROSECONDS, "dur": (end - start) * MICROSECONDS}
        event = {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": thread, **times}
        self._events.append(event | {"args": dict(arguments)})

    def instant(self, name: str, kind: str, place: tuple[int, int], seconds: float) -> None:
        """Something at one time."""
        process, thread = place
        event = {"name": name, "cat": kind, "ph": "i", "s": "t", "pid": process, "tid": thread}
        self._events.append(event | {"ts": seconds * MICROSECONDS})

    def text(self, **more: Any) -> str:
        """The trace as JSON; ``more`` is kept in it beside the events."""
        return json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms", **more})
