"""AdamW for all adapters that are due, each with its own settings, step count and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from plait_kernels.bank import GRADIENTS, WEIGHTS, Bank, Block
from plait_kernels.errors import KernelError


@dataclass(frozen=True)
class AdapterStep:
    """One adapter's optimiser step.

    Args:
        adapter: name of the adapter.
        step: 1 for the adapter's first step; it sets the bias correction.
        lr_a: learning rate of A, and of a variant's tensors like it.
        lr_b: learning rate of B (LoRA+ gives B a larger one).
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, for all trained tensors.
        clip_norm: the gradient is scaled down to this norm over all of the adapter's weights; None: no
            clipping.
    """

    adapter: str
    step: int
    lr_a: float
    lr_b: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None


@dataclass(frozen=True)
class StepResult:
    """What a step did: the gradient's norm before clipping, and whether the step was skipped."""

    adapter: str
    grad_norm: float
    skipped: bool


def adamw_step(
    bank: Bank,
    steps: Sequence[AdapterStep],
    complete: Callable[[Sequence[Block]], None] = lambda _: None,
    *,
    norms: Sequence[float] | None = None,
) -> list[StepResult]:
    """Step every named adapter as torch's AdamW would, and set its gradient to zero.

    An adapter whose gradient's norm is not finite is skipped: weights and moments stay. No other adapter's
    memory is read or written. Compute-dtype copies follow.

    Args:
        complete: takes the other parts' weights from their banks, where this bank steps only a part.
        norms: of each adapter's gradient, where other banks have parts of it; None: this bank has all.

    Raises:
        KernelError: an adapter is not attached or named twice, or a step is below 1.
    """
    names = [step.adapter for step in steps]
    if len(set(names)) != len(names) or any(step.step < 1 for step in steps):
        raise KernelError(f"steps {names}", "an adapter is stepped once, its step counted from 1")
    blocks = [bank.block(name) for name in names]
    if not blocks:
        return []
    if norms is None:
        norms = torch.stack([torch.linalg.vector_norm(block.state[GRADIENTS]) for block in blocks]).tolist()
    results = []
    for step, block, norm in zip(steps, blocks, norms, strict=True):
        finite = math.isfinite(norm)
        if finite:
            _step(block, step, norm)
        results.append(StepResult(step.adapter, norm, not finite))
    bank.zero_gradients(names)
    stepped = [result.adapter for result in results if not result.skipped]
    complete([bank.block(name) for name in stepped])
    bank.refresh(stepped)
    return results


def _step(block: Block, step: AdapterStep, norm: float) -> None:
    if step.clip_norm is not None and norm > 0.0:
        factor = step.clip_norm / (norm + 1e-6)  # as in torch.nn.utils.clip_grad_norm_
        if factor < 1.0:
            block.state[GRADIENTS].mul_(factor)
    rates = {"a": step.lr_a, "b": step.lr_b}
    own = block.parts[block.own]
    for part, rate in block.layout.ranges:
        start, stop = max(part.start, own.start), min(part.stop, own.stop)
        if start < stop:
            moments = block.moments[:, start - own.start : stop - own.start]
            _adamw(block.state[:, start:stop], moments, step, rates[rate])


def _adamw(state: Tensor, moments: Tensor, step: AdapterStep, lr: float) -> None:
    count = torch.tensor(float(step.step - 1), device=state.device)
    adamw(
        [state[WEIGHTS]],
        [state[GRADIENTS]],
        [moments[0]],
        [moments[1]],
        [],
        [count],
        fused=True,
        amsgrad=False,
        beta1=step.betas[0],
        beta2=step.betas[1],
        lr=lr,
        weight_decay=step.weight_decay,
        eps=step.eps,
        maximize=False,
    )
