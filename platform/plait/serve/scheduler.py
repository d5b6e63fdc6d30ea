"""Which requests run, and which pages of the pool each owns or shares.

A seam: pure bookkeeping without torch, so that its rules are tested alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

Key = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Need:
    """What a request shares with others: an adapter, or the beginning of its prompt."""

    key: Key
    pages: int


@dataclass(slots=True)
class Shared:
    """Pages that requests share; they stay when the last of them has ended, until their room is needed.

    Attributes:
        users: requests that run and need it.
        value: what the pages hold, as the engine knows it; None until they are filled.
    """

    pages: tuple[int, ...]
    users: int = 0
    value: Any = None


def page_runs(runs: Iterable[range]) -> list[range]:
    """The same pages in their order, those that follow each other in one run."""
    found: list[range] = []
    for run in runs:
        if found and found[-1].stop == run.start:
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return found


class FreePages:
    """Free pages. Who takes some gets pages that follow each other, as far as there are any: memory is read
    faster in long pieces."""

    def __init__(self, pages: int) -> None:
        self._runs = [range(pages)]  # in order, none touching the next
        self._count = pages

    def __len__(self) -> int:
        """How many there are."""
        return self._count

    def __iter__(self) -> Iterator[int]:
        """All of them, in order."""
        return chain.from_iterable(self._runs)

    def take(self, count: int) -> tuple[int, ...]:
        """Take pages of the shortest run that has room for all, else of the longest ones."""
        taken: list[int] = []
        while left := count - len(taken):
            fitting = [run for run in self._runs if len(run) >= left]
            run = min(fitting, key=len) if fitting else max(self._runs, key=len)
            place, rest = self._runs.index(run), run[left:]
            self._runs[place : place + 1] = [rest] if rest else []
            taken += run[:left]
        self._count -= count
        return tuple(taken)

    def give(self, pages: Sequence[int]) -> None:
        """Take pages back."""
        given = page_runs(range(page, page + 1) for page in pages)
        self._runs = page_runs(sorted([*self._runs, *given], key=lambda run: run.start))
        self._count += len(pages)


class PagePool:
    """Pages of equal size, each free, owned by one request, or shared."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.owned: dict[int, tuple[int, ...]] = {}
        self.shared: dict[Key, Shared] = {}  # least recently needed first
        self._needs: dict[int, tuple[Key, ...]] = {}
        self._free = FreePages(pages)

    @property
    def unused(self) -> int:
        """Pages that are free, or become so when they are needed."""
        every = tuple(self.shared.values())  # a copy: metrics are read while the engine's thread changes it
        return len(self._free) + sum(len(each.pages) for each in every if not each.users)

    def take(self, owner: int, count: int, needs: Sequence[Need] = ()) -> bool:
        """Give a new owner ``count`` pages of its own and what it shares; False, and nothing changes, if they
        do not fit. What no request uses makes room, the least recently needed first."""
        keys = {need.key for need in needs}
        wanted = count + sum(need.pages for need in needs if need.key not in self.shared)
        idle = [key for key, each in self.shared.items() if not each.users and key not in keys]
        if wanted > len(self._free) + sum(len(self.shared[key].pages) for key in idle):
            return False
        for key in idle:
            if wanted <= len(self._free):
                break
            self._drop(key)
        for need in needs:
            entry = self.shared.pop(need.key, None) or Shared(self._free.take(need.pages))
            entry.users += 1
            self.shared[need.key] = entry
        self.owned[owner] = self._free.take(count)
        self._needs[owner] = tuple(need.key for need in needs)
        return True

    def release(self, owner: int) -> None:
        """Free an owner's pages. What it shared stays if it is filled."""
        self._free.give(self.owned.pop(owner))
        for key in self._needs.pop(owner):
            entry = self.shared[key]
            entry.users -= 1
            if not entry.users and entry.value is None:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        self._free.give(self.shared.pop(key).pages)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs of the pool.

    Attributes:
        prompt: tokens of the prompt.
        pages: of its own.
        needs: what it shares.
    """

    request: int
    prompt: int
    pages: int
    needs: tuple[Need, ...] = ()

    @property
    def most(self) -> int:
        """Pages that it needs if nothing that it shares is there."""
        return self.pages + sum(need.pages for need in self.needs)


class Scheduler:
    """Admits requests in order of arrival, each once there is room for all that it can need.

    A request that runs therefore never waits for a page, and none is overtaken by a smaller one.

    Args:
        most_prompt_tokens: prompts that begin in one iteration have at most so many tokens together, unless
            it is a single one.
        most: requests that run at once.
    """

    def __init__(self, pages: int, *, most_prompt_tokens: int, most: int) -> None:
        self.pool = PagePool(pages)
        self.running: dict[int, None] = {}  # in order of admission
        self._most_prompt_tokens = most_prompt_tokens
        self._most = most
        self._queue: deque[Demand] = deque()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def ahead(self, count: int) -> list[Demand]:
        """The first ones of the queue."""
        return list(islice(self._queue, count))

    def add(self, demand: Demand) -> None:
        """Put a request at the queue's end."""
        if demand.most > self.pool.pages:
            raise ValueError(f"{demand} never fits into {self.pool.pages} pages")
        self._queue.append(demand)

    def admit(self) -> tuple[int, ...]:
        """Take requests from the queue's head while they fit; they run until they are removed."""
        admitted: list[int] = []
        prompts = 0
        while self._queue and len(self.running) < self._most:
            head = self._queue[0]
            if admitted and prompts + head.prompt > self._most_prompt_tokens:
                break
            if not self.pool.take(head.request, head.pages, head.needs):
                break
            self._queue.popleft()
            self.running[head.request] = None
            admitted.append(head.request)
            prompts += head.prompt
        return tuple(admitted)

    def remove(self, request: int) -> None:
        """Forget a request, waiting or running, and free its pages."""
        if request in self.running:
            del self.running[request]
            self.pool.release(request)
        else:
            self._queue = deque(each for each in self._queue if each.request != request)
