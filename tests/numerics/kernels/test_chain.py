"""Chains of functions: gradients of their own nodes, what they keep and when they let it go."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from plait_kernels import KernelError, frozen_linear
from plait_kernels.chain import Chain, apply


class Cube(torch.autograd.Function):
    """x³; what it saves is no input and no output."""

    kept: ClassVar[list[Callable[[], Tensor | None]]] = []
    made: ClassVar[list[Callable[[], Tensor | None]]] = []
    alive: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, _power: int) -> Tensor:
        square = x * x
        Cube.kept.append(weakref.ref(square))
        ctx.save_for_backward(square, None)
        out = square * x
        Cube.made.append(weakref.ref(out))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        square, nothing = ctx.saved_tensors
        assert nothing is None
        Cube.alive.append(sum(each() is not None for each in Cube.kept))
        return (3 * square * grad if ctx.needs_input_grad[0] else None), None


class Chained(torch.autograd.Function):
    """Several cubes as one node; the one at ``trained`` has more to do in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor | None, trained: int) -> Tensor:
        with Chain(x, needs=ctx.needs_input_grad[0]) as chain:
            out = x
            for index in range(3):
                out = apply(Cube, out, 3, trains=index == trained)
        chain.end(out)
        chain.save(ctx)
        ctx.chain = chain
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        ctx.chain.restore(ctx)
        found: Tensor | None = grad
        for step in reversed(ctx.chain.steps):
            found = step.back(found)
        return found, None, None


@pytest.fixture(autouse=True)
def forget() -> None:
    Cube.kept, Cube.made, Cube.alive = [], [], []


def start() -> Tensor:
    return torch.tensor([0.5, -1.5, 1.25], dtype=torch.float64, requires_grad=True)


def test_the_gradient_is_that_of_nodes_of_their_own() -> None:
    x, other = start(), start()
    Chained.apply(x, None, -1).sum().backward()
    out = other
    for _ in range(3):
        out = apply(Cube, out, 3)
    out.sum().backward()
    assert x.grad is not None
    assert other.grad is not None
    assert torch.equal(x.grad, other.grad)
    torch.testing.assert_close(x.grad, 27 * start().detach() ** 26)


def test_what_steps_saved_is_let_go_one_after_another() -> None:
    Chained.apply(start(), None, -1).sum().backward()
    assert Cube.alive == [3, 2, 1]


def test_what_no_step_saved_is_let_go_after_forward() -> None:
    out = Chained.apply(start(), None, -1)
    assert len(Cube.made) == 3
    assert all(each() is None for each in Cube.made)
    out.sum().backward()


def test_a_kept_graph_can_be_run_again() -> None:
    x = start()
    out = Chained.apply(x, None, -1).sum()
    out.backward(retain_graph=True)
    first = x.grad
    x.grad = None
    out.backward()
    assert first is not None
    assert x.grad is not None
    assert torch.equal(first, x.grad)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_steps_before_the_first_gradient_are_left_out(trained: int) -> None:
    anchor = torch.zeros(1, requires_grad=True)
    Chained.apply(start().detach(), anchor, trained).sum().backward()
    assert Cube.alive == list(range(3 - trained, 0, -1))


def test_checkpointing_lets_go_of_what_is_saved() -> None:
    x, other = start(), start()
    Chained.apply(other, None, -1).sum().backward()
    Cube.kept, Cube.alive = [], []
    out = torch.utils.checkpoint.checkpoint(Chained.apply, x, None, -1, use_reentrant=False)
    assert all(each() is None for each in Cube.kept)
    out.sum().backward()
    assert x.grad is not None
    assert other.grad is not None
    assert torch.equal(x.grad, other.grad)


def test_a_second_derivative_is_refused() -> None:
    x = start()
    with pytest.raises(KernelError, match="call backward without create_graph"):
        torch.autograd.grad(Chained.apply(x, None, -1).sum(), x, create_graph=True)


def test_nothing_may_stand_between_steps() -> None:
    x = start()
    with Chain(x, needs=True), pytest.raises(KernelError, match="follow each other"):
        apply(Cube, apply(Cube, x, 3) + 0.0, 3)
    with Chain(x, needs=True) as chain, pytest.raises(KernelError, match="follow each other"):
        chain.end(apply(Cube, x, 3) + 0.0)


class Sum(torch.autograd.Function):
    """x + Wx, by a function that is a step of its own elsewhere."""

    weight = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 1.0], [2.0, 0.5, 0.0]], dtype=torch.float64)

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x + frozen_linear(x, Sum.weight, None)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad + grad @ Sum.weight


def test_what_a_step_calls_is_no_step() -> None:
    with Chain(start(), needs=True) as chain:
        apply(Sum, chain.last)
    assert [step.function for step in chain.steps] == [Sum]
    with pytest.raises(ZeroDivisionError), Chain(start(), needs=True) as chain:
        apply(Fails, chain.last)
    assert apply(Cube, start(), 3).grad_fn is not None


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, _x: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_an_error_leaves_no_chain_behind() -> None:
    with pytest.raises(ZeroDivisionError), Chain(start(), needs=True):
        raise ZeroDivisionError
    assert apply(Cube, start(), 3).grad_fn is not None
