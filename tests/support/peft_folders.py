"""Reads what an exported adapter's folder holds."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from plait.adapters.facts import WEIGHTS
from plait.adapters.variants import PREFIX


def stored_tensors(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Its tensors by layer and by their name in it, such as "lora_A.weight"."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        layer, _, rest = name.removeprefix(PREFIX).partition(".lora_")
        found.setdefault(layer, {})[f"lora_{rest}"] = tensor
    return found


def stored_pairs(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each layer, of plain LoRA."""
    return {
        layer: (own["lora_A.weight"], own["lora_B.weight"]) for layer, own in stored_tensors(folder).items()
    }
