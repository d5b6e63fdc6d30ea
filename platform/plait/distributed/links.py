"""What the stages of a pipeline send each other: rows of bytes, in an order that both ends know beforehand.

A seam: it knows no schedule. Receives are posted ahead of their use, and sends do not wait, so that stages
only wait for what they need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.errors import LostProcessError

AHEAD = 2  # receives that are posted before they are needed
KEPT = 8  # sends to a neighbour that it may not have received yet
Result = TypeVar("Result")


class Links:
    """The links of one stage, over the group of all processes.

    Args:
        process: of this stage; its neighbours are the processes before and after it.
    """

    def __init__(self, process: int, device: torch.device) -> None:
        self.process = process
        self._device = device
        self._due: dict[int, Iterator[int]] = {}  # bytes of what is still to be posted, by process
        self._posted: dict[int, deque[tuple[dist.Work, Tensor]]] = {}
        self._sent: dict[int, deque[tuple[dist.Work, Tensor]]] = {}

    def expect(self, process: int, sizes: Sequence[int]) -> None:
        """Say how many bytes each of the next messages of a process has."""
        self._due[process] = iter(sizes)
        self._posted[process] = deque()
        for _ in range(AHEAD):
            self._post(process)

    def _post(self, process: int) -> None:
        size = next(self._due[process], None)
        if size is None:
            return
        room = torch.empty(size, dtype=torch.uint8, device=self._device)
        work = _begun(lambda: dist.irecv(room, process))
        self._posted[process].append((work, room))

    def receive(self, process: int) -> Tensor:
        """The next message of a process.

        Raises:
            LostProcessError: it died.
        """
        work, room = self._posted[process].popleft()
        _try(work.wait)
        self._post(process)
        return room

    def send(self, process: int, message: Tensor) -> None:
        """Send a message, which must not change any more.

        Raises:
            LostProcessError: the process died.
        """
        sent = self._sent.setdefault(process, deque())
        while len(sent) >= KEPT:
            _try(sent.popleft()[0].wait)
        sent.append((_begun(lambda: dist.isend(message, process)), message))

    def finish(self) -> None:
        """Wait until all that was sent is received.

        Raises:
            LostProcessError: a process died.
        """
        for sent in self._sent.values():
            while sent:
                _try(sent.popleft()[0].wait)


def _begun(action: Callable[[], dist.Work | None]) -> dist.Work:
    """A send or a receive that has begun; there is none only outside of the group."""
    work = _try(action)
    assert work is not None
    return work


def _try(action: Callable[[], Result]) -> Result:
    try:
        return action()
    except (RuntimeError, ValueError) as error:
        raise LostProcessError(
            f"the link to a neighbouring stage broke: {str(error).partition(chr(10))[0]}",
            "The stages of a pipeline send each other hidden states and gradients directly.",
            "The same command resumes the search.",
        ) from error
