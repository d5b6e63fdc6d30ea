"""Llama-3.1-70B's shape through the real loader, over meta tensors: what each process reads and keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from plait.core.settings import ClusterSettings, ModelSettings, RunSettings
from plait.engine.build import worker_facts
from plait.models import parts
from plait.models.base import BaseModel
from plait.models.load import _find, _without_weights, inspect_model, load_part
from plait.models.parts import Part
from plait.models.tiny import byte_tokeniser
from plait.planning.model_memory import llama_linears, weight_bytes

LAYERS = 80
SIZES = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
CONFIG = LlamaConfig(**SIZES, num_hidden_layers=LAYERS, tie_word_embeddings=False)  # type: ignore[arg-type]
NORMS = 1e-4  # of the bytes, which the memory model leaves out
HF = "model.safetensors"


class Rows:
    """A tensor in a file, of which some rows may be read."""

    def __init__(self, whole: Tensor, read: list[int]) -> None:
        self._whole, self._read = whole, read

    def get_shape(self) -> list[int]:
        return [*self._whole.shape]

    def __getitem__(self, rows: Any) -> Tensor:
        found = self._whole[rows]
        self._read.append(found.numel() * found.element_size())
        return found


class File:
    """A file of safetensors that takes no room.

    Attributes:
        read: bytes of each read.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.read = tensors, list[int]()

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return [*self.tensors]

    def get_slice(self, name: str) -> Rows:
        return Rows(self.tensors[name], self.read)


class Alone:
    """One of several processes, of which the others are not there: what they have is like its own."""

    def __init__(self, number: int, count: int) -> None:
        self.number, self.count = number, count

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] * self.count

    def add(self, tensor: Tensor) -> None:
        raise AssertionError(f"nothing is computed here: {tensor.shape}")

    def begin(self, whole: Tensor, own: Tensor) -> Callable[[], None]:
        raise AssertionError(f"nothing is computed here: {whole.shape}, {own.shape}")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    folder = tmp_path_factory.mktemp("70b")
    CONFIG.save_pretrained(folder)
    byte_tokeniser().save_pretrained(folder)
    return ModelSettings(kind="hf", id=str(folder), dtype="bfloat16")


@pytest.fixture(scope="module")
def tensors(settings: ModelSettings, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    whole = _without_weights(_find(settings, tmp_path_factory.mktemp("cache"))).to(torch.bfloat16)
    found = dict(whole.state_dict())
    assert sum(each.numel() for each in found.values()) == 70_553_706_496
    return found


@pytest.fixture
def file(tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> File:
    found = File(dict(tensors))
    monkeypatch.setattr(parts, "_fetched", lambda *_, **__: HF)
    monkeypatch.setattr(parts, "safe_open", lambda *_, **__: found)
    return found


def load(settings: ModelSettings, part: Part, cache: Path) -> BaseModel:
    found = load_part(settings, part, cache=cache, device="meta")
    assert all(each.is_meta for each in found.tensors() if each.numel() > 1000)  # no memory
    return found


@pytest.mark.parametrize(
    ("stages", "stage", "slices"), [(4, 0, 1), (4, 1, 1), (4, 3, 1), (2, 0, 2), (2, 1, 2)]
)
def test_a_stage_of_70b_reads_and_keeps_what_the_memory_model_says(
    settings: ModelSettings, file: File, tmp_path: Path, stages: int, stage: int, slices: int
) -> None:
    each = LAYERS // stages
    layers = range(stage * each, (stage + 1) * each)
    slicing: Any = Alone(slices - 1, slices) if slices > 1 else None
    model = load(settings, Part(layers, slicing=slicing), tmp_path)
    static = weight_bytes(SIZES, llama_linears(SIZES, LAYERS), 2)
    expected = static.stage([each] * stages, stage)
    assert model.own == layers
    assert model.weight_bytes == pytest.approx(expected / slices, rel=NORMS)
    assert sum(file.read) == pytest.approx(expected / slices, rel=NORMS)  # its part of the rows
    assert sites_of(model, layers) == 7 * each
    cluster: dict[str, Any] = {"processes": stages * slices, "pipeline": stages, "tensor": slices}
    assert model.weight_bytes == pytest.approx(planned(settings, tmp_path, cluster, stage * slices), rel=1e-3)


def test_a_shard_of_70b_reads_and_keeps_what_the_memory_model_says(
    settings: ModelSettings, file: File, tmp_path: Path
) -> None:
    sharding: Any = Alone(2, 4)
    model = load(settings, Part(range(LAYERS), sharding=sharding), tmp_path)
    static = weight_bytes(SIZES, llama_linears(SIZES, LAYERS), 2)
    assert model.shards is not None
    kept = sum(each.nbytes for each in model.shards.tensors())
    assert kept == pytest.approx(static.layers / 4, rel=NORMS)
    assert model.shards.gathered_bytes == pytest.approx(2 * static.layers / LAYERS, rel=NORMS)
    ends = static.embedding + static.head
    assert model.weight_bytes == pytest.approx(kept + ends, rel=NORMS)
    shared = static.sharded(4, LAYERS).stage([LAYERS], 0)  # as `plait plan` counts it on a described cluster
    assert kept + ends + model.shards.gathered_bytes == pytest.approx(shared, rel=NORMS)
    assert sum(file.read) == pytest.approx((static.layers + ends) / 4, rel=NORMS)
    assert sites_of(model, range(LAYERS)) == 7 * LAYERS


def test_a_file_without_a_layer_is_refused_on_the_meta_device_too(
    settings: ModelSettings, file: File, tmp_path: Path
) -> None:
    del file.tensors["model.layers.30.mlp.up_proj.weight"]
    with pytest.raises(Exception, match=r"lack 1 weights, such as model.layers.30.mlp.up_proj.weight"):
        load(settings, Part(range(20, 40)), tmp_path)


def sites_of(model: BaseModel, layers: range) -> int:
    """Linear layers here that adapters may target, with a size."""
    found = model.sites_of(layers)
    assert all(math.prod((each.in_features, each.out_features)) for each in found)
    return len(found)


def planned(settings: ModelSettings, cache: Path, cluster: dict[str, Any], process: int) -> int:
    """Bytes that admission counts before anything is loaded."""
    cluster["layer_split"] = (LAYERS // cluster["pipeline"],) * cluster["pipeline"]
    run = RunSettings(model=settings, cluster=ClusterSettings(**cluster))
    (held,) = worker_facts(run, inspect_model(settings, cache=cache), 2**40).parts
    return held[process].weight_bytes
