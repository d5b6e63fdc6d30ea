"""Processes that hold a model's layers together, as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

import torch
from torch import Tensor

Result = TypeVar("Result")


class ThreadSlicing:
    """One of several threads that add up and gather tensors, as :class:`plait.models.slices.Slicing`."""

    def __init__(
        self, number: int, count: int, barrier: threading.Barrier, given: list[Tensor | None]
    ) -> None:
        self.number, self.count = number, count
        self._barrier, self._given = barrier, given

    def gather(self, tensor: Tensor) -> list[Tensor]:
        self._given[self.number] = tensor.detach().clone()
        self._barrier.wait(60)
        found = [each for each in self._given if each is not None]
        self._barrier.wait(60)
        return found

    def add(self, tensor: Tensor) -> None:
        parts = self.gather(tensor)
        tensor.copy_(torch.stack(parts).sum(dim=0))


class ThreadSharding(ThreadSlicing):
    """The same as :class:`plait.models.shards.Sharding`."""

    @classmethod
    def of(cls, own: ThreadSlicing) -> ThreadSharding:
        """One of the same threads."""
        return cls(own.number, own.count, own._barrier, own._given)

    def begin(self, whole: Tensor, own: Tensor) -> Callable[[], None]:
        parts = torch.cat(self.gather(own))
        return lambda: cast(None, whole.copy_(parts))  # which has no weights before it was waited for


def together(count: int, action: Callable[[ThreadSlicing], Result]) -> list[Result]:
    """What an action returns in each of so many threads, which run it together."""
    barrier, given = threading.Barrier(count), list[Tensor | None]([None] * count)

    def run(number: int) -> Result:
        try:
            return action(ThreadSlicing(number, count, barrier, given))
        except BaseException:
            barrier.abort()  # the others need not wait
            raise

    with ThreadPoolExecutor(count) as pool:
        begun = [pool.submit(run, number) for number in range(count)]
        errors = [each.exception() for each in begun]
        first = next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError | type(None))), None
        )
        if first is not None:
            raise first
        return [each.result() for each in begun]
