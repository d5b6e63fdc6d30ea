"""The one background thread that talks to MLflow, so that training never waits for it.

Operations wait in an outbox and leave it only when the store has taken them. A store that does not answer
is tried again, later and later; what waits is kept. A store that is slow for the number of runs is written
to less often, more at a time. What the store refuses for good (a changed parameter, a run that somebody
deleted) is set aside, so that it does not hold up the rest. Both come to light as a StorageError when
somebody flushes or closes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from itertools import islice
from typing import Protocol

from plait.errors import StorageError
from plait.tracking.operations import LogPoints, Operation, Request, count_points, gather

BATCH = 16_000  # operations that are gathered into one set of requests
SHARE = 0.02  # of the time may go into sending while nobody waits for it
LONGEST_PAUSE = 30.0  # seconds, for the sake of who looks at the curves
ATTEMPTS = 4  # of one request, before flush() or close() give up
FIRST_DELAY = 0.5  # seconds before the second attempt; doubles with each
LONGEST_DELAY = 30.0


class RefusedError(Exception):
    """The store will never take this request."""


class Sender(Protocol):
    """Whatever carries requests out. Raises RefusedError for good, any other exception for now."""

    def send(self, request: Request) -> None:
        """Carry one request out."""


class Outbox(Protocol):
    """Operations that the store has not yet taken, oldest first. Called under the writer's lock."""

    def append(self, operation: Operation) -> None:
        """Add one at the end."""

    def peek(self, count: int) -> list[Operation]:
        """The oldest ones."""

    def drop(self, count: int) -> None:
        """Forget the oldest ones: the store has them."""

    def __len__(self) -> int: ...


class MemoryOutbox:
    """An outbox that lives as long as the process."""

    def __init__(self) -> None:
        self._operations: deque[Operation] = deque()

    def append(self, operation: Operation) -> None:
        """Add one at the end."""
        self._operations.append(operation)

    def peek(self, count: int) -> list[Operation]:
        """The oldest ones."""
        return list(islice(self._operations, count))

    def drop(self, count: int) -> None:
        """Forget the oldest ones."""
        for _ in range(count):
            self._operations.popleft()

    def __len__(self) -> int:
        return len(self._operations)


class Writer:
    """Sends operations in the background.

    Args:
        sender: carries requests out, in the background thread only.
        flush_seconds: time that an operation waits, so that several go out together; longer where sending
            would take more than a small share of the time.
        address: of the store, for messages.
        outbox: where operations wait.
        first_delay: seconds before a request is tried a second time.
    """

    def __init__(
        self,
        sender: Sender,
        flush_seconds: float,
        address: str,
        *,
        outbox: Outbox | None = None,
        first_delay: float = FIRST_DELAY,
    ) -> None:
        self._sender = sender
        self._flush_seconds = flush_seconds
        self._address = address
        self._outbox = MemoryOutbox() if outbox is None else outbox
        self._first_delay = first_delay
        self._condition = threading.Condition()
        self._requests: deque[Request] = deque()  # of the batch in hand, not yet taken by the store
        self._in_hand = 0  # operations of that batch
        self._round_seconds = 0.0  # that the last round of sending took
        self._flushing = 0  # callers that wait for an empty outbox
        self._closing = False
        self._failures = 0  # attempts in a row that failed
        self._error: BaseException | None = None
        self._refused: list[str] = []
        self._thread = threading.Thread(target=self._run, name="plait-tracking", daemon=True)
        self._thread.start()

    def put(self, operation: Operation) -> None:
        """Leave an operation to the writer; returns at once."""
        with self._condition:
            if self._closing:
                raise RuntimeError("the tracking writer is closed")
            self._outbox.append(operation)

    @property
    def waiting(self) -> int:
        """Operations that the store has not taken yet."""
        with self._condition:
            return len(self._outbox)

    def flush(self, patience: float | None = None) -> None:
        """Wait until the store has everything, at most ``patience`` seconds if given.

        Raises:
            StorageError: the store refused something, or did not answer to several attempts; what it has
                not taken is kept and tried again.
        """
        with self._condition:
            self._flushing += 1
            self._failures = 0
            self._condition.notify_all()
            try:
                self._condition.wait_for(lambda: not self._outbox or self._failures >= ATTEMPTS, patience)
            finally:
                self._flushing -= 1
            self._raise_trouble()

    def close(self, patience: float | None = None) -> None:
        """Send what is left and end the thread; further calls do nothing.

        With ``patience`` (seconds), or interrupted, it does not wait for a request that is under way: the
        thread ends with it, or with the process.

        Raises:
            StorageError: as :meth:`flush`; what has not been sent is still in the outbox.
        """
        if self._closing:
            return
        wait = patience is None
        try:
            self.flush(patience)
        except KeyboardInterrupt:
            wait = False
            raise
        finally:
            with self._condition:
                self._closing = True
                self._condition.notify_all()
            if wait:
                self._thread.join()

    def _raise_trouble(self) -> None:
        if self._outbox:
            left = self._outbox.peek(len(self._outbox))
            points = count_points([item for item in left if isinstance(item, LogPoints)])
            raise StorageError(
                f"{len(left)} records ({points} metric values) are not in {self._address}: {self._error}",
                "The tracking store has to answer before a run ends.",
                "Look after the store, then start the same command again: it goes on.",
            )
        if self._refused:
            refused, self._refused = self._refused, []
            raise StorageError(
                f"{len(refused)} records were refused by {self._address}; the first: {refused[0]}",
                "Runs of a search belong to Plait while it goes on.",
                "Start the search anew under the same name with search.fresh=true if its runs were changed.",
            )

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
        """Have requests in hand: those that are left, or a new batch. False where nothing waits."""
        with self._condition:
            if not self._requests:
                batch = self._outbox.peek(BATCH)
                self._requests.extend(gather(batch))
                self._in_hand = len(batch)
            return self._in_hand > 0

    def _due(self) -> bool:
        if self._closing:
            return True
        if self._failures:
            return False  # the pause before the next attempt runs its full length
        return bool(self._flushing and self._outbox)

    def _pause(self) -> float:
        if not self._failures:
            return max(self._flush_seconds, min(self._round_seconds / SHARE, LONGEST_PAUSE))
        return min(self._first_delay * 2.0 ** (self._failures - 1), LONGEST_DELAY)

    def _send_batch(self) -> bool:
        """Send the requests in hand until one fails; drop the batch when all are through."""
        while self._requests:
            try:
                self._sender.send(self._requests[0])
            except RefusedError as verdict:
                self._refused.append(str(verdict))
            except Exception as error:
                with self._condition:
                    self._error = error
                    self._failures += 1
                    self._condition.notify_all()
                return False
            self._requests.popleft()
            self._failures = 0
        with self._condition:
            self._outbox.drop(self._in_hand)
            self._in_hand = 0
            self._condition.notify_all()
        return True
