"""The background thread that sends records to MLflow, so that training never waits for it.

Records wait in the event log until the store has them. If the store does not answer, the writer tries again
after longer and longer pauses. If the store is slow for the number of runs, the writer sends more records
less often. Records that the store rejects permanently (a changed parameter, a deleted run) are set aside, so
that they do not block the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from plait.core.errors import StorageError
from plait.tracking.event_log import EventLog
from plait.tracking.records import LogFolder, LogPoints, LogText, OpenRun, Record, SetStatus, SetTags, UseData
from plait.utils.addresses import first_line, redact

BATCH = 16_000  # records that are combined into one set of requests
SHARE = 0.02  # share of the time that may be spent on sending while nothing waits for it
LONGEST_PAUSE = 30.0  # seconds, so that curves stay up to date for the user
AWAY_ATTEMPTS = 3  # failed attempts in a row, after which the store counts as unavailable
ATTEMPTS = 4  # attempts of one request, after which flush() and close() give up
STALL_SECONDS = 60.0  # seconds without progress, after which they also give up, because the store hangs
GRACE_SECONDS = 1.0  # time for a running request to return when its writer is closed
FIRST_DELAY = 0.5  # seconds before the second attempt; doubles with each
LONGEST_DELAY = 30.0


class RefusedError(Exception):
    """The store will never accept this request."""


@dataclass(frozen=True, slots=True)
class UpdateRun:
    """Points and tags of one run that go out together; the points in order, each tag once."""

    run: str
    points: tuple[LogPoints, ...]
    tags: dict[str, str]


Request = OpenRun | UseData | UpdateRun | LogText | LogFolder | SetStatus


class Writer:
    """Sends records in the background.

    Args:
        send: carries out one request; raises RefusedError if the store will never take it, and any other
            error if it does not answer, or not now.
        flush_seconds: time that a record waits, so that several are sent together; longer if sending would
            take more than a small share of the time.
        between: called in the thread after each round of sending; its errors are ignored.

    Attributes:
        away: why the store counts as unavailable, from the failed attempts; empty if it answers.
        error: the last error of an attempt.
        cpu_seconds: CPU seconds of the thread so far.
    """

    def __init__(
        self,
        send: Callable[[Request], None],
        log: EventLog,
        flush_seconds: float,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._send = send
        self._log = log
        self._flush_seconds = flush_seconds
        self._between = between
        self._condition = threading.Condition()
        self._requests: deque[Request] = deque()  # of the current batch, not yet accepted by the store
        self._in_hand = False
        self._round_seconds = 0.0  # seconds of the last round of sending
        self._flushing = 0  # number of callers that wait for all records to be sent
        self._closing = False
        self._failures = 0  # failed attempts in a row
        self._progress = time.monotonic()  # time of the last successful request
        self._refused: list[str] = []
        self.cpu_seconds = 0.0
        self.error: BaseException | None = None
        self.away = ""
        self._thread = threading.Thread(target=self._run, name="plait-tracking", daemon=True)
        self._thread.start()

    def flush(self, patience: float | None = None) -> bool:
        """Wait until the store has everything, at most ``patience`` seconds if given; return whether it has.

        It gives up after several failed attempts, or after a time without progress. What the store has not
        accepted stays in the log and is tried again.
        """
        until = None if patience is None else time.monotonic() + patience
        with self._condition:
            self._flushing += 1
            self._failures = 0
            self._progress = time.monotonic()
            self._condition.notify_all()
            try:
                while self._log.waiting and self._failures < ATTEMPTS:
                    limit = self._progress + STALL_SECONDS
                    limit = limit if until is None else min(limit, until)
                    if (left := limit - time.monotonic()) <= 0:
                        break
                    self._condition.wait(left)
            finally:
                self._flushing -= 1
        return not self._log.waiting

    def close(self, patience: float | None = None) -> bool:
        """Send what is left, as :meth:`flush` does, and end the thread; return whether it has ended.

        If the store did not accept everything, or an interrupt ends the waiting, a running request is not
        waited for: the thread ends with it, or with the process.
        """
        try:
            if not self._closing:
                self.flush(patience)
        finally:
            with self._condition:
                self._closing = True
                self._condition.notify_all()
        self._thread.join(GRACE_SECONDS)
        return not self._thread.is_alive()

    def troubles(self) -> list[str]:
        """What the store did not accept, in words: what waits now, and what was refused since the last
        call."""
        refused, self._refused = self._refused, []
        waiting = [self._log.describe_unsent(first_line(self.error))] if self._log.waiting else []
        return waiting + describe_refused(refused)

    # ---- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(self._due, self._pause())
                if self._closing:
                    return
            started = time.monotonic()
            while self._take_batch() and self._send_batch():
                pass
            self._round_seconds = time.monotonic() - started
            if not self._failures and not self._closing:
                with suppress(Exception):
                    self._between()

    def _take_batch(self) -> bool:
        """Make sure there are requests to send: remaining ones, or a new batch. False if nothing waits, or
        the waiting records are not on the disk."""
        if self._closing:
            return False
        if self._in_hand:
            return True
        try:
            batch = self._log.peek(BATCH)
        except (StorageError, OSError, ValueError) as error:  # the appending thread sees it, too
            self._failed(error)
            return False
        self._requests.extend(gather(batch))
        self._in_hand = bool(batch)
        return self._in_hand

    def _due(self) -> bool:
        if self._closing:
            return True
        if self._failures:
            return False  # the pause before the next attempt runs its full length
        return bool(self._flushing and self._log.waiting)

    def _pause(self) -> float:
        if not self._failures:
            return max(self._flush_seconds, min(self._round_seconds / SHARE, LONGEST_PAUSE))
        return min(FIRST_DELAY * 2.0 ** (self._failures - 1), LONGEST_DELAY)

    def _send_batch(self) -> bool:
        """Send the current requests until one fails; drop the batch when all have succeeded."""
        while self._requests:
            if self._closing:
                return False
            try:
                self._send(self._requests[0])
            except RefusedError as refusal:
                self._refused.append(redact(str(refusal)))
            except Exception as error:
                self._failed(error)
                return False
            self._requests.popleft()
            with self._condition:
                self.away = ""
                self._failures = 0
                self._progress = time.monotonic()
        self._log.drop()
        self._in_hand = False
        self.cpu_seconds = time.thread_time()
        with self._condition:
            self._condition.notify_all()
        return True

    def _failed(self, error: Exception) -> None:
        with self._condition:
            self.error = error
            self._failures += 1
            if self._failures >= AWAY_ATTEMPTS:
                self.away = first_line(error) or type(error).__name__
            self._condition.notify_all()


@dataclass(slots=True)
class _Gathered:
    """The requests for one run, from one OpenRun to the next."""

    run: str
    opened: OpenRun | None = None
    points: list[LogPoints] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    data: dict[str, UseData] = field(default_factory=dict)
    folders: dict[str, LogFolder] = field(default_factory=dict)
    status: SetStatus | None = None

    def take(self, item: Record) -> None:
        match item:
            case OpenRun():
                self.opened = item
            case UseData():
                self.data[item.digest] = item
            case LogPoints():
                self.points.append(item)
            case SetTags():
                self.tags.update(item.tags)
            case LogFolder():
                self.folders[item.path] = item
            case SetStatus():
                self.status = item

    def requests(self) -> Iterator[Request]:
        if self.opened is not None:
            yield self.opened
        yield from self.data.values()
        if self.points or self.tags:
            yield UpdateRun(self.run, tuple(self.points), self.tags)
        yield from self.folders.values()
        if self.status is not None:
            yield self.status


def gather(records: Iterable[Record]) -> list[Request]:
    """Combine records into few requests with the same result for every run.

    Points and tags of one run are joined, even if records of other runs are in between; of several values of
    a tag, texts for a path or statuses, only the last is sent. Texts come last, so that the runs they refer
    to exist.
    """
    gathered: list[_Gathered] = []
    newest: dict[str, _Gathered] = {}
    texts: dict[tuple[str, str], LogText] = {}
    for item in records:
        if isinstance(item, LogText):
            texts.pop((item.run, item.path), None)
            texts[item.run, item.path] = item
            continue
        if item.run not in newest or isinstance(item, OpenRun):
            newest[item.run] = _Gathered(item.run)
            gathered.append(newest[item.run])
        newest[item.run].take(item)
    return [request for one in gathered for request in one.requests()] + list(texts.values())


def describe_refused(refused: Sequence[str]) -> list[str]:
    """What the store refused permanently, in one line; empty if it refused nothing."""
    return [f"{len(refused)} records were refused; the first: {refused[0]}"] if refused else []
