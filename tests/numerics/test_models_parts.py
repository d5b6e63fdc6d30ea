"""A model that is read by parts has the bits of one that is read whole, and reads no more than its part."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_model_families import SIZES, TOKENS
from test_models_shards import ThreadSharding
from threads import ThreadSlicing, together
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from plait.core.errors import ModelError
from plait.core.settings import ModelSettings
from plait.models import parts
from plait.models.base import BaseModel
from plait.models.load import load_model, load_part, transformers_model
from plait.models.parts import Part
from plait.models.tiny import byte_tokeniser

# Grouped queries; tied, scaled; merged projections; transposed, learnt positions; biases; experts merged.
FAMILIES = ("llama", "gemma3", "phi3", "gpt2", "gpt_neox", "mixtral")


def saved(family: str, folder: Path, **options: Any) -> ModelSettings:
    """A model of four layers in several files (Mixtral: two layers)."""
    if family == "mixtral":
        config = AutoConfig.for_model(family, **{k: v for k, v in (SIZES | TOKENS).items() if v != 259})
        config.vocab_size = 259
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(config)
    else:
        model = transformers_model(
            ModelSettings(kind="tiny", family=family, dtype="float32", seed=3), cache=folder
        )
    model.save_pretrained(folder, max_shard_size="150KB", **options)
    byte_tokeniser().save_pretrained(folder)
    return ModelSettings(kind="hf", id=str(folder), dtype="float32")


def same(found: BaseModel, expected: BaseModel) -> None:
    pairs = list(zip(found.tensors(), expected.tensors(), strict=True))
    assert pairs
    assert all(torch.equal(own, other) and own.dtype == other.dtype for own, other in pairs)
    assert found.sites == expected.sites
    assert found.inputs == expected.inputs
    assert found.linears == expected.linears
    assert found.vocabulary == expected.vocabulary
    assert found.own == expected.own


class Reading:
    """Bytes that each thread reads of safetensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = Counter[int]()
        opened, count = parts.safe_open, self._count

        class File:
            def __init__(self, *given: Any, **options: Any) -> None:
                self._file = opened(*given, **options)

            def get_slice(self, name: str) -> Any:
                return Slice(self._file.get_slice(name))

        class Slice:
            def __init__(self, inner: Any) -> None:
                self._inner = inner
                self.get_shape = inner.get_shape

            def __getitem__(self, rows: Any) -> Tensor:
                found: Tensor = self._inner[rows]
                count(found)
                return found

        monkeypatch.setattr(parts, "safe_open", File)

    def _count(self, found: Tensor) -> None:
        self.bytes[threading.get_ident()] += found.nbytes


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_read_their_own_layers_only(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = saved(family, tmp_path)
    reading = Reading(monkeypatch)
    layers = load_model(settings, cache=tmp_path).layer_count
    splits = [(0, 1, layers), (0, 1, 3, 4)] if layers == 4 else [(0, 1, 2)]
    for split in splits:
        for start, stop in zip(split, split[1:], strict=False):
            whole = load_model(settings, cache=tmp_path)
            whole.keep(range(start, stop))
            reading.bytes.clear()
            same(load_part(settings, Part(range(start, stop)), cache=tmp_path), whole)
            assert 0 < reading.bytes.total() <= 1.01 * whole.weight_bytes


def run_together(
    count: int, settings: ModelSettings, cache: Path, part: Callable[[ThreadSlicing], Part]
) -> list[BaseModel]:
    return together(count, lambda own: load_part(settings, part(own), cache=cache))


@pytest.mark.parametrize(("family", "count"), [("llama", 2), ("llama", 4), ("gemma2", 2), ("qwen3", 2)])
def test_slices_are_read_once_by_all_together(
    family: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = saved(family, tmp_path)
    layers = range(1, 4) if count == 2 else range(4)
    wholes = [load_model(settings, cache=tmp_path) for _ in range(count)]
    size = wholes[0].weight_bytes

    def cut(own: ThreadSlicing) -> BaseModel:
        wholes[own.number].keep(layers)
        wholes[own.number].take_slice(own)
        return wholes[own.number]

    expected, reading = together(count, cut), Reading(monkeypatch)
    found = run_together(count, settings, tmp_path, lambda own: Part(layers, slicing=own))
    for own, other in zip(found, expected, strict=True):
        same(own, other)
    assert len(reading.bytes) == count
    assert max(reading.bytes.values()) <= 1.05 * size / count


@pytest.mark.parametrize(("family", "count"), [("llama", 3), ("gpt2", 2), ("mixtral", 2)])
def test_shards_are_read_once_by_all_together(
    family: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = saved(family, tmp_path)
    wholes = [load_model(settings, cache=tmp_path) for _ in range(count)]
    size, layers = wholes[0].weight_bytes, wholes[0].own

    def sharding(own: ThreadSlicing) -> ThreadSharding:
        return ThreadSharding(own.number, own.count, own._barrier, own._given)

    def cut(own: ThreadSlicing) -> BaseModel:
        wholes[own.number].shard(sharding(own))
        return wholes[own.number]

    expected, reading = together(count, cut), Reading(monkeypatch)
    found = run_together(count, settings, tmp_path, lambda own: Part(layers, sharding=sharding(own)))
    for own, other in zip(found, expected, strict=True):
        same(own, other)
    assert max(reading.bytes.values()) <= 1.05 * size / count


def test_a_process_holds_one_whole_layer_at_most_besides_its_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = saved("llama", tmp_path)
    base = load_model(settings, cache=tmp_path)
    layer = sum(each.nbytes for each in base.layers[0].parameters())
    outside = base.weight_bytes - 4 * layer
    most = [0] * 4
    prepare = BaseModel._prepare

    def noting(self: BaseModel, layers: range) -> None:
        prepare(self, layers)
        number = int(threading.current_thread().name.rpartition("_")[2])
        most[number] = max(most[number], self.weight_bytes)

    monkeypatch.setattr(BaseModel, "_prepare", noting)
    run_together(4, settings, tmp_path, lambda own: Part(range(4), slicing=own))
    assert 0 < max(most) <= outside + layer


def test_models_without_safetensors_are_read_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = saved("llama", tmp_path)
    whole = load_model(settings, cache=tmp_path)
    for each in tmp_path.glob("model*"):
        each.unlink()
    model = transformers_model(ModelSettings(kind="tiny", dtype="float32", seed=3), cache=tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    whole.keep(range(1, 2))
    same(load_part(settings, Part(range(1, 2)), cache=tmp_path), whole)
    assert "has no safetensors" in capsys.readouterr().err


def test_missing_weights_of_the_part_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    settings = saved("llama", tmp_path)
    lost = "model.layers.2.mlp.up_proj.weight"
    for path in tmp_path.glob("*.safetensors"):
        weights = load_file(path)
        if weights.pop(lost, None) is not None:
            save_file(weights, path, metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(lost, "unknown"))
    with pytest.raises(ModelError, match=r"lack 1 weights, such as model.layers.2.mlp.up_proj"):
        load_part(settings, Part(range(2, 4)), cache=tmp_path)
