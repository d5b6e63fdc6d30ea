"""Weights that a job begins with in place of fresh ones: those of a saved adapter or of a saved state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from plait.adapters.peft_folder import WEIGHTS
from plait.core.errors import CheckpointError
from plait.engine.checkpoints import TENSORS


def load_warm(place: Path, weights: Mapping[str, Tensor]) -> None:
    """Fill an adapter's weights from a PEFT folder or a saved state.

    Args:
        place: the folder.
        weights: A and B by PEFT's names, to be filled in place.

    Raises:
        CheckpointError: it cannot be read, or holds an adapter of other modules or another rank.
    """
    file = next((place / name for name in (WEIGHTS, TENSORS) if (place / name).exists()), place / WEIGHTS)
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file}: {error}", "A warm start begins with the weights of a saved adapter."
        ) from error
    for name, tensor in weights.items():
        if name not in found or found[name].shape != tensor.shape:
            raise CheckpointError(
                f"{file}: {name} is not there, or not of shape {tuple(tensor.shape)}",
                "A warm start needs the same rank and the same target modules.",
            )
    for name, tensor in weights.items():
        tensor.copy_(found[name])
