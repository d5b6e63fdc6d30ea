"""The files by whose locks processes of one host know which of them are alive.

A seam: `plait control` asks by it alone, without the libraries that a study needs.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from filelock import Timeout

from plait.utils.file_locks import lock_of, real_locks

WORKERS = "workers"  # folder of a search with a file for each of its processes on this host


class LifeLock:
    """A lock held while this process lives, so that others know that it is alive.

    Args:
        path: a file of this process only.

    Raises:
        StorageError: the file cannot be written, or the file system has no locks.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = lock_of(path, thread_local=False)
        with real_locks(path):
            self._lock.acquire()  # made again if another process took it for a dead one's file and removed it

    def release(self) -> None:
        """Release the lock: this process no longer takes part. A file that cannot be removed stays, as a dead
        process's does."""
        if self._lock.is_locked:
            with suppress(OSError):  # what ended the process is reported instead
                self.path.unlink()
            self._lock.release()


def holder_lives(path: Path) -> bool:
    """Whether the process of a :class:`LifeLock` on this host is alive. Nothing is written: a search can be
    looked at by those who may only read it.

    Raises:
        FileNotFoundError: there is no file: the process ended in order, or the file is out of reach.
        StorageError: the file cannot be read, or the file system has no locks.
    """
    with real_locks(path):
        file = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # NFS has no other lock for who only reads
        except BlockingIOError:
            return True
        finally:
            os.close(file)
    return False


def remove_dead(path: Path) -> None:
    """Remove the file of a :class:`LifeLock` whose process is dead.

    The file is removed under the lock, so a process that has made the same file and is about to lock it
    notices that it needs a new one.
    """
    with suppress(Timeout, PermissionError), lock_of(path, blocking=False):
        path.unlink()


def living(folder: Path) -> list[Path]:
    """The :class:`LifeLock` files in a folder whose processes are alive; must not be called by one of
    these."""
    found = []
    for path in sorted(folder.glob("*")):
        with suppress(FileNotFoundError):
            found += [path] if holder_lives(path) else []
    return found


def trains_here(folder: Path) -> bool:
    """Whether a process of this host trains the search in a folder; must not be called by one that does."""
    return bool(living(folder / WORKERS))
