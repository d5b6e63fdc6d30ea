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

HEARTBEAT = 20.0  # seconds after which the last line is written again, as it is by then
OVERRUN = 0.5  # a piece that has run for a time is expected to run for at least this share of it

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
    _line: Callable[[], str] = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def say(self, line: Callable[[], str]) -> None:
        """Write one line: the time so far, and the current part, which ``line`` returns as of now."""
        self._line = line
        self.again()

    def again(self) -> None:
        """Write the last line as it is now, to show that the benchmark is still running."""
        text = self._line()
        print(f"{duration(self.clock() - self._started):>10}  {self.name}: {text}", file=self.out, flush=True)


_current: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextmanager
def shown(name: str, out: TextIO | None = None, *, heartbeat: float = HEARTBEAT) -> Iterator[None]:
    """Within this context, write the benchmark's progress to ``out``, standard error by default."""
    progress = Progress(name, out or sys.stderr)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(heartbeat):
            progress.again()

    progress.say(lambda: "started")
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
        progress.say(lambda: text)

    def piece(name: str) -> None:
        nonlocal begun
        begun += 1
        number, since = begun, progress.clock()

        def line() -> str:
            left = _left(number - 1, since - started, progress.clock() - since, pieces - number)
            rest = "" if left is None else f", about {duration(left)} left of this part"
            return f"{text}: {number} of {pieces} ({name}){rest}"

        progress.say(line)

    return piece


def _left(ended: int, spent: float, running: float, waiting: int) -> float | None:
    """Seconds left of a part: ``ended`` of its pieces took ``spent``, one has been ``running``, and others
    are ``waiting``; None before one has ended. It rises while a piece runs for longer than those before."""
    if not ended:
        return None
    whole = max(spent / ended, running * (1 + OVERRUN))  # of the piece that runs
    return whole - running + waiting * (spent + whole) / (ended + 1)
