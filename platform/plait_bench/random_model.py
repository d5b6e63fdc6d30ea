"""A model of Llama's architecture with random weights, for benchmarks of a paper's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from plait.models.base import BaseModel, Identity
from plait.models.tiny import byte_tokeniser
from plait_bench.inputs import Count


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    """Sizes of the model.

    Attributes:
        layers, hidden, inner, heads, shared, vocabulary: as in Llama's configuration; ``shared`` heads have
            keys and values.
    """

    layers: Count
    hidden: Count
    inner: Count
    heads: Count
    shared: Count
    vocabulary: Count

    def model(self, length: int, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """A frozen model for samples of up to ``length`` tokens, made on the device."""
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.shared,
            max_position_embeddings=max(8192, length),
        )
        with device:
            made = cast(Any, AutoModelForCausalLM).from_config(config, dtype=dtype)
        return cast(PreTrainedModel, made.requires_grad_(False))

    def base(self, length: int, device: torch.device, dtype: torch.dtype) -> BaseModel:
        """The same as Plait's blocks."""
        model = self.model(length, device, dtype)
        return BaseModel(model, byte_tokeniser(), Identity("random", "random"), length)


def dtype_on(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU, elsewhere float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def described(device: torch.device, dtype: torch.dtype) -> str:
    """What a report says of the model: the device's name, the data type and its weights."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this processor"
    return f"{name}, {str(dtype).removeprefix('torch.')}, random weights"
