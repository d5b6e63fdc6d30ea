"""The engine on a thread of its own, and requests whose updates are awaited.

A seam: the server knows nothing of threads, the engine nothing of asyncio.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from plait.core.errors import InputError
from plait.serve.engine import Engine
from plait.serve.metrics import Counts
from plait.serve.requests import Request, Update

REMEMBERED = 0.98  # of the pace, an iteration later
ENOUGH = 4.0  # requests that have left the queue, before the pace says something
STOPPING = "The server is stopping."
DIED = "The engine has failed, and the server ends; its log says why."


class BusyError(Exception):
    """A request is not answered now, though it is right: the text says why.

    Attributes:
        seconds: after which it may be worth asking again.
    """

    def __init__(self, why: str, seconds: float = 1.0) -> None:
        super().__init__(why)
        self.seconds = seconds


class Pace:
    """How fast the queue moves, by what left it in recent iterations that began with one."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._left = 0.0

    def note(self, seconds: float, left: int) -> None:
        """An iteration of so many seconds, in which so many requests left the queue."""
        self._seconds = REMEMBERED * self._seconds + seconds
        self._left = REMEMBERED * self._left + left

    def wait(self, ahead: int) -> float:
        """Seconds until a request with so many ahead of it has left the queue, too; 0 while too few have left
        to tell."""
        return (ahead + 1) * self._seconds / self._left if self._left >= ENOUGH else 0.0


@dataclass(slots=True, eq=False)
class _Ticket:
    """One request on its way: where its updates go, and whether they are still wanted."""

    request: Request
    deliver: Callable[[Update | Exception], None]
    cancelled: bool = False
    answered: bool = False
    arrived: float = field(default_factory=time.monotonic)


