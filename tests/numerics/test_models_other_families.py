"""Families beyond the tiny ones: layers that pass nothing on, scales outside of modules, what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from plait.core.errors import ModelError
from plait.core.settings import ModelSettings
from plait.models import BaseModel, Identity, MicrobatchContext, load_model, transformers_model
from plait.models.tiny import byte_tokeniser
from plait_kernels import labelled_cross_entropy

OFFSETS = (0, 7, 8, 20)
SIZES = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}

SCALED_BY_POSITION = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 4,
}


def model_of(family: str, **options: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = AutoConfig.for_model(family, **SIZES, **options)
        model: PreTrainedModel = cast(Any, AutoModelForCausalLM).from_config(config).float().eval()
    return model


def as_blocks(model: PreTrainedModel) -> BaseModel:
    return BaseModel(model, byte_tokeniser(), Identity("other", "other"), 64)


def tokens() -> torch.Tensor:
    return torch.randint(3, 259, (OFFSETS[-1],), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("stablelm", {"num_key_value_heads": 2}),  # its layers do not pass keyword arguments on
        ("nemotron", {"num_key_value_heads": 2}),
        ("olmo2", {"num_key_value_heads": 2}),
        ("starcoder2", {"num_key_value_heads": 2, "sliding_window": 4}),
        ("cohere2", {"num_key_value_heads": 2, "sliding_window": 4, "logit_scale": 0.25}),
        ("ministral3", {"num_key_value_heads": 2, "head_dim": 16, "rope_parameters": SCALED_BY_POSITION}),
        ("granitemoe", {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 4.0}),
    ],
)
@torch.no_grad()
def test_any_causal_language_model_runs_packed_as_transformers_runs_it(
    family: str, options: dict[str, Any]
) -> None:
    model = model_of(family, **options)
    expected = torch.cat(
        [model(tokens()[low:high].unsqueeze(0), use_cache=False).logits[0] for low, high in pairwise(OFFSETS)]
    )
    found = as_blocks(model).logits(MicrobatchContext.of(tokens(), OFFSETS))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("family", "scale"), [("granite", 1 / 4), ("cohere", 1 / 4), ("gemma2", None)])
def test_the_loss_is_of_scaled_logits(family: str, scale: float | None, tmp_path: Path) -> None:
    settings = ModelSettings(kind="tiny", family=family, dtype="float32")
    whole = transformers_model(settings, cache=tmp_path)
    whole.set_attn_implementation("eager")
    base = load_model(settings, cache=tmp_path)
    ids = tokens()
    expected = cross_entropy(
        whole(ids.unsqueeze(0), use_cache=False).logits[0, :-1], ids[1:], reduction="none"
    )
    context = MicrobatchContext.of(ids, (0, len(ids)))
    hidden = base.embed(context)
    for index in range(base.layer_count):
        hidden = base.layer(index, hidden, context)
    head = base.head_parameters()
    assert head.scale == scale
    _, found = labelled_cross_entropy(
        base.final_norm(hidden[:-1]),
        head.weight,
        head.bias,
        ids[1:],
        torch.ones(len(ids) - 1),
        softcap=head.softcap,
        scale=head.scale,
    )
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("falcon", "cannot be run one by one: .*alibi"),
        ("biogpt", "cannot be run one by one"),
        ("bloom", "embed differs from the whole"),
        ("opt", "its parts are decoder"),
    ],
)
def test_a_model_whose_blocks_are_something_else_is_refused(family: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        as_blocks(model_of(family))


def test_a_scale_that_the_blocks_leave_out_is_refused() -> None:
    model = model_of("granite", num_key_value_heads=2, embedding_multiplier=3.0)
    real = model.config.embedding_multiplier
    model.config.embedding_multiplier = 1.0  # as if the key had another name
    assert model.base_model.embedding_multiplier == real
    with pytest.raises(ModelError, match="embed differs from the whole"):
        as_blocks(model)
