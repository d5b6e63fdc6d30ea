"""The file in which everything waits that the tracking store is to get.

A process appends to a spool file of its own; the writer reads it from there and notes how far the store has
it. What is in the file survives the process, so that nothing is lost when it is killed, or the store is gone
when it ends. A line that a crash cut short is cut off when the file is opened again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from plait.core.errors import StorageError
from plait.tracking.encoding import Head, Held, Line, Taken, decode, encode
from plait.tracking.operations import LogFile, LogPoints, LogText, Operation, count_points
from plait.tracking.written import Written

SUFFIX = ".jsonl"
DIGITS = 20  # of the number of bytes that were sent; of one width, so that writing it takes no more room
CHUNK = 1 << 20  # bytes read at once


class Spool:
    """One spool file, open and locked for this process. Made by :func:`open_spool` and :func:`free_spools`.

    Appending may go on in one thread while another reads and notes what was sent.

    Args:
        path: of the file, which may be empty or absent.
        descriptor: of the file, open for reading and appending, locked.
        head: its first line where it has none yet.

    Raises:
        StorageError: the file cannot be read or written.
    """

    def __init__(self, path: Path, descriptor: int, head: Head | None = None) -> None:
        self.path = path
        self.written = Written()
        self._file = descriptor
        self._lock = threading.Lock()  # of the end of the file, and of what waits
        self._durable = 0
        self._peeked = (0, 0, 0)  # where what was read last ends, its operations and metric values
        self._sent_file = os.open(path.with_suffix(".sent"), os.O_RDWR | os.O_CREAT, 0o644)
        self._sent = self._read_sent()
        self._waiting = 0
        self._points = 0
        self._end = 0
        self.head = head
        self._recover()
        self._left = self._end if self._waiting else 0
        if self._end == 0 and head is not None:
            self._write(head)
            self._sent = 0
            self._note_sent(0)
            self.commit()

    def _read_sent(self) -> int:
        text = os.pread(self._sent_file, DIGITS, 0)
        if len(text) == DIGITS and text.isdigit():
            return int(text)
        self._note_sent(0)
        return 0

    def _note_sent(self, at: int) -> None:
        os.pwrite(self._sent_file, b"%0*d" % (DIGITS, at), 0)

    def _recover(self) -> None:
        """Read the file through, learn what is in it and cut off what is no whole line."""
        size = os.fstat(self._file).st_size
        for start, text in self._texts(0, size):
            try:
                line = decode(text)
            except ValueError as error:
                if start == 0:
                    raise StorageError(
                        f"{self.path}: {error}",
                        "The file must be a spool that this version of Plait wrote.",
                        "Use the version that wrote it, or move it away: it holds what is not sent yet.",
                    ) from error
                break
            self._end = start + len(text)
            if isinstance(line, Head):
                self.head = line
                continue
            self.written.add(line)
            if start >= self._sent and not isinstance(line, (Held, Taken)):
                self._count(line)
        if self._end < size:
            os.ftruncate(self._file, self._end)
        self._sent = min(self._sent, self._end)

    def _texts(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Whole lines of a part of the file, each with its place."""
        left = b""
        while start + len(left) < stop:
            at = start + len(left)
            read = os.pread(self._file, min(CHUNK, stop - at), at)
            if not read:
                return
            lines = (left + read).splitlines(keepends=True)
            left = b"" if lines[-1].endswith(b"\n") else lines.pop()
            for text in lines:
                yield start, text
                start += len(text)

    # ---- writing ---------------------------------------------------------------------------------------

    def append(self, operation: Operation) -> None:
        """Add an operation at the end; a point only with those of its values that are not there yet.

        Raises:
            StorageError: the disk is full or fails; what was there before stays.
        """
        if isinstance(operation, LogPoints):
            point = self.written.new(operation)
            if point is None:
                return
            operation = point
        self._write(operation)

    def note(self, line: Held | Taken) -> None:
        """Add a line that is not sent; raises StorageError as :meth:`append`."""
        self._write(line)

    def _write(self, line: Line) -> None:
        text = encode(line)
        with self._lock:
            try:
                done = os.write(self._file, text)
                if done < len(text):  # a full disk takes a part
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                os.ftruncate(self._file, self._end)
                raise self.full(error) from error
            self._end += len(text)
            self.written.add(line)
            if not isinstance(line, (Head, Held, Taken)):
                self._count(line)

    def _count(self, operation: Operation) -> None:
        self._waiting += 1
        self._points += count_points([operation])

    def commit(self) -> None:
        """Return when everything that was appended is on the disk.

        Raises:
            StorageError: the disk is full or fails.
        """
        with self._lock:
            end = self._end
        if end <= self._durable:
            return
        try:
            os.fsync(self._file)
            if self._durable == 0:
                _sync_folder(self.path.parent)
        except OSError as error:
            raise self.full(error) from error
        self._durable = end

    def full(self, error: OSError) -> StorageError:
        """What is said of a disk that is full or fails."""
        return StorageError(
            f"{self.path}: {error.strerror or error}",
            "What tracking is to send is kept there until the store has it; all that was there stays.",
            "Make room (or mend the disk), then start the same command again: it goes on from the last "
            "checkpoints.",
        )

    # ---- sending ---------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Operations that the store does not have yet."""
        return self._waiting

    @property
    def waiting_points(self) -> int:
        """Metric values that the store does not have yet."""
        return self._points

    @property
    def behind(self) -> bool:
        """Whether the store lacks anything that was there when the file was opened, or was taken over."""
        return self._sent < self._left

    def peek(self, count: int) -> list[Operation]:
        """The oldest operations that the store does not have, safe on the disk: what the store has, a spool
        has too, even after a power failure."""
        self.commit()
        found: list[Operation] = []
        at = self._sent
        for after, operation in self._pending():
            if len(found) == count:
                break
            at = after
            found.append(operation)
        self._peeked = (at, len(found), count_points(found))
        return found

    def _pending(self) -> Iterator[tuple[int, Operation]]:
        """Operations that the store does not have, each with the place where the next begins."""
        with self._lock:
            end = self._end
        for start, text in self._texts(self._sent, end):
            line = decode(text)
            if not isinstance(line, (Head, Held, Taken)):
                yield start + len(text), line

    def drop(self) -> None:
        """Note that the store has what :meth:`peek` gave last."""
        at, operations, points = self._peeked
        with self._lock:
            self._sent = at
            self._waiting -= operations
            self._points -= points
            self._peeked = (at, 0, 0)
        with suppress(OSError):  # then it is sent once more, which changes nothing
            self._note_sent(at)

    # ---- several files ---------------------------------------------------------------------------------

    def take_over(self, other: Spool) -> None:
        """Append what another spool of the same search has and the store has not, and remove that file."""
        for _, operation in other._pending():
            if isinstance(operation, LogFile):  # which goes with the other
                text = operation.file.read_text(encoding="utf-8")
                operation = LogText(operation.run, operation.path, text)
            self._write(operation)
        if other.waiting:
            self._left = self._end
        for line in other.written.lines():
            self._write(line)
        self.commit()
        other.remove()

    def beside(self, path: str) -> Path:
        """The file that has an artifact's newest form as long as this one is there."""
        return self.path.with_suffix(f".{Path(path).name}")

    def close(self) -> None:
        """Let go of the file; what it has stays."""
        os.close(self._file)
        os.close(self._sent_file)

    def remove(self) -> None:
        """Delete the file, which has nothing that the store does not have, and let go of it."""
        self.path.unlink(missing_ok=True)
        for beside in self.path.parent.glob(f"{self.path.stem}.*"):
            beside.unlink(missing_ok=True)
        self.close()


