"""A rung as a whole number: optimiser steps, or a share of each trial's own."""

from __future__ import annotations

from typing import Literal

PARTS = 10_000

Unit = Literal["steps", "shares"]  # what rungs count, and by what a study keeps the values of its trials


class Share(int):
    """A rung at a share of each trial's own optimiser steps, in ten-thousandths of them: a whole number,
    because Optuna keeps values by whole numbers."""

    @classmethod
    def of(cls, share: float) -> Share:
        """The rung at a share between 0 and 1."""
        return cls(max(1, round(share * PARTS)))

    def __str__(self) -> str:
        return f"{int(self) / (PARTS / 100):.3g} %"


def step_of(rung: int, steps: int) -> int:
    """The step after which a trial of so many optimiser steps has reached a rung."""
    return -(-int(rung) * steps // PARTS) if isinstance(rung, Share) else rung
