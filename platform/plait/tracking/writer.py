"""The one background thread that talks to MLflow, so that training never waits for it.

Operations wait in an outbox and leave it only when the store has taken them. A store that does not answer
is tried again, later and later; what waits is kept. A store that is slow for the number of runs is written
to less often, more at a time. What the store refuses for good (a changed parameter, a run that somebody
deleted) is set aside, so that it does not hold up the rest.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

from plait.core.errors import StorageError
from plait.tracking.operations import Operation, Request, gather

BATCH = 16_000  # operations that are gathered into one set of requests
SHARE = 0.02  # of the time may go into sending while nobody waits for it
LONGEST_PAUSE = 30.0  # seconds, for the sake of who looks at the curves
AWAY_ATTEMPTS = 3  # that failed in a row, before the store counts as away
ATTEMPTS = 4  # of one request, before flush() or close() give up
STALL_SECONDS = 60.0  # without any progress, after which they give up too: a store that hangs
GRACE_SECONDS = 1.0  # that a request under way has to come back when its writer is closed
FIRST_DELAY = 0.5  # seconds before the second attempt; doubles with each
LONGEST_DELAY = 30.0


class RefusedError(Exception):
    """The store will never take this request."""


class Sender(Protocol):
    """Whatever carries requests out. Raises RefusedError for good, any other exception for now."""

    def send(self, request: Request) -> None:
        """Carry one request out."""


class Outbox(Protocol):
    """Operations that the store has not yet taken, oldest first. The writer's thread reads them while others
    append."""

    def append(self, operation: Operation) -> None:
        """Add one at the end."""

    def peek(self, count: int) -> list[Operation]:
        """The oldest ones."""

    def drop(self) -> None:
        """Forget those that were read last: the store has them."""

    @property
    def waiting(self) -> int:
        """How many there are."""


class Writer:
    """Sends operations in the background.

    Args:
        sender: carries requests out, in the background thread only.
        outbox: where operations wait.
        flush_seconds: time that an operation waits, so that several go out together; longer where sending
            would take more than a small share of the time.
        first_delay: seconds before a request is tried a second time.
        stall: seconds without any progress after which flush() gives up.
    """

    def __init__(
        self,
        sender: Sender,
        outbox: Outbox,
        flush_seconds: float,
        *,
        first_delay: float = FIRST_DELAY,
        stall: float = STALL_SECONDS,
    ) -> None:
        self._sender = sender
        self._outbox = outbox
        self._flush_seconds = flush_seconds
        self._first_delay = first_delay
        self._stall = stall
        self._condition = threading.Condition()
        self._requests: deque[Request] = deque()  # of the batch in hand, not yet taken by the store
        self._in_hand = False
        self._round_seconds = 0.0  # that the last round of sending took
        self._flushing = 0  # callers that wait for an empty outbox
        self._closing = False
        self._failures = 0  # attempts in a row that failed
        self._progress = time.monotonic()  # when a request last came through
        self.cpu_seconds = 0.0  # of the thread, so far
        self.error: BaseException | None = None  # the store's last answer that was none
        self.away = ""  # why the store counts as away, from the attempts that failed; empty: it answers
        self._refused: list[str] = []
        self._thread = threading.Thread(target=self._run, name="plait-tracking", daemon=True)
        self._thread.start()

    def put(self, operation: Operation) -> None:
        """Leave an operation to the writer; returns at once. Raises what the outbox raises."""
        if self._closing:
            raise RuntimeError("the tracking writer is closed")
        self._outbox.append(operation)

    def flush(self, patience: float | None = None) -> bool:
        """Wait until the store has everything, at most ``patience`` seconds if given; whether it has.

        It gives up after several attempts that failed, or a time without progress. What the store has not
        taken stays in the outbox and is tried again.
        """
        until = None if patience is None else time.monotonic() + patience
        with self._condition:
            self._flushing += 1
            self._failures = 0
            self._progress = time.monotonic()
            self._condition.notify_all()
            try:
                while self._outbox.waiting and self._failures < ATTEMPTS:
                    limit = self._progress + self._stall
                    limit = limit if until is None else min(limit, until)
                    if (left := limit - time.monotonic()) <= 0:
                        break
                    self._condition.wait(left)
            finally:
                self._flushing -= 1
        return not self._outbox.waiting

    def close(self, patience: float | None = None) -> bool:
        """Send what is left, as :meth:`flush`, and end the thread; whether it has ended by now.

        Where the store did not take everything, or an interrupt ends the waiting, the request that is under
        way is not waited for: the thread ends with it, or with the process.
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

    def take_refused(self) -> list[str]:
        """What the store has refused for good since this was last asked, in words."""
        refused, self._refused = self._refused, []
        return refused

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

    def _take_batch(self) -> bool:
        """Have requests in hand: those that are left, or a new batch. False where nothing waits, or the disk
        does not hold what waits."""
        if self._closing:
            return False
        if self._in_hand:
            return True
        try:
            batch = self._outbox.peek(BATCH)
        except (StorageError, OSError, ValueError) as error:  # whoever appends is told, too
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
        return bool(self._flushing and self._outbox.waiting)

    def _pause(self) -> float:
        if not self._failures:
            return max(self._flush_seconds, min(self._round_seconds / SHARE, LONGEST_PAUSE))
        return min(self._first_delay * 2.0 ** (self._failures - 1), LONGEST_DELAY)

    def _send_batch(self) -> bool:
        """Send the requests in hand until one fails; drop the batch when all are through."""
        while self._requests:
            if self._closing:
                return False
            try:
                self._sender.send(self._requests[0])
            except RefusedError as verdict:
                self._refused.append(str(verdict))
            except Exception as error:
                self._failed(error)
                return False
            self._requests.popleft()
            with self._condition:
                self.away = ""
                self._failures = 0
                self._progress = time.monotonic()
        self._outbox.drop()
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


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return next(iter(str(error).strip().splitlines()), "")
