"""Locks between processes that the system releases when their holder dies, however it dies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import sqlalchemy
from filelock import FileLock, Timeout

from plait.utils.line_log import real_locks

POLL_SECONDS = 0.01
WORKERS = "workers"  # folder of a search with a file for each of its processes on this host


def _lock_of(path: Path, *, blocking: bool = True, thread_local: bool = True) -> FileLock:
    return FileLock(
        path, blocking=blocking, thread_local=thread_local, poll_interval=POLL_SECONDS, fallback_to_soft=False
    )


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """A lock that one process holds at a time, and one thread of it; waits for it. The file stays.

    Raises:
        StorageError: the file system has no locks.
    """
    lock = _lock_of(path)
    with real_locks(path):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


class LifeLock:
    """Held while this process lives, so that others know it is alive.

    Args:
        path: a file of this process alone.

    Raises:
        StorageError: the file system has no locks.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = _lock_of(path, thread_local=False)
        with real_locks(path):
            self._lock.acquire()  # made again if another process took the file for a dead one's meanwhile

    def release(self) -> None:
        """This process takes no more part."""
        if self._lock.is_locked:
            self.path.unlink(missing_ok=True)
            self._lock.release()


def holder_lives(path: Path) -> bool:
    """Whether the process of a :class:`LifeLock` on this host lives.

    Raises:
        FileNotFoundError: the file is not there: it ended in order, or is out of reach.
        StorageError: the file system has no locks.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        with real_locks(path), _lock_of(path, blocking=False):
            return False
    except Timeout:
        return True


def remove_dead(path: Path) -> None:
    """Remove the file of a :class:`LifeLock` whose process is dead.

    It goes while the lock is held: who has made its file and is about to lock it sees that it needs another.
    """
    with suppress(Timeout, PermissionError), _lock_of(path, blocking=False):
        path.unlink()


def living(folder: Path) -> list[Path]:
    """The :class:`LifeLock` files in a folder whose processes live; not to be asked by one of them."""
    found = []
    for path in sorted(folder.glob("*")):
        with suppress(FileNotFoundError):
            found += [path] if holder_lives(path) else []
    return found


def trains_here(folder: Path) -> bool:
    """Whether a process of this host trains the search in a folder; not to be asked by one that does."""
    return bool(living(folder / WORKERS))


@contextmanager
def advisory_lock(engine: sqlalchemy.Engine, name: str) -> Iterator[None]:
    """A lock of PostgreSQL by name, held until the context ends or its connection does."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})
        yield
