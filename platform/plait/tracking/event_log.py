"""The event log: keeps records for the tracking store on disk until the store has them.

Each process appends to its own log; the writer reads the log and notes how much of it the store has. So
nothing is lost if the process is killed, or if the store cannot be reached at its end: the next process of
the search adopts the log. The log also knows which points have been written, so a step that is trained again
after a crash is not written again.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

from plait.core.errors import StorageError
from plait.core.lifecycle import STORED_AS, JobState
from plait.tracking import names
from plait.tracking.records import (
    BEGINS,
    Head,
    Line,
    LogPoints,
    LogText,
    Record,
    SetStatus,
    SetTags,
    Written,
    decode,
    encode,
)
from plait.tracking.values import finite, not_finite
from plait.utils.files import disk_errors, to_disk, write_text
from plait.utils.line_log import LineLog
from plait.utils.paths import search_folder
from plait.utils.progress import say

SUFFIX = ".jsonl"
DIGITS = 20  # of the number of bytes sent; a fixed width, so that rewriting it needs no more space
NO_HEAD = Head("", "", "")
KEPT = "Records for the tracking store are kept there until they are sent."
LATE = " (late)"  # suffix of a metric's name for its late values, which are also written once


def time_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)


class EventLog:
    """One log, locked for this process. Made by :func:`open_event_log` and :func:`free_logs`.

    One thread may append while another reads and notes what was sent.

    Attributes:
        head: the first line, which an empty log gets.
        now: milliseconds since 1970; stamps what is appended.
        shared: whether other processes of this host also worked on the search.
        newest: the last point of the search's own run that is known.
        waiting: number of records that the store does not have yet.

    Raises:
        StorageError: from every method that writes, if the disk is full or fails; earlier records are kept.
    """

    def __init__(self, log: LineLog, head: Head, now: Callable[[], int] = time_ms) -> None:
        self.path = log.path
        self.head = head
        self.now = now
        self.shared = False
        self._log = log
        self._lock = threading.Lock()  # guards the end of the log, and the counts
        self._steps: dict[str, dict[str, int]] = {}  # the last written step of each metric, by run
        self.newest: LogPoints | None = None
        self._device_seconds: dict[str, float] = {}  # the most that is recorded, by run
        self._committing = threading.Lock()  # held during a commit: when it is free, all is on the disk
        self._texts: set[Path] = set()  # files of texts that are not on the disk yet; below the first lock
        self.waiting = 0
        self._peeked = (0, 0)  # the end of what was read last, and its number of records
        self._sent_file = os.open(log.path.with_suffix(".sent"), os.O_RDWR | os.O_CREAT, 0o644)
        self._sent = self._noted_sent()
        self._recover()
        if log.end == 0:
            self._sent = 0
            self._note_sent()
            self._write(head)
            self.commit()

    def _noted_sent(self) -> int:
        text = os.pread(self._sent_file, DIGITS, 0)
        return int(text) if len(text) == DIGITS and text.isdigit() else 0

    def _note_sent(self) -> None:
        os.pwrite(self._sent_file, b"%0*d" % (DIGITS, self._sent), 0)

    def _recover(self) -> None:
        """Read the log, learn what is in it, and cut off anything that is not a line of it, as after a power
        failure."""
        for at, text in self._log.lines():
            try:
                line = decode(text)
                if isinstance(line, Head) != (at == 0):
                    raise ValueError("it begins with its head")
            except ValueError as error:
                if at == 0:
                    raise StorageError(
                        f"{self.path}: {error}",
                        f"{KEPT} It must be an event log written by this version of Plait.",
                        "If another version wrote it, use that one. If it is damaged, move it away and run "
                        "the same command again: the search resumes from its checkpoints, but steps in the "
                        "file that were not sent are missing from the store.",
                    ) from error
                say(
                    f"{self.path} is damaged from byte {at} on. What follows is removed; steps in it that "
                    "were not sent are missing from the store."
                )
                self._log.cut(at)
                break
            if isinstance(line, Head):
                self.head = line
                continue
            self._learn(line)
            if at >= self._sent and isinstance(line, Record):
                self.waiting += 1
        self._sent = min(self._sent, self._log.end)

    # ---- writing ---------------------------------------------------------------------------------------

    def points(self, run: str, step: int, values: Mapping[str, float], *, late: bool = False) -> None:
        """Append values of a run at a step; those that are not finite go to a tag. ``late`` values may be
        added to those that the step already has."""
        if kept := finite(values):
            self.append(LogPoints(run, step, self.now(), kept, late))
        if len(kept) < len(values):
            self.tags(run, {names.TAG_DIVERGED: f"step {step}: {not_finite(values)}"})

    def tags(self, run: str, tags: Mapping[str, str]) -> None:
        """Append tags of a run."""
        self.append(SetTags(run, tags))

    def state(self, run: str, state: JobState, reason: str) -> None:
        """Append the state of a run that has stopped training for now or for good, in our terms and in
        MLflow's."""
        self.tags(run, {names.TAG_STATE: state, names.TAG_REASON: reason})
        self.append(SetStatus(run, STORED_AS[state].mlflow, self.now()))

    def text(self, run: str, path: str, text: str) -> None:
        """Append a text artifact; its newest version is kept in a file next to the log."""
        file = self._beside(path)
        with self._disk_errors():
            write_text(file, text, durable=False)  # commit() syncs it
        with self._lock:
            self._texts.add(file)
        self._write(LogText(run, str(file), path))

    def append(self, record: Record) -> None:
        """Add a record; for a point, only the values that are not written yet."""
        if isinstance(record, LogPoints):
            values = self._new_values(record)
            if len(values) < len(record.values):
                if not values:
                    return
                record = replace(record, values=values)
        self._write(record)

    def _write(self, line: Line) -> None:
        text = encode(line)
        with self._lock:
            with self._disk_errors():
                self._log.append(text)
            self._learn(line)
            if isinstance(line, Record):
                self.waiting += 1

    def commit(self) -> None:
        """Wait until everything appended is on the disk. Any thread may call this."""
        with self._committing:
            with self._lock:
                texts, self._texts = self._texts, set()
            try:
                with self._disk_errors():
                    if texts:
                        for file in (*texts, self.path.parent):  # the folder: for their names
                            to_disk(file)
                    self._log.commit()
            except StorageError:
                with self._lock:
                    self._texts |= texts  # the next commit tries them again
                raise

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors(
            self.path,
            f"{KEPT} Earlier records are safe.",
            "Free some space or repair the disk, then run the same command again; it resumes from the last "
            "checkpoints.",
        )

    # ---- which points are written ----------------------------------------------------------------------

    def last_step(self, run: str, metric: str) -> int | None:
        """The last step of a metric of a run; None if there is none."""
        return self._steps.get(run, {}).get(metric)

    def device_seconds(self, run: str) -> float:
        """The most device time that is recorded of a run, by ended processes of this host too."""
        return self._device_seconds.get(run, 0.0)

    def _learn(self, line: Line) -> None:
        """Note which points a line has. A run's points are written in the order of their steps, so the last
        step says which exist."""
        match line:
            case LogPoints():
                self._count(line.run, line.values.get(names.DEVICE_SECONDS, 0.0))
                steps = self._steps.setdefault(line.run, {})
                for key in line.values:
                    steps[f"{key}{LATE}" if line.late else key] = line.step
                if line.run == self.head.parent and (self.newest is None or line.step > self.newest.step):
                    self.newest = line
            case Written():
                self._count(line.run, line.device_seconds)
                steps = self._steps.setdefault(line.run, {})
                for key, step in line.steps.items():
                    steps[key] = max(step, steps.get(key, step))

    def _count(self, run: str, device_seconds: float) -> None:
        self._device_seconds[run] = max(self.device_seconds(run), device_seconds)

    def _new_values(self, point: LogPoints) -> dict[str, float]:
        steps = self._steps.get(point.run, {})
        suffix = LATE if point.late else ""

        def is_new(key: str, value: float) -> bool:
            if point.late and key == names.DEVICE_SECONDS:
                return value > self.device_seconds(point.run)  # steps that a kill had done again add to it
            return point.step > steps.get(key + suffix, -1)

        return {key: value for key, value in point.values.items() if is_new(key, value)}

    # ---- sending ---------------------------------------------------------------------------------------

    def peek(self, count: int) -> list[Record]:
        """The oldest records that the store does not have, after syncing them, so that even after a power
        failure the log has everything that the store has."""
        with self._lock:
            end = self._log.end
        self.commit()
        found, at = [], self._sent
        for after, record in itertools.islice(self._unsent(end), count):
            found.append(record)
            at = after
        self._peeked = at, len(found)
        return found

    def _unsent(self, end: int) -> Iterator[tuple[int, Record]]:
        """Records before an offset that the store does not have, each with the offset of the next line."""
        for at, text in self._log.lines(self._sent, end):
            line = decode(text)
            if isinstance(line, Record):
                yield at + len(text), line

    def drop(self) -> None:
        """Note that the store has what :meth:`peek` returned last."""
        at, records = self._peeked
        with self._lock:
            self._sent = at
            self.waiting -= records
            self._peeked = at, 0
        with suppress(OSError):  # otherwise it is sent again, which changes nothing
            self._note_sent()

    # ---- several logs ----------------------------------------------------------------------------------

    def adopt(self, other: EventLog) -> None:
        """Append the records of another log of the same search that the store does not have, and remove that
        log."""
        for _, record in other._unsent(other._log.end):
            if isinstance(record, LogText):
                self._adopt_text(record)
            else:
                self._write(record)
        if (point := other.newest) is not None and (self.newest is None or point.step > self.newest.step):
            self._write(point)  # sent once more, which changes nothing, for a process that adopts this log
        for run, steps in other._steps.items():
            self._write(Written(run, steps, other.device_seconds(run)))
        self.commit()
        other.remove()

    def _adopt_text(self, record: LogText) -> None:
        """Keep the text, unless this process has a newer one for the same path."""
        with suppress(FileNotFoundError):
            if not self._beside(record.path).exists():
                self.text(record.run, record.path, Path(record.file).read_text(encoding="utf-8"))

    def _beside(self, path: str) -> Path:
        """The file with the newest version of a text artifact."""
        return self.path.with_suffix(f".{Path(path).name}")

    def adopt_ended(self) -> None:
        """Adopt this run's logs whose processes have ended."""
        self.shared |= self.others()
        for log in free_logs(self.path.parent, self.head.parent_id):
            self.adopt(log)

    def others(self) -> bool:
        """Whether other processes of this host have logs of this run."""
        return any(path != self.path for path in _log_files(self.path.parent, self.head.parent_id))

    def describe_unsent(self, cause: str = "") -> str:
        """Describe what the store does not have, where it is kept and how to send it; ``cause``: why it was
        not sent."""
        return (
            f"{self.waiting} records have not been sent to {self.head.store} yet"
            f"{f' ({cause})' if cause else ''}. They are kept in {self.path}; run the same command "
            "again to send them when the store answers."
        )

    def close(self) -> None:
        """Release the log; its content is kept."""
        self._log.close()
        os.close(self._sent_file)

    def remove(self) -> None:
        """Delete and release the log, which must have nothing that the store does not have."""
        self.path.unlink(missing_ok=True)
        for beside in self.path.parent.glob(f"{self.path.stem}.*"):
            beside.unlink(missing_ok=True)
        self.close()


