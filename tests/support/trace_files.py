"""What a file must be like for Perfetto and chrome://tracing to open it (the Trace Event Format)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from numbers import Real
from typing import Any

FIELDS: dict[str, dict[str, type]] = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": Real, "dur": Real, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "i": {"name": str, "cat": str, "pid": int, "tid": int, "ts": Real, "s": str},
}
Tracks = dict[tuple[int, int], list[dict[str, Any]]]


def tracks_of(text: str) -> Tracks:
    """The spans of each track in order of time, of a trace that keeps to the format."""
    trace = json.loads(text)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    tracks: Tracks = defaultdict(list)
    named = set()
    for event in trace["traceEvents"]:
        fields = FIELDS[event["ph"]]
        assert event.keys() == fields.keys() | {"ph"}, event
        assert all(isinstance(event[name], kind) for name, kind in fields.items()), event
        assert event["pid"] > 0 < event["tid"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            named.add((event["pid"], event["tid"]))
        elif event["ph"] == "X":
            assert event["ts"] >= 0 <= event["dur"]
            tracks[event["pid"], event["tid"]].append(event)
    assert tracks.keys() <= named
    return {place: sorted(tracks[place], key=lambda event: event["ts"]) for place in sorted(tracks)}


def overlaps(spans: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """Neighbours of a track of which one begins more than a nanosecond before the other has ended."""
    return [
        (one["name"], other["name"])
        for one, other in pairwise(spans)
        if other["ts"] < one["ts"] + one["dur"] - 1e-3
    ]