class Driver:
    """Runs an engine's iterations while there are requests.

    Args:
        most_waiting: requests that may wait for room; more are refused, and one client may ask for no more.
        most_seconds: that one may wait for; then it is refused, and at once if it would wait for longer.

    Attributes:
        error: what ended the engine's thread before it was stopped; no request is answered after it.
    """

    def __init__(self, engine: Engine, *, most_waiting: int, most_seconds: float = float("inf")) -> None:
        self.engine = engine
        self.counts = Counts()
        self._most_waiting = most_waiting
        self._most_seconds = most_seconds
        self._pace = Pace()
        self._changed = threading.Condition()
        self._new: list[_Ticket] = []
        self._active: dict[int, _Ticket] = {}
        self._stopping = False
        self.error: BaseException | None = None
        self._watchers: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def stream(self, *requests: Request) -> AsyncGenerator[tuple[int, Update]]:
        """The updates of requests, each with the place of its request, until all have ended. Closing the
        iterator earlier frees their pages.

        Raises:
            BusyError: the queue is full, one has waited or would wait for too long, or the server ends.
            InputError: they are more than may wait.
            PlaitError: one cannot run.
        """
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()

        def deliver(place: int, item: Update | Exception) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(updates.put_nowait, (place, item))

        tickets = [_Ticket(request, partial(deliver, place)) for place, request in enumerate(requests)]
        self._post(tickets)
        going = len(tickets)
        try:
            while going:
                place, item = await updates.get()
                if isinstance(item, Exception):
                    raise item
                yield place, item
                going -= item.ended is not None
        finally:
            for ticket in tickets:
                ticket.cancelled = True

    @property
    def ends(self) -> str:
        """Why no request is answered any more; "" while they are."""
        if not self._stopping:
            return ""
        return STOPPING if self.error is None else DIED

    def watch(self, died: Callable[[], None]) -> None:
        """Have ``died`` called once the engine's thread has ended with an error, on whatever thread."""
        with self._changed:
            if self.error is None:
                self._watchers.append(died)
                return
        died()

    def stop(self) -> None:
        """End all requests, and the thread after its iteration."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _post(self, tickets: Sequence[_Ticket]) -> None:
        """Queue requests of one client, all or none."""
        own, most = len(tickets), self._most_waiting
        if own > most:
            raise InputError(
                f"{own} answers",
                f"At most {most} answers may wait.",
                "Ask for fewer, or start the server with `plait serve --queue N`.",
            )
        with self._changed:
            waiting = len(self._new) + self.engine.scheduler.waiting
            late = self._pace.wait(waiting + own - 1) - self._most_seconds if waiting else 0.0
            if self._stopping:
                refused = self.ends
            elif waiting + own > most:
                refused = f"{waiting} requests wait already; with {own} more they would be more than {most}."
            elif late > 0:
                refused = f"It would wait for more than {self._most_seconds:g} s."
            else:
                self._new += tickets
                self._changed.notify()
                return
        for _ in tickets:
            self.counts.end("refused")
        raise BusyError(refused, max(1.0, late))

    def _run(self) -> None:
        failed: BaseException | None = None
        try:
            while not self._stopping:
                self._iterate()
        except BaseException as error:  # also SystemExit, of which threading says nothing
            failed = error
        with self._changed:  # no request waits for a thread that has ended
            self._stopping, self.error = True, failed
            left, watchers = [*self._new, *self._active.values()], self._watchers
        for ticket in left:
            ticket.deliver(BusyError(self.ends))
        for died in watchers if failed is not None else ():
            died()

    def _iterate(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._active or self._stopping)
            if self._stopping:
                return
            new = len(self._new)
        self._leave()  # before the new ones are added: where there is room, none of them waits
        for _ in range(new):
            self._add(self._new[0])
            self._new.pop(0)  # only now, since the thread may end while it is added
        self._step()

    def _leave(self) -> None:
        """Cancel requests whose clients have left, and those that have waited for too long."""
        late = time.monotonic() - self._most_seconds
        running = set(self.engine.running)
        for number, ticket in list(self._active.items()):
            refused = ticket.arrived < late and number not in running
            if ticket.cancelled or refused:
                self.engine.cancel(number)
                del self._active[number]
                self.counts.end("refused" if refused else "cancelled")
                ticket.deliver(BusyError(f"It has waited for more than {self._most_seconds:g} s."))

    def _add(self, ticket: _Ticket) -> None:
        if ticket.cancelled:
            return
        try:
            self._active[self.engine.add(ticket.request)] = ticket
            self.counts.prompt_tokens += len(ticket.request.tokens)
        except Exception as error:  # the thread must live, whatever an adapter's folder or a request holds
            self.counts.end("failed")
            ticket.deliver(error)

    def _step(self) -> None:
        """One iteration; if it fails, as when memory runs out, all requests in the engine end with it.

        Raises:
            torch.AcceleratorError: the device has failed, after which no iteration succeeds in this process.
        """
        waiting, began = self.engine.scheduler.waiting, time.monotonic()
        try:
            updates = self.engine.step()
        except torch.AcceleratorError:
            raise
        except Exception as error:  # the thread must live: later requests may succeed
            for number, ticket in self._active.items():
                self.engine.cancel(number)
                self.counts.end("failed")
                ticket.deliver(error)
            self._active = {}
            return
        if waiting:
            self._pace.note(time.monotonic() - began, waiting - self.engine.scheduler.waiting)
        for update in updates:
            ticket = self._active[update.request]
            self._count(ticket, update)
            ticket.deliver(update.error or update)
            if update.ended is not None or update.error is not None:
                del self._active[update.request]

    def _count(self, ticket: _Ticket, update: Update) -> None:
        counts = self.counts
        if not ticket.answered and update.error is None:
            ticket.answered = True
            counts.first_tokens += 1
            counts.first_token_seconds += time.monotonic() - ticket.arrived
        if update.error is not None:
            counts.end("failed")
        elif update.ended is not None:
            counts.end(update.ended.reason)
            counts.new_tokens += len(update.ended.tokens)
