"""Every causal family of the installed transformers: joint = solo = PEFT, or refused with what is missing.

Tiny random models, made from each family's own configuration with the sizes below. A family that changes
sides, or is new, fails here until its row is moved or added.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from laboratory import Laboratory, assert_same, random_texts
from peft_runs import PeftRun, assert_same_as_peft
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from plait.core.errors import ModelError
from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.settings import ModelSettings
from plait.models.base import BaseModel, Identity
from plait.models.blocks import find_parts
from plait.models.load import inspect_model
from plait.models.lora import find_linears, find_outside
from plait.models.targets import resolve_targets
from plait.models.tiny import byte_tokeniser


def names(table: str) -> list[str]:
    return table.split()


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "engine.md"
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {  # each is given if the family's configuration has it
    "vocab_size": 259,
    "vocab_size_per_layer_input": 259,
    "max_position_embeddings": 96,
    "n_positions": 96,
    "n_ctx": 96,
    "initializer_range": 0.1,
    "sliding_window": 5,
    "num_kv_shared_layers": 0,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group", "n_shared_experts"), 1),
}
LATENT = {  # attention through a latent space, whose sizes follow from these
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LATENT_ATTENTION = """
    axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_linear
    minicpm3 sarvam_mla youtu
"""
ROPE = {"rope_type": "default", "rope_theta": 1e4}
GEMMA4 = {
    **{"vocab_size": 259, "hidden_size": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2},
}
SMALL_IMAGES = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14, "crop_size": 28},
}
SMALL_SOUND = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
    **{"ext_pw_out_channel": 32, "nemo_conv_channels": 32},
}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(names(LATENT_ATTENTION), LATENT),
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)},
    "dbrx": {
        **{"n_heads": 4, "d_model": 64, "n_layers": 2, "max_seq_len": 96},
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **GEMMA4}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", **GEMMA4}},
    "dory": {"n_input_layers": 1, "n_output_layers": 0},
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "longcat_flash": LATENT
    | {"head_dim": 8, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32}
    | {"zero_expert_num": 2, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["full_attention", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "olmoe": {"num_key_value_heads": 4},
    "phi4_multimodal": {"vision_config": SMALL_IMAGES, "audio_config": SMALL_SOUND},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "reformer": {
        **{"is_decoder": True, "attn_layers": ["local", "local"]},
        **{"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (8, 12)},
    },
    "xlm": {"emb_dim": 64, "n_heads": 4},
    "zamba": {"num_hidden_layers": 12, "attn_layer_period": 6, "attn_layer_offset": 4},
    "zamba2": {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
TRAINED = """
    afmoe apertus apertus1p5_text arcee aria_text axk1 bitnet codegen cohere cohere2 cohere2_moe
    cohere_compass_text cwm dbrx deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone exaone4
    exaone_moe flex_olmo gemma gemma2 gemma3_text gemma4_unified_text glm glm4 glm4_moe
    glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gptj granite granitemoe granitemoeshared helium
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1
    laguna llama longcat_flash mellum minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3
    mistral mixtral moshi nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phi4_multimodal qwen2
    qwen2_moe qwen3 qwen3_moe sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2
    vaultgemma youtu
"""
# Where experts are fused, PEFT takes gate_proj, up_proj and down_proj, which dense and shared MLPs have too,
# for the experts' parameters: there it is asked for attention alone.
FUSED_EXPERTS = """
    afmoe deepseek_v3 dots1 ernie4_5_moe exaone_moe glm4_moe glm4_moe_lite hunyuan_v1_moe longcat_flash
    sarvam_mla solar_open
"""
REFUSED = {
    "not supported: layers in an encoder": """
        bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert
        xlm-roberta xlm-roberta-xl xmod
    """,
    "not supported: layers in a decoder of its own": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart opt pegasus plbart whisper
    """,
    "its parts are .*: .*; not supported: ": """
        big_bird cpmant gemma3n_text gemma4_text granite_swa granitemoe_swa lfm3 llama4_text megatron-bert
        mvp openai-gpt prophetnet qwen4_exp_text rembert roformer trocr xlm xlnet
    """,
    "its parts are .*: no (final norms|lists of layers)": "hrm_text lfm2 lfm2_moe",
    "not supported: state-space, recurrent or linear-attention layers": """
        bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lara_mini mamba
        mamba2 minimax nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma
        rwkv xlstm zamba zamba2 zaya
    """,
    "not supported: alibi position biases": "bloom mpt",
    "not supported: .*position biases": "deepseek_v4 inkling2_loop_text inkling2_text inkling_text",
    "not supported: attention sinks": "flint gpt_oss hy_v4 mimo_v2_flash",
    "not supported: sparse attention with an indexer": "axk2 deepseek_v32 dots3_note_text glm_moe_dsa",
    "not supported: attention that does not go through": "falcon gpt_neo gpt_neox_japanese reformer",
    "not supported: keys and values of another layer or model": "gemma4_assistant gemma4_unified_assistant",
    "not supported: layers without rotation": "beam",
    "not supported: positions with code of their own": "biogpt",
    "not supported: rotations as complex numbers": "deepseek_v2",
    "its 2 layers run 3 times": "dory",
    "embed differs from .*not supported: embeddings that its own code changes": """
        ctrl modernbert-decoder nanochat
    """,
    "embed differs from .*not supported: attention that does not go through": "xglm",
    "layer 0 differs from .*not supported: a window or chunk that its attention": "phimoe",
    "layer 0 differs from .*not supported: .*attention masks that depend on the values": "doge",
}
SEVERAL = """
    blt dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 llama4 mllama
    moss_transcribe_diarize musicgen musicgen_melody qwen3_5 qwen3_5_moe qwen4_exp
"""


