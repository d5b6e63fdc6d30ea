"""A tracker whose process is gone, within the process of a test."""

from __future__ import annotations

import threading
import time

from plait.tracking.tracker import Tracker

TRACKERS = ("plait-tracking",)  # names of the threads of trackers


def die(tracker: Tracker) -> None:
    """End a tracker as a kill does: without another word to the store. What it committed stays on disk."""
    started = tracker._started
    assert started is not None
    writer = started.writer
    with writer._condition:
        writer._closing = True
        writer._condition.notify_all()
    writer._thread.join()
    started.log.close()


def wait_for_threads(patience: float = 30.0) -> list[str]:
    """Wait until no thread of a tracker is left, since one that holds a lock would take it into a fork; the
    names of those that do not end."""
    until = time.monotonic() + patience
    while True:
        left = [thread.name for thread in threading.enumerate() if thread.name in TRACKERS]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.01)
