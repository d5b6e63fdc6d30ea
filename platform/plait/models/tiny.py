"""Small random models of ten families with their own byte tokeniser, for dry runs and tests.

A seam: tests build configurations and tokenisers with it, without loading a model.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from plait.core.errors import ConfigError, choices

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

MAX_LENGTH = 1024  # the longest row of the default data has 655 bytes
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Options of each family in addition to the common sizes. Windows and softcaps are small enough to matter for
# a few tokens.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "logits_scaling": 4.0,
    },
    "cohere": {"logit_scale": 0.25},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt2": {"num_key_value_heads": None},
}
MODEL_TYPES = {"gemma3": "gemma3_text"}


def check_family(family: str) -> None:
    """Check that there is such a family.

    Raises:
        ConfigError: there is none.
    """
    if family not in FAMILIES:
        raise ConfigError(f"model.family={family!r}", f"model.family must be one of {choices(FAMILIES)}.")


def tiny_name(family: str, seed: int) -> str:
    """The name of the model with these random weights, ``tiny-llama`` or ``tiny-llama-seed3``."""
    return f"tiny-{family}-seed{seed}" if seed else f"tiny-{family}"


def tiny_named(name: str) -> tuple[str, int] | None:
    """The family and seed of the model with this name; None: it is another model."""
    found = re.fullmatch(r"tiny-(\w+?)(?:-seed(-?[1-9]\d*))?", name)
    return (found[1], int(found[2] or 0)) if found and found[1] in FAMILIES else None


def tiny_config(family: str, vocabulary: int) -> PreTrainedConfig:
    """The configuration of a model of four layers and 64 features."""
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LENGTH,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.1,  # large enough that logits differ from token to token
    } | FAMILIES[family]
    from transformers import AutoConfig

    options = {key: value for key, value in sizes.items() if value is not None}
    return AutoConfig.for_model(MODEL_TYPES.get(family, family), **options)


def byte_tokeniser() -> PreTrainedTokenizerFast:
    """A tokeniser with three special tokens, then one token for each byte, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    fast: PreTrainedTokenizerFast = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    fast.chat_template = TEMPLATE
    return fast
