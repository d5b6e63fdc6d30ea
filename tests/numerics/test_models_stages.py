"""A model cut into stages of unequal size computes what the whole model does, and frees the rest."""

from __future__ import annotations

import gc
import weakref
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.adapters.variants import attach
from plait.core.jobs import AdapterSpec
from plait.core.settings import ModelSettings
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.models.load import load_model
from plait_kernels import Bank, RoutedSegment, Routing, RowCounters

OFFSETS = (0, 7, 20)
FAMILIES = ("llama", "gpt2", "gemma3")  # grouped queries; learnt positions and a tied head; a scale, tied
SPLITS = ((1, 3), (2, 2), (3, 1), (1, 1, 2), (1, 1, 1, 1))


def stages_of(family: str, split: tuple[int, ...], cache: Path) -> list[BaseModel]:
    """The stages, each a model of its own with the other layers freed."""
    settings = ModelSettings(kind="tiny", family=family, dtype="float32", seed=3)
    bounds = [0, *accumulate(split)]
    found = []
    for start, stop in pairwise(bounds):
        base = load_model(settings, cache=cache)
        base.install(backend="reference")
        base.keep(range(start, stop))
        found.append(base)
    return found


class Side:
    """A stage with its adapter, dropout included."""

    def __init__(self, base: BaseModel) -> None:
        self.base = base
        self.bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
        spec = AdapterSpec(rank=3, target_modules="all-linear", dropout=0.1)
        here = [site.name for site in base.sites]
        attach(self.bank, "one", spec, here, seed=5, weight_of=base.frozen_weight)
        for site, (_, b) in self.bank.weights("one").items():
            seed = base.linears.index(next(each for each in base.linears if each.name == site))
            b.copy_(0.1 * torch.randn(b.shape, generator=torch.Generator().manual_seed(seed)))
        self.bank.refresh()

    def context(self) -> MicrobatchContext:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(3, self.base.vocabulary, (OFFSETS[-1],), generator=generator)
        row = torch.arange(OFFSETS[-1])
        counters = RowCounters(torch.ones_like(row), torch.zeros_like(row), torch.zeros_like(row), row)
        segments = [RoutedSegment("one", 0, OFFSETS[-1])]
        routing = Routing.build(self.bank, segments, counters, training=True)
        return MicrobatchContext.of(tokens, OFFSETS, routing=routing)


def train(sides: list[Side]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients; what passes between stages is copied, as between processes."""
    rows = torch.tensor([2, 5, 9, 17])
    entering, leaving = [], list[Tensor]()
    given: Tensor | None = None
    for side in sides:
        context = side.context()
        leaving.append(side.base.hidden(context, given))
        entering.append(given)
        given = leaving[-1].detach().clone().requires_grad_()
    loss, _ = sides[-1].base.loss(leaving[-1], rows, torch.tensor([4, 8, 15, 16]), torch.full((4,), 0.25))
    loss.backward()  # type: ignore[no-untyped-call]
    for before, start in zip(leaving[-2::-1], entering[:0:-1], strict=True):
        assert start is not None
        assert start.grad is not None
        before.backward(start.grad.clone())  # type: ignore[no-untyped-call]
    gradients = {
        f"{site}.{which}": tensor
        for side in sides
        for site, pair in side.bank.gradients("one").items()
        for which, tensor in zip("ab", pair, strict=True)
    }
    return loss.detach(), gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_give_the_whole_models_loss_and_gradients(family: str, tmp_path: Path) -> None:
    loss, gradients = train([Side(base) for base in stages_of(family, (4,), tmp_path)])
    assert all(bool(each.any()) for each in gradients.values())
    for split in SPLITS:
        found, own = train([Side(base) for base in stages_of(family, split, tmp_path)])
        assert torch.equal(found, loss), split
        assert own.keys() == gradients.keys()
        assert all(torch.equal(own[name], gradients[name]) for name in own), split


def test_a_stage_keeps_its_own_bytes_alone(tmp_path: Path) -> None:
    (whole,) = stages_of("gpt2", (4,), tmp_path)
    first, middle, last = stages_of("gpt2", (1, 2, 1), tmp_path)
    layer = sum(each.numel() * each.element_size() for each in whole.layers[0].parameters())
    table = whole.vocabulary * whole.hidden_size * 4
    shared = whole.weight_bytes - 4 * layer - table - 1024 * whole.hidden_size * 4  # the norm; positions
    assert middle.weight_bytes == 2 * layer + shared
    assert last.weight_bytes == layer + table + shared
    assert first.weight_bytes == whole.weight_bytes - 3 * layer
    assert (first.is_first, first.is_last, middle.is_first, last.is_last) == (True, False, False, True)


def test_weights_of_layers_outside_a_stage_are_freed(tmp_path: Path) -> None:
    """Fused modules keep views of the weights; none outlives its layer."""
    settings = ModelSettings(kind="tiny", family="llama", dtype="float32", seed=3)
    base = load_model(settings, cache=tmp_path)
    weights = [weakref.ref(group.weight) for group in base.groups]
    count = len(weights) // base.layer_count
    base.keep(range(1, 2))
    gc.collect()
    assert [index for index, each in enumerate(weights) if each() is not None] == [*range(count, 2 * count)]
