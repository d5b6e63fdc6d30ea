"""An adapter's optimiser step: what is asked for, and what it did."""

from __future__ import annotations

from dataclasses import dataclass


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
