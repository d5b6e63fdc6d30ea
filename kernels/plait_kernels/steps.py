"""An adapter's optimiser step: what is asked for, and what it did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


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


@dataclass(frozen=True, eq=False)
class AskedSteps:
    """Steps that a device was asked to take.

    Args:
        adapters: their names.
        norms: of their gradients, maybe still on the device.
    """

    adapters: tuple[str, ...]
    norms: Tensor | Sequence[float]

    def results(self) -> list[StepResult]:
        """What they did; the host waits for norms that are on the device."""
        norms = self.norms.tolist() if isinstance(self.norms, Tensor) else self.norms
        return [
            StepResult(name, norm, not math.isfinite(norm))
            for name, norm in zip(self.adapters, norms, strict=True)
        ]
