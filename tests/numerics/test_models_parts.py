"""A model that is read by parts has the bits of one that is read whole, and reads no more than its part."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import saved
from threads import ThreadSharding, ThreadSlicing, together
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from plait.core.errors import ModelError
from plait.core.settings import ModelSettings
from plait.models import parts
from plait.models.base import BaseModel
from plait.models.load import load_model, load_part, transformers_model
from plait.models.parts import Part

# Grouped queries; tied, scaled; merged projections; transposed, learnt positions; biases; experts merged.
FAMILIES = ("llama", "gemma3", "phi3", "gpt2", "gpt_neox", "mixtral")


def model_of(family: str, folder: Path) -> ModelSettings:
    """A model of four layers in several files (Mixtral: two layers)."""
    settings, model = ModelSettings(kind="tiny", family=family, dtype="float32", seed=3), None
    if family == "mixtral":
        config = MixtralConfig(
            vocab_size=259,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            initializer_range=0.1,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = MixtralForCausalLM(config)
    return saved(settings, folder, model)


def same(found: BaseModel, expected: BaseModel) -> None:
    pairs = list(zip(found.tensors(), expected.tensors(), strict=True))
    assert pairs
    for own, other in pairs:
        assert own.dtype == other.dtype, (own.shape, own.dtype, other.dtype)
        assert torch.equal(own, other), (own, other)
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
    settings = model_of(family, tmp_path)
    reading = Reading(monkeypatch)
    splits = {"llama": [(0, 1, 4), (0, 1, 3, 4)], "mixtral": [(0, 1, 2)]}
    for split in splits.get(family, [(0, 1, 3, 4)]):
        for start, stop in pairwise(split):
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
    settings = model_of(family, tmp_path)
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
    settings = model_of(family, tmp_path)
    wholes = [load_model(settings, cache=tmp_path) for _ in range(count)]
    size, layers = wholes[0].weight_bytes, wholes[0].own

    def cut(own: ThreadSlicing) -> BaseModel:
        wholes[own.number].shard(ThreadSharding.of(own))
        return wholes[own.number]

    expected, reading = together(count, cut), Reading(monkeypatch)
    found = run_together(count, settings, tmp_path, lambda own: Part(layers, sharding=ThreadSharding.of(own)))
    for own, other in zip(found, expected, strict=True):
        same(own, other)
    assert max(reading.bytes.values()) <= 1.05 * size / count


def test_a_process_holds_one_whole_layer_at_most_besides_its_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = model_of("llama", tmp_path)
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
    found = run_together(4, settings, tmp_path, lambda own: Part(range(4), slicing=own))
    own = sum(each.nbytes for each in found[0].layers[0].parameters())
    assert own < 0.35 * layer  # two heads of keys are repeated
    assert outside + layer < max(most) <= outside + layer + 3 * own


def test_models_without_safetensors_are_read_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = model_of("llama", tmp_path)
    whole = load_model(settings, cache=tmp_path)
    for each in tmp_path.glob("model*"):
        each.unlink()
    model = transformers_model(ModelSettings(kind="tiny", dtype="float32", seed=3), cache=tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    whole.keep(range(1, 2))
    same(load_part(settings, Part(range(1, 2)), cache=tmp_path), whole)
    assert "has no safetensors" in capsys.readouterr().err


def test_missing_weights_of_the_part_are_refused(tmp_path: Path) -> None:
    settings = model_of("llama", tmp_path)
    lost = "model.layers.2.mlp.up_proj.weight"
    for path in tmp_path.glob("*.safetensors"):
        weights = load_file(path)
        if weights.pop(lost, None) is not None:
            save_file(weights, path, metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    where = listed["weight_map"].pop(lost)
    index.write_text(json.dumps(listed))
    with pytest.raises(ModelError, match=r"lack 1 weights, such as model.layers.2.mlp.up_proj"):
        load_part(settings, Part(range(2, 4)), cache=tmp_path)
    listed["weight_map"][lost] = where
    index.write_text(json.dumps(listed))
    with pytest.raises(ModelError, match=r"does not contain tensor model.layers.2.mlp.up_proj"):
        load_part(settings, Part(range(2, 4)), cache=tmp_path)
    load_part(settings, Part(range(2)), cache=tmp_path)  # another's part is not read
