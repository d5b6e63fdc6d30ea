"""An adapter's tensors in the bank: their names as PEFT writes them, and their initial values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from plait_kernels import Bank
from torch import Tensor

PREFIX = "base_model.model."


def named_tensors(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """A and B of every site under PEFT's names."""
    named = {}
    for site, (a, b) in pairs.items():
        named[f"{PREFIX}{site}.lora_A.weight"] = a
        named[f"{PREFIX}{site}.lora_B.weight"] = b
    return named


def initialise(bank: Bank, adapter: str, seed: int) -> None:
    """Fill A as PEFT does, uniform in ±1/√in (Kaiming with a = √5); B stays zero.

    Each site draws from a stream of its own, so its A does not depend on which other sites there are.
    """
    modules = {site.name: site.module for site in bank.sites}
    for site, (a, _) in bank.weights(adapter).items():
        source = torch.Generator().manual_seed(seed << 20 | modules[site])
        a.copy_((torch.rand(a.shape, generator=source) * 2 - 1) / a.shape[1] ** 0.5)
