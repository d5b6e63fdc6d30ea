"""Locks of files, with words for one that is waited for and for one that cannot be locked."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from plait.core.errors import StorageError

POLL_SECONDS = 0.01
SILENT_SECONDS = 2.0  # of waiting before something is said
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of a file system without locks
NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def real_locks(path: Path) -> Iterator[None]:
    """Raise a StorageError if the code inside cannot lock a file because it cannot be written, or because the
    file system has no locks. A lock file is no substitute: it survives when its holder is killed."""
    try:
        yield
    except OSError as error:
        if error.errno in NOT_OURS:
            raise StorageError(
                f"{error.filename or path}: {error.strerror or error}",
                "Every process of a search locks this file, and must be able to write it.",
                "Make the file and its folder writable, or use a folder of your own: tracking.root=FOLDER, "
                "and search.storage=PATH if that was set.",
            ) from error
        if error.errno not in NO_LOCKS:
            raise
        raise StorageError(
            f"{path}: {error.strerror or error}",
            "Processes that share a search lock files, and this file system does not support locks.",
            "Choose a folder on a local disk, or on a file system with lock support: tracking.root=FOLDER, "
            "and search.storage=PATH if that was set.",
        ) from error


def lock_of(path: Path, *, blocking: bool = True, thread_local: bool = True) -> FileLock:
    """The lock of a file, which the system releases when its holder dies; never a mere file in its place."""
    return FileLock(
        path, blocking=blocking, thread_local=thread_local, poll_interval=POLL_SECONDS, fallback_to_soft=False
    )


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Wait for and hold a lock that one thread of one process holds at a time. The file is kept.

    Raises:
        StorageError: the file cannot be written, or the file system has no locks.
    """
    lock = lock_of(path)
    with real_locks(path):
        lock.acquire(cancel_check=waiting(path))
    try:
        yield
    finally:
        lock.release()


def waiting(path: Path) -> Callable[[], bool]:
    """What a loop calls each time that it finds a file locked. Once, after some seconds, it says so, because
    anybody who can read a file can lock it. It returns False: waiting continues."""
    begun, said = time.monotonic(), False

    def check() -> bool:
        nonlocal said
        if not said and time.monotonic() - begun >= SILENT_SECONDS:
            said = True
            print(f"Waiting for {path}, which another process has locked.", file=sys.stderr, flush=True)
        return False

    return check
