"""How a program of Plait's begins and ends quickly, with the many objects of large libraries."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from plait.core.errors import EXIT_INTERRUPTED

WHOLE_COLLECTIONS = 100  # collections of the middle generation before one of all objects; Python's own is 10


class Ending:
    """The end of a program, without taking its modules apart: with torch and MLflow imported, that takes one
    to two seconds of processor time after the last line. Made first, so that it comes last: threads have
    ended by then, and all that was registered to run at exit has run."""

    def __init__(self) -> None:
        self._status: int | None = None
        atexit.register(self._end)

    def leave(self, status: int) -> None:
        """Let the program end with this status. Ctrl-C takes effect immediately from now on: nothing is left
        to save, and Python's own exit would show a traceback. Printed text is flushed before."""
        self._status = status
        _flush()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, lambda *_: os._exit(status or EXIT_INTERRUPTED))

    def _end(self) -> None:
        if self._status is not None:  # else an error ends it
            _flush()
            os._exit(self._status)


def open_closed_streams() -> None:
    """Give a program that was started with closed input or output (``>&-``, as some supervisors do) a stream
    that is empty and takes all text, and the programs that it starts likewise. Otherwise Python has None in
    their place, and the first file that is opened gets the number of the output, so that what a library
    prints would be written into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            stream = open(number, mode, errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Within the context, Python goes through all objects a tenth as often: imported libraries make 750,000
    that stay, and looking at them again and again was a fifth of the processor time that imports took. Young
    objects are collected as often as before."""
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], max(before[2], WHOLE_COLLECTIONS))
    try:
        yield
    finally:
        gc.set_threshold(*before)
