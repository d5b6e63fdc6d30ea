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
from plait.models.base import BaseModel, Identity
from plait.models.context import MicrobatchContext
from plait.models.load import inspect_model, load_model, transformers_model
from plait.models.tiny import byte_tokeniser

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

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
UNEQUAL_HEADS = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
WINDOW_IN_THE_MASK = {
    "use_sliding_window": True,
    "sliding_window": 40,
    "max_window_layers": 2,
    "num_key_value_heads": 2,
    **EXPERTS,
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
        ("afmoe", {"num_key_value_heads": 2, "head_dim": 16, **EXPERTS}),  # the mask by its name
        (
            "phimoe",
            {"num_key_value_heads": 2, **EXPERTS},
        ),  # a router that returns a tuple
        ("deepseek_v3", UNEQUAL_HEADS),
        ("qwen2_moe", {"num_key_value_heads": 2, **EXPERTS}),
        ("olmoe", {"num_key_value_heads": 4, **EXPERTS}),
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


@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2"])
def test_the_loss_is_of_scaled_logits(family: str, tmp_path: Path) -> None:
    settings = ModelSettings(kind="tiny", family=family, dtype="float32")
    whole = transformers_model(settings, cache=tmp_path)
    whole.set_attn_implementation("eager")
    base = load_model(settings, cache=tmp_path)
    ids = tokens()
    expected = cross_entropy(
        whole(ids.unsqueeze(0), use_cache=False).logits[0, :-1], ids[1:], reduction="none"
    )
    context = MicrobatchContext.of(ids, (0, len(ids)))
    rows = torch.arange(len(ids) - 1)
    _, found = base.loss(base.hidden(context), rows, ids[1:], torch.ones(len(rows)))
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)


def test_a_model_without_attention_is_refused_by_its_configuration(tmp_path: Path) -> None:
    sizes = {"vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2}
    AutoConfig.for_model("mamba", **sizes).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="not supported: state-space"):
        inspect_model(ModelSettings(kind="hf", id=str(tmp_path / "model")), cache=tmp_path)


@pytest.mark.parametrize("alibi", [False, True])
def test_falcon_is_refused_for_position_biases_only_if_it_has_them(alibi: bool) -> None:
    missing = "alibi position biases" if alibi else "attention that does not go through"
    with pytest.raises(ModelError, match=f"not supported: {missing}") as caught:
        as_blocks(model_of("falcon", alibi=alibi))
    assert alibi == ("alibi" in caught.value.value)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("biogpt", "positions with code of their own"),
        ("bloom", "embed differs from the whole"),
        ("opt", "its parts are decoder"),
        ("bamba", "not supported: state-space"),
        ("qwen3_next", "not supported: state-space, recurrent or linear-attention"),
        ("gpt_oss", "not supported: attention sinks"),
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


def test_a_window_that_only_the_mask_applies_is_refused_however_long_it_is() -> None:
    model = model_of("qwen2_moe", **WINDOW_IN_THE_MASK)
    with pytest.raises(ModelError, match="beyond its window or chunk, layer 0 differs"):
        as_blocks(model)
    assert model.config.sliding_window == 40  # shrunk for the check only


def test_the_windows_are_the_configured_ones_after_the_check() -> None:
    model = model_of("mistral", num_key_value_heads=2, sliding_window=15)
    long = torch.randint(3, 259, (40,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model(long.unsqueeze(0), use_cache=False).logits[0]
        found = as_blocks(model).logits(MicrobatchContext.of(long, (0, 40)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("clip", [0.5, 20.0])  # 20: reached by outliers alone
@pytest.mark.parametrize("family", ["olmo", "olmoe"])
def test_a_clamp_of_queries_and_keys_works_and_passes_gradients(family: str, clip: float) -> None:
    options = {"num_key_value_heads": 4, "clip_qkv": clip} | (EXPERTS if family == "olmoe" else {})
    whole = model_of(family, **options).requires_grad_(False)
    base = as_blocks(model_of(family, **options))
    for attention in (whole.base_model.layers[0].self_attn, base.layers[0].self_attn):
        assert "forward" not in vars(attention)  # nothing has replaced it
    context = MicrobatchContext.of(tokens(), (0, OFFSETS[-1]))
    start = (base.embed(context) * 100.0).requires_grad_()
    (found,) = torch.autograd.grad(base.layer(0, start * 1.0, context).sum(), start)
    given: list[torch.Tensor] = []

    def outlier(_module: object, positional: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        given.append((positional[0] * 100.0).requires_grad_())
        return (given[0] * 1.0, *positional[1:])

    def leave(_module: object, _positional: object, out: Any) -> None:
        given.append(out[0] if isinstance(out, tuple) else out)

    layer = whole.base_model.layers[0]
    layer.register_forward_pre_hook(outlier)
    layer.register_forward_hook(leave)
    whole(tokens().unsqueeze(0), use_cache=False)
    (expected,) = torch.autograd.grad(given[1].sum(), given[0])
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)
