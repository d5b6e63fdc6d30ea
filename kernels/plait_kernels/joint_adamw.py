"""One AdamW step over all adapters in three launches: two for the gradients' norms, one for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait_kernels.bank import GRADIENTS, WEIGHTS, Block
from plait_kernels.launching import launch
from plait_kernels.steps import AdapterStep
from plait_kernels.uploads import distance, table

_BLOCK = 4096  # elements of a program
_WIDTH = 1024  # partial sums that are added at once


def _kernels() -> Any:
    from plait_kernels import triton_adamw

    return triton_adamw


def _origin(like: Tensor) -> Tensor:
    return torch.empty(16, dtype=like.dtype, device=like.device)


def norms(blocks: Sequence[Block]) -> Tensor:
    """The norm of each adapter's gradient, on the device."""
    device = blocks[0].state.device
    origin = _origin(blocks[0].state)
    rows = [(distance(block.state[GRADIENTS], origin), block.layout.trained) for block in blocks]
    chunks = -(-max(size for _, size in rows) // _BLOCK)
    adapters = table(rows, device)
    partial, out = origin.new_empty(len(blocks), chunks), origin.new_empty(len(blocks))
    launch(_kernels().squares, (chunks, len(blocks)), origin, adapters, partial, chunks, BLOCK=_BLOCK)
    launch(
        _kernels().norms, (len(blocks),), adapters, partial, out, chunks, **{"BLOCK": _BLOCK, "WIDTH": _WIDTH}
    )
    return out


def step_all(steps: Sequence[tuple[AdapterStep, Block]], found: Tensor) -> None:
    """Step every adapter, given the norms of their gradients, which then become zero; compute copies follow.

    An adapter whose norm is not finite stays as it is, but for its gradient.

    Of a bank that steps only a part of each adapter, gradients and copies stay as they are.
    """
    first = steps[0][1]
    device, whole = first.state.device, len(first.parts) == 1
    copied = whole and not first.aliased
    origin, copies = _origin(first.state), _origin(first.copy)
    ranges: list[tuple[int, ...]] = []
    settings: list[tuple[float, ...]] = []
    for number, (step, block) in enumerate(steps):
        for part, rate in block.layout.ranges:
            own = block.parts[block.own]
            start, stop = max(part.start, own.start), min(part.stop, own.stop)
            if start >= stop:
                continue
            weights, gradients = (distance(block.state[row], origin) for row in (WEIGHTS, GRADIENTS))
            moments = [distance(block.moments[row], origin) - own.start for row in (0, 1)]
            copy = distance(block.copy, copies)
            ranges.append(
                (*(start + at for at in (weights, gradients, *moments, copy)), stop - start, number)
            )
            settings.append(_numbers(step, step.lr_a if rate == "a" else step.lr_b))
    if not ranges:
        return
    grid = (-(-max(row[5] for row in ranges) // _BLOCK), len(ranges))
    tables = table(ranges, device), table(settings, device, torch.float32)
    launch(
        _kernels().adamw,
        grid,
        origin,
        copies,
        *tables,
        found,
        **{"COPY": copied, "ZERO": whole, "BLOCK": _BLOCK},
    )


def _numbers(step: AdapterStep, lr: float) -> tuple[float, ...]:
    b1, b2 = step.betas
    rate = lr / (1.0 - b1**step.step)
    root = 1.0 / math.sqrt(1.0 - b2**step.step)
    limit = math.inf if step.clip_norm is None else step.clip_norm
    return (limit, 1.0 - lr * step.weight_decay, b1, 1.0 - b1, b2, 1.0 - b2, rate, root, step.eps)
