"""What the stages of a pipeline send each other: rows of bytes, in an order that both ends know beforehand.

A seam: it knows no schedule. Receives are posted ahead of their use, and sends do not wait: if they did,
two stages could wait for each other where their lists do not. A message that is sent and not yet received
belongs to a microbatch whose activations one of the two keeps, so their memory is bounded by that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from plait.distributed.exchange import Result, over_link

AHEAD = 2  # receives that are posted before they are needed
Due = tuple[str, int]  # what a message is for, and its bytes


class Links:
    """The links of one stage, over the group of all processes.

    Args:
        process: of this stage; its neighbours are the processes before and after it.
        ranks: of the stages' processes in the group of all; None: their own numbers.
    """

    def __init__(self, process: int, device: torch.device, ranks: Sequence[int] | None = None) -> None:
        self.process = process
        self._device = device
        self._ranks = ranks
        self._due: dict[int, Iterator[Due]] = {}  # what is still to be posted, by process
        self._posted: dict[int, deque[tuple[str, dist.Work, Tensor]]] = {}
        self._aside: dict[tuple[int, str], deque[Tensor]] = {}  # received before it was asked for
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._sent: dict[int, Future[None]] = {}  # the last send to each process

    def expect(self, process: int, sizes: Sequence[int], what: str = "rows") -> None:
        """Say how many bytes each of the next messages of a process has, after those said before."""
        more = ((what, size) for size in sizes)
        self._due[process] = chain(self._due.get(process, ()), more)
        while len(self._posted.setdefault(process, deque())) < AHEAD and self._post(process):
            pass

    def _post(self, process: int) -> bool:
        due = next(self._due[process], None)
        if due is None:
            return False
        what, size = due
        room = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._posted[process].append((what, _begun(lambda: dist.irecv(room, self._rank(process))), room))
        return True

    def receive(self, process: int, what: str = "rows") -> Tensor:
        """The next message of a process of this kind; others before it are kept until they are asked for.

        Raises:
            LostProcessError: it died.
        """
        if aside := self._aside.get((process, what)):
            return aside.popleft()
        while True:
            found, work, room = self._posted[process].popleft()
            _try(work.wait)
            self._post(process)
            if found == what:
                return room
            self._aside.setdefault((process, found), deque()).append(room)

    def send(self, process: int, message: Tensor) -> None:
        """Send a message, which must not change any more."""
        work = _begun(lambda: dist.isend(message, self._rank(process)))
        thread = self._threads.setdefault(process, ThreadPoolExecutor(1, "sent"))
        self._sent[process] = thread.submit(self._keep, work, message)

    def _keep(self, work: dist.Work, message: Tensor) -> None:
        """Hold a message until it is received: gloo says so only to who waits for it."""
        work.wait()
        if message.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()

    def _rank(self, process: int) -> int:
        return process if self._ranks is None else self._ranks[process]

    def finish(self) -> None:
        """Wait until all that was sent is received.

        Raises:
            LostProcessError: a process died.
        """
        for last in self._sent.values():
            _try(last.result)


def _begun(action: Callable[[], dist.Work | None]) -> dist.Work:
    """A send or a receive that has begun; there is none only outside of the group."""
    work = _try(action)
    assert work is not None
    return work


def _try(action: Callable[[], Result]) -> Result:
    rule = "The stages of a pipeline send each other hidden states and gradients directly."
    return over_link(action, "a neighbouring stage", rule)
