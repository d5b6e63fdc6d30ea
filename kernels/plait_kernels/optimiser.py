"""AdamW for all adapters that are due, each with its own settings, step count and clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from plait_kernels import joint_adamw
from plait_kernels.bank import GRADIENTS, WEIGHTS, Bank, Block
from plait_kernels.errors import KernelError
from plait_kernels.steps import AdapterStep, AskedSteps, StepResult
from plait_kernels.triton_backend import TRITON
from plait_kernels.uploads import table

Complete = Callable[[Sequence[Block]], None]


def adamw_step(
    bank: Bank,
    steps: Sequence[AdapterStep],
    *,
    norms: Sequence[float] | None = None,
    backend: str = "",
) -> list[StepResult]:
    """Step every named adapter as torch's AdamW would, and set its gradient to zero.

    An adapter whose gradient's norm is not finite is skipped: weights and moments stay. No other adapter's
    memory is read or written. Compute-dtype copies follow.

    Args:
        norms: of each adapter's gradient as it is in the banks, where others have parts of it; None: this
            bank has all.
        backend: the backend of the model's kernels; `triton` steps all adapters in one launch.

    Raises:
        KernelError: an adapter is not attached or named twice, or a step is below 1.
    """
    return ask_steps(bank, steps, norms=norms, backend=backend).results()


def ask_steps(
    bank: Bank,
    steps: Sequence[AdapterStep],
    complete: Complete = lambda _: None,
    *,
    norms: Sequence[float] | None = None,
    backend: str = "",
) -> AskedSteps:
    """Ask for the same, and wait for nothing where one launch steps whole adapters: it clips and skips.

    Args:
        complete: takes the other parts' weights from their banks, where this bank steps only a part.
    """
    names = tuple(step.adapter for step in steps)
    if len(set(names)) != len(names) or any(step.step < 1 for step in steps):
        raise KernelError(f"steps {list(names)}", "an adapter is stepped once, its step counted from 1")
    blocks = [bank.block(name) for name in names]
    if not blocks:
        return AskedSteps((), ())
    if bank.loss_scale != 1.0:
        torch._foreach_div_([block.state[GRADIENTS] for block in blocks], bank.loss_scale)
        norms = None if norms is None else [norm / bank.loss_scale for norm in norms]
    joint = backend == TRITON.name and TRITON.runs(bank.device, bank.compute_dtype)
    whole = joint and len(blocks[0].parts) == 1
    if norms is None and joint:
        found = joint_adamw.norms(blocks)
        if whole:
            joint_adamw.step_all(list(zip(steps, blocks, strict=True)), found)
            for block in blocks:
                block.refresh(copied=True)
            return AskedSteps(names, found)
        norms = found.tolist()
    asked = AskedSteps(names, _norms(blocks) if norms is None else norms)
    _step_finite(bank, list(zip(steps, blocks, asked.results(), strict=True)), complete, joint=joint)
    return asked


def _step_finite(
    bank: Bank, steps: Sequence[tuple[AdapterStep, Block, StepResult]], complete: Complete, *, joint: bool
) -> None:
    """Step those whose norms are finite."""
    due = [each for each in steps if not each[2].skipped]
    whole = joint and len(steps[0][1].parts) == 1  # then the launch does all for those that are due
    if joint and due:
        norms = table([result.grad_norm for *_, result in due], bank.device, torch.float32)
        joint_adamw.step_all([(step, block) for step, block, _ in due], norms)
    elif due:
        for step, block, result in due:
            _step(block, step, _clipping(step, result.grad_norm))
    bank.zero_gradients([result.adapter for *_, result in steps if result.skipped or not whole])
    stepped = [block for _, block, _ in due]
    complete(stepped)
    for block in stepped:
        block.refresh(copied=whole)


def _norms(blocks: Sequence[Block]) -> list[float]:
    norms = torch.stack([torch.linalg.vector_norm(block.state[GRADIENTS]) for block in blocks])
    found: list[float] = norms.tolist()
    return found


def _clipping(step: AdapterStep, norm: float) -> float:
    """The factor of the gradient, as in torch.nn.utils.clip_grad_norm_."""
    if step.clip_norm is None or norm <= 0.0:
        return 1.0
    return min(1.0, step.clip_norm / (norm + 1e-6))


def _step(block: Block, step: AdapterStep, factor: float) -> None:
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