def logs_folder(root: Path, search: str) -> Path:
    """The folder of a search's event logs."""
    return search_folder(root, search) / "events"


def open_event_log(folder: Path, head: Head, now: Callable[[], int] = time_ms) -> EventLog:
    """A log for a search's run, beginning with the unsent records of the run's ended processes.

    Raises:
        StorageError: the folder cannot be written.
    """
    with disk_errors(folder, KEPT, "Set tracking.root to a writable folder."):
        folder.mkdir(parents=True, exist_ok=True)
        for left in free_logs(folder):
            # Logs of earlier searches of this name are not needed once they are sent.
            other = left.head.parent_id != head.parent_id
            left.remove() if other and not left.waiting else left.close()
        mine = EventLog(_free_number(folder, head), head, now)
    mine.adopt_ended()
    return mine


def _free_number(folder: Path, head: Head) -> LineLog:
    """The locked file of an ended process, or a new file."""
    for number in itertools.count():
        log = LineLog(folder / f"{head.parent_id}-{number}{SUFFIX}", BEGINS)
        if log.lock(wait=False):
            return log
        log.close()
    raise AssertionError("some number is free")


def free_logs(folder: Path, parent_id: str | None = None) -> Iterator[EventLog]:
    """Logs that no process has open; only those of one search's run, if given."""
    for path in _log_files(folder, parent_id):
        try:
            log = LineLog(path, BEGINS, make=False)
        except FileNotFoundError:
            continue
        if not log.lock(wait=False):
            log.close()
        elif log.end == 0:  # nothing was ever written to it
            path.unlink(missing_ok=True)
            path.with_suffix(".sent").unlink(missing_ok=True)
            log.close()
        else:
            yield EventLog(log, NO_HEAD)


def _log_files(folder: Path, parent_id: str | None) -> list[Path]:
    """The files of event logs, open or not; only those of one search's run, if given."""
    return sorted(folder.glob(f"{parent_id or '*'}-*{SUFFIX}"))
