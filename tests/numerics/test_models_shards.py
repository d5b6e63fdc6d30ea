"""A model whose layers are sharded computes the same bits, with two layers' weights at a time at most."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from threads import ThreadSharding, ThreadSlicing, together
from torch import Tensor

from plait.core.settings import ModelSettings
from plait.models import shards
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.models.load import load_model


def model_of(family: str, cache: Path) -> BaseModel:
    return load_model(ModelSettings(kind="tiny", family=family, dtype="float32", seed=3), cache=cache)


def gradient(base: BaseModel, *, checkpointing: bool) -> tuple[Tensor, Tensor]:
    """The loss of two samples, and the gradient of what enters the first layer."""
    tokens = torch.arange(20) + 5
    context = MicrobatchContext.of(tokens, (0, 7, 20), checkpointing=checkpointing)
    start = base.embed(context).detach().requires_grad_()
    rows = torch.tensor([2, 5, 9, 17])
    loss, _ = base.loss(base.hidden(context, start), rows, tokens[rows + 1], torch.full((4,), 0.25))
    loss.backward()  # type: ignore[no-untyped-call]
    assert start.grad is not None
    return loss.detach(), start.grad


def layer_bytes(base: BaseModel) -> int:
    """Bytes of the storages of all layers' weights."""
    tensors = [each for layer in base.layers for each in layer.parameters()]
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    return sum(each.nbytes() for each in storages.values())


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # the second has biases and transposed weights
def test_a_sharded_model_gives_the_same_bits_with_two_layers_at_a_time(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = model_of(family, tmp_path)
    expected, whole = gradient(alone, checkpointing=False), layer_bytes(alone)
    bases = [model_of(family, tmp_path) for _ in range(3)]
    most = dict.fromkeys(range(3), 0)
    begin = shards.LayerShard.begin

    def noting(shard: shards.LayerShard) -> None:
        begin(shard)
        number = shard._sharding.number
        most[number] = max(most[number], layer_bytes(bases[number]))

    monkeypatch.setattr(shards.LayerShard, "begin", noting)

    def run(own: ThreadSlicing) -> list[tuple[Tensor, Tensor]]:
        base = bases[own.number]
        base.shard(ThreadSharding.of(own))
        assert base.shards is not None
        assert layer_bytes(base) == 0
        found = [gradient(base, checkpointing=each) for each in (False, True)]
        assert layer_bytes(base) == 0  # nothing stays gathered
        parts = sum(each.nbytes for each in base.shards.tensors())
        assert parts <= whole / own.count + 4 * len(base.layers)
        held = 2 * whole / len(base.layers)
        assert held <= most[own.number] <= held + 8 * own.count  # no more at a time
        return found

    for found in together(3, run):
        for loss, start in found:
            torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=0)
            torch.testing.assert_close(start, expected[1], rtol=1e-5, atol=1e-7)
            if family == "llama":  # its weights lie as before
                assert torch.equal(loss, expected[0])
                assert torch.equal(start, expected[1])


def test_a_process_with_fewer_microbatches_only_gathers(tmp_path: Path) -> None:
    bases = [model_of("llama", tmp_path) for _ in range(2)]
    expected = gradient(model_of("llama", tmp_path), checkpointing=False)

    def run(models: Sequence[BaseModel], own: ThreadSlicing) -> tuple[Tensor, Tensor] | None:
        base = models[own.number]
        base.shard(ThreadSharding.of(own))
        assert base.shards is not None
        if own.number == 0:
            return gradient(base, checkpointing=False)
        base.shards.idle(training=True)
        return None

    found = together(2, partial(run, bases))
    assert found[0] is not None
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected, strict=True))
