"""A crash-safe log of JSON lines: a line is complete or absent, and what was committed survives a power
failure.

A crash can leave part of a last line. The next process that locks the log cuts it off, but only after lines
of the right kind: a file of another kind, such as a user's text without a final newline, is refused and never
changed.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from filelock import lock_descriptor, unlock_descriptor

from plait.core.errors import StorageError
from plait.utils.file_locks import real_locks, waiting
from plait.utils.files import to_disk

BLOCK = 1 << 20  # bytes read at once
POLL_SECONDS = 0.001  # between two attempts at a lock that another process holds for one line


class LineLog:
    """One log file. Nothing is written before :meth:`lock`; closing it releases the lock.

    Args:
        path: in a folder that exists.
        begins: the bytes with which every line of this kind of log begins.
        make: whether to make the file if it is missing.

    Attributes:
        end: the offset at which the next line begins; known while the lock is held.

    Raises:
        OSError: from every method, if the disk is full or fails. Earlier lines are kept.
    """

    def __init__(self, path: Path, begins: bytes, *, make: bool = True) -> None:
        self.path = path
        self._begins = begins
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if make else 0), 0o666)
        self.end = 0
        self._durable = 0
        self._new = False

    def lock(self, *, wait: bool = True) -> bool:
        """Lock the file against other processes and cut off a partial line that a crash left.

        Args:
            wait: whether to wait for a process that holds the lock.

        Returns:
            Whether the lock is held; False if another process has it, or has removed the file.

        Raises:
            StorageError: the file is not a log of this kind, or its file system has no locks.
        """
        with real_locks(self.path):
            check = waiting(self.path)
            while not lock_descriptor(self._file, blocking=False):
                if not wait or check():
                    return False
                time.sleep(POLL_SECONDS)
        status = os.fstat(self._file)
        if status.st_nlink == 0:
            return False
        self.end = self._end_of_lines(status.st_size)
        if self.end < status.st_size:
            os.ftruncate(self._file, self.end)
        self._new = self.end == 0
        return True

    def append(self, lines: bytes) -> None:
        """Add whole lines, all or none."""
        try:
            if os.write(self._file, lines) < len(lines):  # a full disk takes only part of it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except BaseException:
            os.ftruncate(self._file, self.end)
            raise
        self.end += len(lines)

    def commit(self) -> None:
        """Wait until everything appended so far is on the disk."""
        end = self.end
        if end <= self._durable:
            return
        os.fsync(self._file)
        if self._new:  # a file that its folder does not list is lost
            to_disk(self.path.parent)
            self._new = False
        self._durable = end

    def cut(self, end: int) -> None:
        """Drop all lines from the offset ``end`` on."""
        os.ftruncate(self._file, end)
        self.end = end

    def lines(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
        """The complete lines between two offsets, each with its offset; up to the end by default."""
        left = b""
        stop = os.fstat(self._file).st_size if stop is None else stop
        while start + len(left) < stop:
            at = start + len(left)
            read = os.pread(self._file, min(BLOCK, stop - at), at)
            if not read:
                return
            lines = (left + read).splitlines(keepends=True)
            left = b"" if lines[-1].endswith(b"\n") else lines.pop()
            for line in lines:
                yield start, line
                start += len(line)

    def close(self) -> None:
        """Release the lock and close the file."""
        if self._file >= 0:
            with suppress(OSError):  # the file system may have no locks
                unlock_descriptor(self._file)  # even if a forked process has the file open
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_of_lines(self, size: int) -> int:
        """The offset at which the last complete line ends. Lines are read only if the file does not end with
        one."""
        if not self._begins.startswith(os.pread(self._file, len(self._begins), 0)):
            raise other_kind(self.path, self._begins)
        if size == 0 or os.pread(self._file, 1, size - 1) == b"\n":
            return size
        end = self._after_newline(size)
        start = self._after_newline(end - 1)
        if end and not self._is_line(os.pread(self._file, end - start, start)):
            raise other_kind(self.path, self._begins)
        return end

    def _after_newline(self, end: int) -> int:
        """The offset after the last newline before ``end``; 0 if there is none."""
        while end > 0:
            start = max(0, end - BLOCK)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0

    def _is_line(self, line: bytes) -> bool:
        try:
            json.loads(line)
        except ValueError:
            return False
        return line.startswith(self._begins)


def check_kind(path: Path, begins: bytes) -> None:
    """Check that a file is a log whose lines begin with ``begins``, without changing it.

    Raises:
        StorageError: it is not.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if not begins.startswith(file.read(len(begins))):
            raise other_kind(path, begins)


def other_kind(path: Path, begins: bytes) -> StorageError:
    """The error for a file that is not a log whose lines begin with ``begins``."""
    return StorageError(
        f"{path} is a different kind of file",
        f"Plait appends only to its own files, whose lines begin with {begins.decode()}",
        "Use another file, or move this one.",
    )
