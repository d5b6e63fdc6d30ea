"""An adapter in other forms: merged into its base model, and for llama.cpp.

A seam: only exports meet GGUF and whole models that are saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import gguf
import torch
from torch import Tensor

from plait.adapters.facts import GGUF_FILE
from plait.adapters.peft_folder import StoredAdapter, exported_folder, read_adapter
from plait.core.errors import ModelError
from plait.core.settings import ModelSettings
from plait.models.load import inspect_model, load_tokeniser, model_config, transformers_model
from plait.models.quiet import quiet
from plait.utils.paths import cache_dir

# Models whose tensors llama.cpp names; of LLAMA, it interleaves the halves of each head of q and k.
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
}


def read_for(model: ModelSettings, folder: Path) -> StoredAdapter:
    """The adapter of a folder that belongs to a base model.

    Raises:
        StorageError, ModelError: as ``read_adapter``.
    """
    linears = inspect_model(model, cache=cache_dir()).linears
    return read_adapter(folder, {each.name: (each.in_features, each.out_features) for each in linears})


@torch.no_grad()
def write_merged(
    model: ModelSettings, folder: Path, target: Path, card: str, *, template: str | None = None
) -> None:
    """Write the base model with W + s B A in place of W, its tokeniser and a model card.

    Args:
        template: the chat template of the tokeniser; None: its own.

    Raises:
        StorageError: the target cannot be written.
    """
    stored = read_for(model, folder)
    whole = transformers_model(model, cache=cache_dir())
    transposed = {each.name: each.fan_in_fan_out for each in inspect_model(model, cache=cache_dir()).linears}
    for name, (a, b) in stored.weights.items():
        weight = cast(Tensor, whole.get_submodule(name).weight)
        change = stored.scale * (b.float() @ a.float())
        weight.copy_(weight.float() + (change.T if transposed[name] else change))
    with exported_folder(target) as draft, quiet():
        cast(Any, whole).save_pretrained(draft)
        tokeniser = load_tokeniser(model, cache=cache_dir())
        if template is not None:
            tokeniser.chat_template = template
        tokeniser.save_pretrained(draft)
        (draft / "README.md").write_text(card, encoding="utf-8")


def write_gguf(model: ModelSettings, folder: Path, target: Path, card: str) -> None:
    """Write an adapter for llama.cpp (``--lora``), to be used with the base model in GGUF.

    Raises:
        ModelError: llama.cpp's names of the model's tensors are not known here.
        StorageError: the target cannot be written.
    """
    stored = read_for(model, folder)
    config = model_config(model, cache=cache_dir())
    tensors = gguf_tensors(stored, config)
    with exported_folder(target) as draft:
        writer = gguf.GGUFWriter(draft / GGUF_FILE, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]])
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", stored.scale * stored.rank)
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor.float().contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        (draft / "README.md").write_text(card, encoding="utf-8")


def gguf_tensors(stored: StoredAdapter, config: Any) -> dict[str, Tensor]:
    """The adapter's tensors under llama.cpp's names, in its order of the rows of q and k.

    Raises:
        ModelError: the names are not known.
    """
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ModelError(
            f"a model of type {config.model_type!r}",
            f"An adapter is written as GGUF for {', '.join(ARCHITECTURES)}.",
        )
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for module, (a, b) in stored.weights.items():
        name = names.get_name(module)
        if name is None:
            raise ModelError(f"module {module}", "llama.cpp has no tensor for it.")
        count = heads.get(module.rpartition(".")[2])
        if count is not None and architecture == gguf.MODEL_ARCH.LLAMA:
            b = interleaved(b, count)
        found[f"{name}.weight.lora_a"], found[f"{name}.weight.lora_b"] = a, b
    return found


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows (heads · size, …) with the two halves of each head interleaved, as llama.cpp rotates them."""
    return rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
