"""Initial weights of an adapter: PEFT's default, drawn so that no weight depends on what else there is."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from plait_kernels import Bank


def initial_a(seed: int, module: str, rank: int, in_features: int) -> Tensor:
    """A (rank, in), float32: Kaiming uniform with a = sqrt(5), as PEFT and nn.Linear draw it.

    The generator depends on the job's seed and the module's name alone, so neither the order of modules
    nor which others are targeted changes a weight.
    """
    key = hashlib.sha256(f"{seed}\n{module}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little"))
    weight = torch.empty(rank, in_features)
    torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    return weight


def initialise(bank: Bank, adapter: str, seed: int) -> None:
    """Fill an attached adapter's A; B is zero, so that training starts from the base model."""
    with torch.no_grad():
        for module, (a, b) in bank.weights(adapter).items():
            a.copy_(initial_a(seed, module, *a.shape))
            b.zero_()
    bank.refresh([adapter])
