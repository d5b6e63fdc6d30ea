"""Which requests run, and which pages of the pool each owns.

A seam: pure bookkeeping without torch, so that its rules are tested alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


class PagePool:
    """Pages of equal size, each free or owned by one request."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.owned: dict[int, tuple[int, ...]] = {}
        self._free = list(reversed(range(pages)))

    @property
    def free(self) -> tuple[int, ...]:
        """The pages that no request owns."""
        return tuple(self._free)

    def take(self, owner: int, count: int) -> bool:
        """Give a new owner ``count`` pages; False, and nothing changes, if fewer are free."""
        if owner in self.owned:
            raise ValueError(f"request {owner} has its pages already")
        if count > len(self._free):
            return False
        self.owned[owner] = tuple(self._free.pop() for _ in range(count))
        return True

    def release(self, owner: int) -> None:
        """Free an owner's pages; one without pages is ignored."""
        self._free += reversed(self.owned.pop(owner, ()))


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs of the pool.

    Attributes:
        prompt: tokens of the prompt.
        tokens: most tokens whose keys and values it stores.
    """

    request: int
    prompt: int
    tokens: int


class Scheduler:
    """Admits requests in order of arrival, each once pages for all its tokens are free.

    A request that runs therefore never waits for a page, and none is overtaken by a smaller one.

    Args:
        page_tokens: tokens of a page.
        most_prompt_tokens: prompts that begin in one iteration have at most so many tokens together, unless
            it is a single one.
        most: requests that run at once.
    """

    def __init__(self, pages: int, page_tokens: int, *, most_prompt_tokens: int, most: int) -> None:
        self.pool = PagePool(pages)
        self.running: dict[int, None] = {}  # in order of admission
        self.page_tokens = page_tokens
        self._most_prompt_tokens = most_prompt_tokens
        self._most = most
        self._queue: deque[Demand] = deque()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)

    def add(self, demand: Demand) -> None:
        """Put a request at the queue's end."""
        if self.pages_for(demand.tokens) > self.pool.pages:
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
            if not self.pool.take(head.request, self.pages_for(head.tokens)):
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
