"""Progress of a running benchmark, on standard error: the current part, time so far, time left.

A benchmark marks its parts with :func:`part` and each piece of work with the function that this returns; the
caller of the benchmark decides with :func:`shown` whether progress is written.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TextIO

from plait.utils.durations import duration

HEARTBEAT = 20.0  # seconds after which the last line is repeated, with the time

Clock = Callable[[], float]


@dataclass(slots=True)
class Progress:
    """Writes the progress of one benchmark, line by line.

    Attributes:
        name: the benchmark's name.
        out: stream for the lines.
        clock: returns seconds that never decrease.
    """

    name: str
    out: TextIO
    clock: Clock = time.monotonic
    _started: float = field(init=False)
    _now: str = ""

    def __post_init__(self) -> None:
        self._started = self.clock()

    def say(self, text: str) -> None:
        """Write one line: the time so far, and the current part."""
        self._now = text
        print(f"{duration(self.clock() - self._started):>10}  {self.name}: {text}", file=self.out, flush=True)

    def again(self) -> None:
        """Repeat the last line, to show that the benchmark is still running."""
        self.say(self._now)


_current: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextmanager
def shown(name: str, out: TextIO | None = None, *, heartbeat: float = HEARTBEAT) -> Iterator[None]:
    """Within this context, write the benchmark's progress to ``out``, standard error by default."""
    progress = Progress(name, out or sys.stderr)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(heartbeat):
            progress.again()

    progress.say("started")
    token = _current.set(progress)
    thread = threading.Thread(target=beat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _current.reset(token)


def part(text: str, pieces: int = 1) -> Callable[[str], None]:
    """Report that a part of the benchmark starts.

    Args:
        text: what it does.
        pieces: number of its pieces of work, which take about the same time each.

    Returns:
        A function to call before each piece, with its name; from the second piece on it also estimates how
        long the rest of the part will take.
    """
    progress = _current.get()
    if progress is None:
        return lambda _: None
    started, begun = progress.clock(), 0
    if pieces == 1:
        progress.say(text)

    def piece(name: str) -> None:
        nonlocal begun
        begun += 1
        spent = progress.clock() - started
        left = spent / (begun - 1) * (pieces - begun + 1) if begun > 1 else None
        rest = "" if left is None else f", about {duration(left)} left of this part"
        progress.say(f"{text}: {begun} of {pieces} ({name}){rest}")

    return piece
