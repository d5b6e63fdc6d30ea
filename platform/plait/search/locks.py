"""Locks between processes that the system releases when their holder dies, however it dies.

POSIX record locks: they belong to a process and are not inherited by those that it starts. A process must not
open its own lock file a second time, since closing it again would release the lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import sqlalchemy

_threads: defaultdict[Path, threading.RLock] = defaultdict(threading.RLock)  # of this process, by file


class FileLock:
    """A lock that one process holds at a time, and one thread of it.

    Args:
        path: made where it is missing, and left there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._among_threads = _threads[path.absolute()]
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._among_threads.acquire()
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX)
            except BaseException:
                os.close(handle)
                raise
        except BaseException:
            self._among_threads.release()
            raise
        self._handle = handle
        return True

    def release(self) -> None:
        """Let it go."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)
            self._among_threads.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """The lock, for as long as the context lasts."""
        self.acquire()
        try:
            yield
        finally:
            self.release()


class LifeLock:
    """Held for as long as this process lives: others see by it that it does.

    Args:
        path: a file of this process alone.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._handle: int | None = self._take()

    def _take(self) -> int:
        """Make the file and lock it; again where somebody took it for a dead process's in between."""
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.lockf(handle, fcntl.LOCK_EX)
            if self.path.exists() and self.path.stat().st_ino == os.fstat(handle).st_ino:
                return handle
            os.close(handle)

    def release(self) -> None:
        """This process takes no more part."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self.path.unlink(missing_ok=True)
            os.close(handle)


def holder_lives(path: Path) -> bool:
    """Whether the process of a :class:`LifeLock` on this host lives; not to be asked of one's own.

    Raises:
        FileNotFoundError: the file is not there: it ended in order, or is out of reach.
    """
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def remove_dead(path: Path) -> None:
    """Remove the file of a :class:`LifeLock` whose process is gone; not to be asked of one's own.

    It goes while the lock is held: who has made its file and is about to lock it sees that it needs another.
    """
    handle = os.open(path, os.O_RDWR)
    try:
        with suppress(BlockingIOError, PermissionError):
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    finally:
        os.close(handle)


@contextmanager
def advisory_lock(engine: sqlalchemy.Engine, name: str) -> Iterator[None]:
    """A lock of PostgreSQL by name, held until the context ends or its connection does."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})
        yield
