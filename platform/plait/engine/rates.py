"""Learning rate of each optimiser step: constant, linear or cosine decay, after a linear warm-up."""

from __future__ import annotations

from math import cos, pi

from plait.core.jobs import TrainSpec


def warmup_steps(train: TrainSpec, steps: int) -> int:
    """Warm-up in whole steps: a value below 1 is a share of all ``steps``."""
    wanted = train.warmup_steps * steps if train.warmup_steps < 1 else train.warmup_steps
    return min(round(wanted), steps)


def learning_rate(train: TrainSpec, step: int, steps: int) -> float:
    """Rate of optimiser step ``step`` of ``steps``, counted from 1.

    Step s of W warm-up steps has s / W of the peak. Afterwards the share of the remaining budget that is
    already spent before this step sets the decay, so the first step after the warm-up has the peak and
    the last one is still above zero: no step is without effect.
    """
    warmup = warmup_steps(train, steps)
    if step <= warmup:
        return train.lr * step / warmup
    spent = (step - 1 - warmup) / (steps - warmup)
    match train.schedule:
        case "constant":
            return train.lr
        case "linear":
            return train.lr * (1.0 - spent)
        case "cosine":
            return train.lr * 0.5 * (1.0 + cos(pi * spent))