def open_spool(folder: Path, head: Head) -> Spool:
    """A spool for a search's run: one that an ended process left, or a new one.

    Raises:
        StorageError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = 0
        while True:
            path = folder / f"{head.parent_id}-{number}{SUFFIX}"
            descriptor = _lock(path, os.O_CREAT)
            if descriptor is not None:
                return Spool(path, descriptor, head)
            number += 1
    except OSError as error:
        raise StorageError(
            f"{folder}: {error.strerror or error}",
            "What tracking is to send is kept there until the store has it.",
            "Give tracking.root= a folder that you may write.",
        ) from error


def free_spools(folder: Path, parent_id: str | None = None) -> Iterator[Spool]:
    """Spools that no process has open; of one search's run, if given."""
    for path in spool_files(folder, parent_id):
        descriptor = _lock(path)
        if descriptor is None:
            continue
        spool = Spool(path, descriptor)
        if spool.head is None:  # nothing was ever written to it
            spool.remove()
        else:
            yield spool


def spool_files(folder: Path, parent_id: str | None = None) -> list[Path]:
    """Where spools lie, whoever has them open; of one search's run, if given."""
    return sorted(folder.glob(f"{parent_id or '*'}-*{SUFFIX}"))


def _lock(path: Path, flags: int = 0) -> int | None:
    """The file, open and locked; None where another process has it, or has removed it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | flags, 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        return _lock(path, flags)
    return descriptor


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
