"""Functions of autograd that run one after another as the steps of one of its nodes.

A node costs the host as much as several launches, forward and backward, so a decoder layer is one. The same
functions have nodes of their own where something else stands between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from plait_kernels.errors import KernelError

_recording: ContextVar[Chain | None] = ContextVar("recording", default=None)


def apply(function: Any, *arguments: Any, trains: bool = False) -> Any:
    """``function.apply``, or a step of the chain that is being recorded.

    Args:
        arguments: as the function's forward takes them; the first is what it is differentiated in.
        trains: whether its backward has more to do than that gradient.
    """
    chain = _recording.get()
    if chain is None or chain.running:
        return function.apply(*arguments)
    return chain.run(function, arguments, trains)


def recording() -> bool:
    """Whether a chain is being recorded."""
    chain = _recording.get()
    return chain is not None and not chain.running


class Step:
    """What a function of a chain is given as its context.

    Attributes:
        needs_input_grad: whether its first argument's gradient is needed.
    """

    saved_tensors: Sequence[Tensor | None] = ()
    saves = 0  # how many of the tensors that the node saved are its own

    def __init__(self, function: Any, needs: bool) -> None:
        self.function = function
        self.needs_input_grad = (needs,)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors until backward."""
        self.saved_tensors = tensors

    def maybe_clear_saved_tensors(self) -> None:
        """Let go of them before backward has ended; what reads them has them already."""
        self.saved_tensors = ()

    def mark_dirty(self, *_changed: Tensor) -> None:
        """Nothing to do: no other node has seen them."""

    def set_materialize_grads(self, _value: bool) -> None:
        """Nothing to do: a gradient that is missing is always None."""

    def back(self, *grads: Tensor | None) -> Tensor | None:
        """The gradient of its first argument; what it saved is let go."""
        found: Tensor | None = self.function.backward(self, *grads)[0]
        self.saved_tensors = ()
        return found


class Chain:
    """Steps each of which takes what the last one returned; those before the first that has a gradient are
    left out. Within the context that it is, functions that are applied are its steps.

    Args:
        start: what the first one takes.
        needs: whether its gradient is needed.

    Attributes:
        running: whether a step runs. What it calls has part in its own backward, and is no step.
    """

    running = False

    def __init__(self, start: Tensor, *, needs: bool) -> None:
        self.steps: list[Step] = []
        self.last: Tensor | None = start
        self._needs = needs

    def __enter__(self) -> Chain:
        self._before = _recording.set(self)
        return self

    def __exit__(self, *_error: object) -> None:
        _recording.reset(self._before)

    def run(self, function: Any, arguments: tuple[Any, ...], trains: bool) -> Any:
        """What the function returns."""
        second = len(arguments) > 1 and arguments[1] is self.last
        self.end(arguments[1] if second else arguments[0])
        step = Step(function, self._needs)
        self.running = True
        try:
            out = function.forward(step, *arguments)
        finally:
            self.running = False
        self._needs = self._needs or trains
        if self._needs:
            self.steps.append(step)
        self.last = out[0] if isinstance(out, tuple) else out
        return out

    def end(self, found: Tensor | None) -> None:
        """Check that the last step returned this."""
        if found is not self.last:
            raise KernelError(
                "a tensor that no step of a chain returned",
                "its steps follow each other, with nothing between them",
                "let these functions have nodes of their own",
            )

    def save(self, ctx: Any) -> None:
        """Have autograd keep what the steps saved, so that checkpointing can let go of it."""
        self.last = None  # what no step saved is not kept
        tensors: list[Tensor | None] = []
        for step in self.steps:
            tensors += step.saved_tensors
            step.saves, step.saved_tensors = len(step.saved_tensors), ()
        ctx.save_for_backward(*tensors)

    def restore(self, ctx: Any) -> None:
        """Give the steps what they saved, in backward; each lets go of it as it is done."""
        if torch.is_grad_enabled():
            raise KernelError(
                "a second derivative of a layer (create_graph=True)",
                "the adapters' gradients go to the bank, so there is no graph through them",
                "call backward without create_graph",
            )
        tensors, start = ctx.saved_tensors, 0
        ctx.maybe_clear_saved_tensors()
        for step in self.steps:
            step.saved_tensors = tensors[start : start + step.saves]
            start += step.saves
