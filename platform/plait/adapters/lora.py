"""Plain LoRA, with rsLoRA as an option: the variant ``adapter.variant=lora``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import plait_kernels
from plait.adapters.variants import VARIANTS
from plait.core.jobs import AdapterSpec
from plait_kernels import TensorSpec


class Lora(plait_kernels.Lora):
    """A (rank, in) starts as in PEFT, B (out, rank) at zero, so training starts from the base model."""

    def initial(self, tensor: TensorSpec, seed: int, module: str, _weight: Callable[[], Tensor], /) -> Tensor:
        """Initial values of A: Kaiming uniform with a = sqrt(5), as in PEFT and nn.Linear.

        The generator depends only on the job's seed and the module's name, so neither the order of modules
        nor which others are targeted changes a weight.
        """
        values = torch.zeros(tensor.shape)
        if tensor.name == "lora_A.weight":
            key = hashlib.sha256(f"{seed}\n{module}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little"))
            torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        return values

    def peft_config(self, _spec: AdapterSpec, /) -> dict[str, Any]:
        """Nothing in addition to what every LoRA has."""
        return {}


VARIANTS.add("lora", Lora())
