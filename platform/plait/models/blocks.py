"""The parts of a transformers causal language model, found by looking, and its attention replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from plait.core.errors import ModelError
from plait.models.attention import AttentionRule, Heads, packed_attention
from plait.models.context import now_running

ATTENTION = "plait"  # the name under which transformers finds packed attention
DECODERS = "Take a decoder-only model such as Llama, Qwen3, Mistral, Gemma, Phi-3, GPT-NeoX or GPT-2."


@dataclass(frozen=True, slots=True)
class Parts:
    """What a model is made of.

    Attributes:
        prefix: name of the list of layers, with a dot at the end.
        embedding: token ids to hidden states, scaled as the model wants it.
        positions: learnt position embeddings, or None.
        layers: the decoder layers.
        rotary: makes cos and sin from positions, or None.
        norm: the last normalisation.
        head: the output layer.
        softcap: of the logits, or None.
        embedding_scale: factor of the embeddings, where the model and not its embedding applies it.
        logit_scale: factor of the logits, before the softcap; None where there is none.
    """

    prefix: str
    embedding: nn.Module
    positions: nn.Module | None
    layers: nn.ModuleList
    rotary: nn.Module | None
    norm: nn.Module
    head: nn.Linear
    softcap: float | None
    embedding_scale: float | None
    logit_scale: float | None


def find_parts(model: PreTrainedModel) -> Parts:
    """The parts of a causal language model.

    Raises:
        ModelError: a part is missing, or there are several that it could be.
    """
    children = dict(model.base_model.named_children())
    embedding = model.get_input_embeddings()
    head = cast(Any, model).get_output_embeddings()
    lists = {name: child for name, child in children.items() if isinstance(child, nn.ModuleList)}
    norms = [
        child
        for name, child in children.items()
        if "norm" in type(child).__name__.lower() and "embed" not in name
    ]
    tables = [
        child for child in children.values() if isinstance(child, nn.Embedding) and child is not embedding
    ]
    if len(lists) != 1 or len(norms) != 1 or len(tables) > 1 or not isinstance(head, nn.Linear):
        raise unusable(model, f"its parts are {', '.join(children)}")
    name, layers = next(iter(lists.items()))
    config = model.config
    divisor = getattr(config, "logits_scaling", None)  # Granite divides, Cohere multiplies
    return Parts(
        prefix=f"{model.base_model_prefix}.{name}.",
        embedding=embedding,
        positions=tables[0] if tables else None,
        layers=layers,
        rotary=children.get("rotary_emb"),
        norm=norms[0],
        head=head,
        softcap=getattr(config, "final_logit_softcapping", None),
        embedding_scale=getattr(config, "embedding_multiplier", None),
        logit_scale=getattr(config, "logit_scale", None) if divisor is None else 1.0 / divisor,
    )


def unusable(model: nn.Module, why: str) -> ModelError:
    """The error for a model that cannot be run as blocks."""
    return ModelError(
        f"{type(model).__name__}: {why}",
        "The model must be an embedding, one list of layers, a last normalisation and a linear head.",
        DECODERS,
    )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_other: Any,
) -> tuple[Tensor, None]:
    """Packed attention as transformers' attention modules call it; they rotate before.

    Args:
        module: the attention module (its ``layer_idx`` names its place in the cache).
        query: (1, heads, tokens, head size).
        key: (1, key heads, tokens, head size).
        value: as key.
        _attention_mask: unused: the context's sample boundaries are the mask.
        scaling: of the scores; 1/sqrt(head size) where it is None.
        sliding_window: how many keys back a query sees, its own included.
        softcap: of the scores.

    Returns:
        (1, tokens, heads, head size), and None for the probabilities.
    """
    packed = now_running().context
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    rule = AttentionRule(scale, sliding_window, softcap)
    heads = Heads(query.shape[1], key.shape[1])
    qkv = torch.cat((query, key, value), dim=1).squeeze(0).transpose(0, 1).flatten(1)
    if packed.cache is None:
        out = packed_attention(qkv, heads, packed.layout, rule)
    else:
        out = packed.cache.attend(cast(int, module.layer_idx), qkv, heads, rule, packed)
    return out.view(1, len(out), heads.query, -1), None


AttentionInterface.register(ATTENTION, attention_forward)
