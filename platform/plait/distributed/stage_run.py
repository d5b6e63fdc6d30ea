"""Carries out one stage's lists of instructions over its links.

A seam: it knows no model, so that the same loop runs a real stage, a toy one and one that only takes time. It
waits for messages and for nothing else. What one list leaves in flight, the next one continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from plait.core.plans import Microbatch
from plait.planner.instructions import NONE, Instruction, Key, Kind, Lists

NUMBER = 8  # bytes of a float64


class Neighbours(Protocol):
    """The links to the stages before and after, as :class:`~plait.distributed.links.Links`."""

    def expect(self, process: int, sizes: Sequence[int]) -> None:
        """Say how many bytes each of the next messages of a stage has."""

    def receive(self, process: int) -> Tensor:
        """The next message of a stage."""

    def send(self, process: int, message: Tensor) -> None:
        """Send a message."""


class Stage(Protocol):
    """What a stage computes. It keeps of a microbatch what its backward needs.

    Attributes:
        messages: the form of what it sends and receives.
    """

    messages: Messages

    def received(self) -> None:
        """A message is there: until now the stage waited."""

    def sent(self) -> None:
        """A message is on its way: until now the stage made it and gave it away."""

    def forward(self, number: int, microbatch: Microbatch, entering: Tensor | None) -> Tensor | None:
        """The hidden states for the next stage, None on the last, from those of the stage before."""

    def backward(self, number: int, microbatch: Microbatch, gradient: Tensor | None) -> Tensor | None:
        """The gradient for the stage before, None on the first, from that of the next stage."""

    def squares(self, key: Key) -> float:
        """The sum of squares of a job's gradient here; not a number if no stage may step it."""

    def step(self, keys: Sequence[Key], norms: Sequence[float]) -> None:
        """Step these jobs by the norms over all stages."""


class Messages:
    """The form of messages: numbers in float64, then rows of hidden states or their gradients.

    Args:
        width: numbers of a row.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._width, self._dtype, self._device = width, dtype, device

    def bytes(self, microbatch: Microbatch | None, numbers: int = 0) -> int:
        """Size of a message with the rows of a microbatch."""
        tokens = 0 if microbatch is None else microbatch.tokens
        return NUMBER * numbers + tokens * self._width * self._dtype.itemsize

    def pack(self, rows: Tensor | None, numbers: Sequence[float] = ()) -> Tensor:
        """A message."""
        head = torch.tensor(numbers, dtype=torch.float64, device=self._device).view(torch.uint8)
        if rows is None:
            return head
        return torch.cat([head, rows.detach().contiguous().view(torch.uint8).flatten()])

    def unpack(self, message: Tensor, numbers: int = 0) -> tuple[list[float], Tensor]:
        """Numbers and rows of a message."""
        head, body = message[: NUMBER * numbers], message[NUMBER * numbers :]
        return head.view(torch.float64).tolist(), body.view(self._dtype).view(-1, self._width)


class StageRun:
    """One stage while lists are carried out.

    Args:
        number: of the stage; its neighbours have the numbers before and after it.
    """

    def __init__(self, stage: Stage, links: Neighbours, number: int) -> None:
        self._stage = stage
        self._links = links
        self._number, self._last = number, False
        self._microbatches: dict[int, Microbatch] = {}
        self._hidden: dict[int, Tensor] = {}  # received, not yet used
        self._gradients: dict[int, Tensor] = {}
        self._leaving: dict[int, Tensor] = {}  # not yet sent: hidden states, then gradients
        self._sums: dict[Key, float] = {}  # of squares on the way up, totals on the way down
        self._actions: Mapping[Kind, Callable[[Instruction], None]] = {
            "receive_hidden": self._receive_hidden,
            "receive_gradient": self._receive_gradient,
            "forward": self._forward,
            "backward": self._backward,
            "send_hidden": self._send_hidden,
            "send_gradient": self._send_gradient,
            "step": self._step,
        }

    def run(self, lists: Lists, microbatches: Mapping[int, Microbatch]) -> None:
        """Carry out this stage's list of a window, with the window's microbatches by number."""
        self.prepare(lists, microbatches)
        for each in lists[self._number]:
            self.do(each)

    def prepare(self, lists: Lists, microbatches: Mapping[int, Microbatch]) -> None:
        """Expect what the neighbours send by their lists."""
        self._last = self._number == len(lists) - 1
        self._microbatches |= {number: each for number, each in microbatches.items() if each.segments}
        for place, kind in ((self._number - 1, "send_hidden"), (self._number + 1, "send_gradient")):
            if 0 <= place < len(lists):
                sizes = [self._bytes(each) for each in lists[place] if each.kind == kind]
                self._links.expect(place, sizes)

    def do(self, each: Instruction) -> None:
        """Carry out one instruction."""
        self._actions[each.kind](each)

    def _bytes(self, each: Instruction) -> int:
        microbatch = None if each.microbatch == NONE else self._microbatches[each.microbatch]
        return self._stage.messages.bytes(microbatch, len(each.keys))

    def _receive(self, each: Instruction, place: int) -> Tensor:
        numbers, rows = self._stage.messages.unpack(self._links.receive(place), len(each.keys))
        self._stage.received()
        self._sums |= dict(zip(each.keys, numbers, strict=True))
        return rows

    def _receive_hidden(self, each: Instruction) -> None:
        rows = self._receive(each, self._number - 1)
        if each.microbatch != NONE:
            self._hidden[each.microbatch] = rows

    def _receive_gradient(self, each: Instruction) -> None:
        self._gradients[each.microbatch] = self._receive(each, self._number + 1)

    def _forward(self, each: Instruction) -> None:
        entering = self._hidden.pop(each.microbatch, None)
        microbatch = self._microbatches[each.microbatch]
        self._keep(each, self._stage.forward(each.microbatch, microbatch, entering))

    def _backward(self, each: Instruction) -> None:
        gradient = self._gradients.pop(each.microbatch, None)
        microbatch = self._microbatches.pop(each.microbatch)
        self._keep(each, self._stage.backward(each.microbatch, microbatch, gradient))

    def _keep(self, each: Instruction, leaving: Tensor | None) -> None:
        if leaving is not None:
            self._leaving[each.microbatch] = leaving

    def _send_hidden(self, each: Instruction) -> None:
        totals = [self._sums.pop(key) for key in each.keys]
        rows = None if each.microbatch == NONE else self._leaving.pop(each.microbatch)
        self._links.send(self._number + 1, self._stage.messages.pack(rows, totals))
        self._stage.sent()

    def _send_gradient(self, each: Instruction) -> None:
        sums = [self._stage.squares(key) + self._sums.pop(key, 0.0) for key in each.keys]
        gradient = self._leaving.pop(each.microbatch)
        self._links.send(self._number - 1, self._stage.messages.pack(gradient, sums))
        self._stage.sent()

    def _step(self, each: Instruction) -> None:
        if self._number == 0:
            for key in each.keys:
                self._sums[key] = self._stage.squares(key) + self._sums.get(key, 0.0)
        self._stage.step(each.keys, [math.sqrt(self._sums[key]) for key in each.keys])
        if self._last:
            for key in each.keys:
                del self._sums[key]