def model_of(family: str) -> PreTrainedModel:
    """The family's model with random weights, where norms and biases are not neutral."""
    own = OWN.get(family, {})
    given = {key: value for key, value in own.items() if value is not None}
    known = {} if "text_config" in own else AutoConfig.for_model(family).to_dict()
    options = {key: value for key, value in SIZES.items() if key in known and key not in own} | TOKENS | given
    config = AutoConfig.for_model(family, **options)
    loader = cast(Any, AutoModelForCausalLM)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model: PreTrainedModel = loader.from_config(config).float().eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def blocks_of(family: str, model: PreTrainedModel) -> BaseModel:
    return BaseModel(model, byte_tokeniser(), Identity(family, family), 96)


def jobs_of(family: str) -> list[JobSpec]:
    """Two jobs of different rank, lengths and batch, on every linear layer. With a larger eps Adam does not
    turn the rounding of a tiny gradient into a step."""
    targets: Any = r".*attn\.(\d\.)?(?!gate)[^.]*" if family in names(FUSED_EXPERTS) else "all-linear"

    def job(name: str, rank: int, lengths: tuple[int, int], **train: Any) -> JobSpec:
        adapter = AdapterSpec(rank, 2.0 * rank, target_modules=targets)
        data = random_texts(train["seed"], *lengths, train=5, validation=0)
        return JobSpec(name, adapter, TrainSpec(steps=2, lr=2e-3, eps=1e-4, **train), data)

    return [
        job("two", 2, (3, 9), batch_size=2, seed=1),
        job("five", 5, (8, 30), batch_size=1, accumulation=2, seed=2),
    ]


def test_every_causal_family_has_its_row() -> None:
    rows = {"trained": TRAINED} | REFUSED | {"not supported: several models in one": SEVERAL}
    for words, row in rows.items():
        print(f"{len(names(row))} {words}: {' '.join(names(row))}\n")
    known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert sorted(family for row in rows.values() for family in names(row)) == known
    said, trained = " ".join(DOCUMENT.read_text().split()), len(names(TRAINED))
    assert f"Of the {len(known)} causal families" in said
    assert f"{trained} can be trained" in said
    assert f"{len(known) - trained} are refused" in said
    assert f"({len(names(SEVERAL))} of these are refused by their configuration alone)" in said
    assert set(names(FUSED_EXPERTS)) <= set(names(TRAINED))


@pytest.mark.parametrize("family", names(TRAINED))
def test_joint_equals_solo_and_peft(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plain = model_of(family)
    copies = [copy.deepcopy(plain) for _ in range(2)]
    lab = Laboratory(family, blocks_of(family, plain), tmp_path)
    jobs = jobs_of(family)
    joint = lab.run(jobs, kernels="grouped", capacity=64)
    solo = lab.run(jobs[:1], kernels="grouped", capacity=64)
    assert_same(joint, solo, jobs[:1])
    for job, base in zip(jobs, copies, strict=True):
        targets = resolve_targets(job.adapter.target_modules, lab.model.linears)
        alone = PeftRun(base, job, "|".join(map(re.escape, targets)))
        alone.load(joint.start[job.name])
        assert_same_as_peft(joint, alone.train(lab.data(job).train))


@pytest.mark.parametrize(
    ("family", "missing"), [(family, words) for words, row in REFUSED.items() for family in names(row)]
)
def test_an_unsupported_family_is_refused_with_the_reason(family: str, missing: str) -> None:
    model = model_of(family)
    with pytest.raises(ModelError, match=missing):
        blocks_of(family, model)


@pytest.mark.parametrize("family", names(SEVERAL))
def test_a_model_of_several_is_refused_by_its_configuration(family: str, tmp_path: Path) -> None:
    """For images, sound or bytes too, each part with its own sizes: nothing is made of it."""
    AutoConfig.for_model(family).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"not supported: .*several models in one \(.*_?config|decoder"):
        inspect_model(ModelSettings(kind="hf", id=str(tmp_path / "model")), cache=tmp_path)


@pytest.mark.parametrize(
    ("family", "targets", "reached"),
    [
        ("qwen2_moe", ("q_proj", "gate_proj"), "model.layers.0.mlp.experts.gate_proj"),
        ("qwen2_moe", ".*mlp.*", "model.layers.0.mlp.gate"),
        ("qwen3_moe", ("down_proj",), "model.layers.0.mlp.experts.down_proj"),
        ("mixtral", ("q_proj", "w1", "w2", "w3"), "experts.w1"),
        ("mixtral", ("gate",), "mlp.gate"),
        ("granitemoe", ("router",), "block_sparse_moe.router"),
    ],
)
def test_routed_experts_and_routers_are_refused_in_words(
    family: str, targets: str | tuple[str, ...], reached: str
) -> None:
    model = model_of(family)
    linears = find_linears(model, find_parts(model).prefix)
    outside = find_outside(model, linears)
    with pytest.raises(ModelError, match="not routed experts") as caught:
        resolve_targets(targets, linears, outside)
    assert reached in caught.value.value
    assert resolve_targets("all-linear", linears, outside) == tuple(each.name for each in linears)
    assert len(resolve_targets(r".*attn\..*", linears, outside)) == 8


def test_an_adapter_above_a_layers_outputs_sits_on_the_gate_of_the_shared_expert(tmp_path: Path) -> None:
    base = blocks_of("qwen2_moe", model_of("qwen2_moe"))
    gates = {each.name for each in base.linears if each.out_features == 1}
    assert gates
    lab = Laboratory("qwen2_moe", base, tmp_path)
    joint = lab.run(jobs_of("qwen2_moe"), kernels="reference", capacity=64)
    assert all(torch.is_nonzero(joint.end["five"][gate][1].abs().sum()) for gate in gates)
