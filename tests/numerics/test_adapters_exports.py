"""Adapters in other forms: merged weights against PEFT, tensors for llama.cpp against a reader of them."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from plait.adapters.exports import gguf_tensors, read_for, write_gguf, write_merged
from plait.adapters.facts import GGUF_FILE, model_card
from plait.adapters.peft_folder import export_adapter
from plait.core.errors import ModelError, StorageError
from plait.core.jobs import AdapterSpec
from plait.core.settings import ModelSettings
from plait.models.load import inspect_model, model_config, transformers_model
from plait.models.targets import resolve_targets


def made(folder: Path, family: str) -> ModelSettings:
    """An adapter on all linear layers of a tiny model."""
    model = ModelSettings(kind="tiny", family=family, dtype="float32", seed=2)
    linears = inspect_model(model, cache=folder).linears
    noise = torch.Generator().manual_seed(1)
    weights = {
        each.name: (
            torch.randn(3, each.in_features, generator=noise),
            torch.randn(each.out_features, 3, generator=noise) * 0.1,
        )
        for each in linears
    }
    assert set(weights) == set(resolve_targets("all-linear", linears))
    spec = AdapterSpec(3, alpha=4.0, target_modules="all-linear", rslora=True)
    export_adapter(folder / "adapter", spec, weights, base=f"tiny-{family}", linears=linears)
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_weights_give_pefts_logits(family: str, tmp_path: Path) -> None:
    model = made(tmp_path, family)
    own = "{{ messages }}"
    write_merged(model, tmp_path / "adapter", tmp_path / "merged", "the card", template=own)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    theirs = PeftModel.from_pretrained(transformers_model(model, cache=tmp_path), tmp_path / "adapter").eval()
    tokens = torch.arange(3, 20).unsqueeze(0)
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(whole(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        with theirs.disable_adapter():
            assert not torch.allclose(theirs(tokens).logits, expected, atol=1e-2)
    tokeniser = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokeniser.decode([5]) is not None
    assert tokeniser.chat_template == own
    assert (tmp_path / "merged" / "README.md").read_text() == "the card"


def test_llama_cpps_tensors_are_the_adapters(tmp_path: Path) -> None:
    model = made(tmp_path, "llama")
    write_gguf(model, tmp_path / "adapter", tmp_path / "out", "")
    reader = gguf.GGUFReader(tmp_path / "out" / GGUF_FILE)
    facts = {
        key: reader.fields[key].contents()
        for key in ("general.type", "general.architecture", "adapter.type", "adapter.lora.alpha")
    }
    alpha = facts.pop("adapter.lora.alpha")
    assert facts == {
        "general.type": "adapter",
        "general.architecture": "llama",
        "adapter.type": "lora",
    }
    stored, config = read_for(model, tmp_path / "adapter"), model_config(model, cache=tmp_path)
    assert alpha == pytest.approx(stored.scale * 3)  # llama.cpp scales by alpha / rank
    found = {each.name: torch.from_numpy(each.data.copy()) for each in reader.tensors}
    assert len(found) == 2 * len(stored.weights)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "down_proj": "ffn_down"}
    processor = LlamaTensorProcessor(config=config)
    for module, (a, b) in stored.weights.items():
        layer, kind = module.split(".")[2], module.rpartition(".")[2]
        if kind in names:
            name = f"blk.{layer}.{names[kind]}.weight"
            assert torch.equal(found[f"{name}.lora_a"], a)
            read = found[f"{name}.lora_b"]
            if names[kind] in heads:
                count = heads[names[kind]]
                assert not torch.equal(read, b)
                read = torch.as_tensor(processor._reverse_permute_weights(read.numpy(), count, count))
            assert torch.equal(read, b)


@pytest.mark.parametrize("write", [write_merged, write_gguf])
def test_a_full_disk_and_a_folder_that_cannot_be_made_are_reported_with_the_users_own_name(
    write: Callable[..., None], tmp_path: Path
) -> None:
    model = made(tmp_path, "llama")
    target = tmp_path / "to"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(StorageError) as full:
            write(model, tmp_path / "adapter", target, "the card")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert full.value.value.startswith(f"{target}: ")
    assert "File too large" in full.value.value
    assert sorted(tmp_path.iterdir()) == [tmp_path / "adapter"]
    target.touch()
    with pytest.raises(StorageError, match=re.escape(f"{target / 'in'}: File exists\nThe folder must be")):
        write(model, tmp_path / "adapter", target / "in", "the card")


def test_a_model_that_llama_cpp_s_names_do_not_cover_is_refused(tmp_path: Path) -> None:
    model = made(tmp_path, "gpt2")
    with pytest.raises(ModelError, match="gpt2"):
        gguf_tensors(read_for(model, tmp_path / "adapter"), model_config(model, cache=tmp_path))


def test_a_card_names_the_base_the_facts_and_the_command() -> None:
    facts = {"train.lr": 1e-3, "data.chat_template": "{{ a | trim }}\n{{ b }}\n"}
    card = model_card("a/b", "trial-0001", 20, facts, form="peft")
    assert card.startswith("---\nbase_model: a/b\n")
    assert "| train.lr | 0.001 |\n| data.chat_template | {{ a \\| trim }} {{ b }} |\n" in card
    assert "vllm serve a/b --enable-lora --max-lora-rank 32 --lora-modules trial-0001=FOLDER" in card


@pytest.mark.parametrize("form", ["peft", "merged", "gguf"])
def test_a_card_of_a_model_for_trials_names_no_server_that_cannot_load_it(form: str) -> None:
    card = model_card("tiny-llama", "trial-0001", 8, {}, form=form)
    others = {"vllm", "sglang", "llama-server"} & set(re.findall(r"[a-z-]+", card))
    assert others == ({"vllm", "sglang"} if form == "merged" else set()), "its folder has the whole model"
    assert ("plait serve FOLDER" in card) == (form == "peft")
    assert ("--form merged" in card) == (form == "peft"), "which others can load"
    assert "vllm serve tiny-llama-1b" in model_card("tiny-llama-1b", "trial-0001", 8, {}, form="peft")


def test_a_card_of_an_adapter_on_a_gguf_file_says_that_peft_cannot_load_it() -> None:
    card = model_card("models/a.gguf", "trial-0001", 8, {}, form="peft")
    assert "PEFT cannot load it as a base model" in card
    assert "vllm" not in card
