"""The curves of a search's own run: one process writes them at a time, however many train the search."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from plait.core.errors import StorageError

FILE = "totals"  # in the search's folder: locked by the process that writes them, and how far they are
DIGITS = 20  # of the step, and of the microseconds after it


class Totals:
    """Steps and seconds of these curves.

    Who writes has a lock that falls with its process; another one then goes on where it stood. Processes on
    other hosts have a folder, and curves, of their own.

    Args:
        rising: seconds that only rise.
    """

    def __init__(self, rising: Callable[[], float] = time.monotonic) -> None:
        self._rising = rising
        self._started = rising()
        self._before = 0.0
        self._file: int | None = None
        self._mine = False
        self.step = 0

    def stood(self, step: int, seconds: float) -> None:
        """Go on after so many steps and seconds."""
        self.step, self._before = step, seconds

    def begin(self, folder: Path, run_id: str) -> None:
        """From now on the seconds count; ``folder`` is the search's, and ``run_id`` that of its run.

        Raises:
            StorageError: the folder cannot be written.
        """
        path = folder / f"{FILE}-{run_id}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StorageError(
                f"{path}: {error.strerror or error}",
                "The processes of a search agree there on who writes its curves.",
                "Free some space, or make the folder writable.",
            ) from error
        step, seconds = self._noted()
        self.step, self._before = max(self.step, step), max(self._before, seconds)
        self._started = self._rising()

    def next(self) -> tuple[int, float] | None:
        """The next step and its seconds, if this process writes it."""
        if self._file is None or not self._take(self._file):
            return None
        self.step += 1
        microseconds = round(self.seconds * 1_000_000)
        with suppress(OSError):  # a disk that is full: then others begin with what the store has
            os.pwrite(self._file, b"%0*d%0*d" % (DIGITS, self.step, DIGITS, microseconds), 0)
        return self.step, microseconds / 1_000_000

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the search, those of earlier processes included."""
        return self._before + self._rising() - self._started

    def close(self) -> None:
        """Leave them to others."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._mine = None, False

    def _take(self, file: int) -> bool:
        if self._mine:
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        step, seconds = self._noted()
        self.step = max(self.step, step)
        self._before += max(seconds - self.seconds, 0.0)  # whatever this process knew: time does not go back
        self._mine = True
        return True

    def _noted(self) -> tuple[int, float]:
        """Step and seconds of the last point that a process of this host wrote."""
        text = b"" if self._file is None else os.pread(self._file, 2 * DIGITS, 0)
        step, seconds = (int(part) if part.isdigit() else 0 for part in (text[:DIGITS], text[DIGITS:]))
        return step, seconds / 1_000_000
