"""Memory models with given coefficients."""

from __future__ import annotations

from plait.cost.fitting import UNKNOWN_MARGIN
from plait.cost.memory import MemoryCoefficients, MemoryModel, Phase


def one_phase(*, margin: float = UNKNOWN_MARGIN, **coefficients: float) -> MemoryModel:
    """A model that does not distinguish moments."""
    return MemoryModel({"whole": Phase(MemoryCoefficients(**coefficients), margin)})
