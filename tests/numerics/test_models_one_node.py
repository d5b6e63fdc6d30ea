"""Decoder layers as one node of autograd's graph: the bits of nodes of their own, in every way to train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_a import FrozenA
from torch import Tensor

from plait.adapters.variants import VARIANTS, attach
from plait.core.jobs import AdapterSpec
from plait.core.settings import ModelSettings
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.models.fuse import OneNode, Residual, fuse_layer
from plait.models.load import load_model
from plait.models.targets import resolve_targets
from plait_kernels import Bank, RoutedSegment, Routing, RowCounters

OFFSETS = (0, 7, 20, 26)
SPECS = {
    "all": AdapterSpec(rank=3, target_modules="all-linear", dropout=0.2),
    "other": AdapterSpec(rank=4, target_modules=r".*(o_proj|up_proj)", dropout=0.1, variant=FrozenA.name),
}
LATE = {"all": AdapterSpec(rank=3, target_modules=r".*\.1\..*o_proj"), "other": SPECS["all"]}


@pytest.fixture(autouse=True)
def variant() -> Iterator[None]:
    """One that is not computed by the backends' own kernels."""
    VARIANTS.add(FrozenA.name, FrozenA())
    yield
    VARIANTS.remove(FrozenA.name)


def loaded(family: str, folder: Path, quantise: str = "none") -> BaseModel:
    settings = ModelSettings(kind="tiny", family=family, dtype="float32", seed=3, quantise=quantise)
    return load_model(settings, cache=folder)


def results(
    base: BaseModel, specs: dict[str, AdapterSpec], names: list[str | None], **how: Any
) -> list[Tensor]:
    """Hidden states, the gradient of those that enter, and the adapters', of one microbatch."""
    base.install(backend="reference")
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    for seed, (name, spec) in enumerate(specs.items()):
        sites = resolve_targets(spec.target_modules, base.linears)
        attach(bank, name, spec, sites, seed=seed, weight_of=base.frozen_weight)
    row = torch.arange(OFFSETS[-1])
    segments = [RoutedSegment(*each) for each in zip(names, OFFSETS, OFFSETS[1:], strict=False)]
    routing = Routing.build(bank, segments, RowCounters(row, row, row, row), training=True)
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, base.vocabulary, (OFFSETS[-1],), generator=drawn)
    context = MicrobatchContext.of(
        tokens, OFFSETS, routing=routing, checkpointing=how.get("checkpointing", False)
    )
    entering = torch.randn(OFFSETS[-1], base.hidden_size, generator=drawn)
    entering.requires_grad_(how.get("entering", True))
    hidden = base.hidden(context, entering)
    torch.autograd.backward(hidden, torch.randn(hidden.shape, generator=drawn))
    parts = [part for name in specs for pair in bank.gradients(name).values() for part in pair]
    assert any(bool(part.any()) for part in parts)
    return [hidden.detach(), *(() if entering.grad is None else (entering.grad,)), *parts]


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions have nodes of their own from here on."""
    monkeypatch.setattr(OneNode, "__call__", lambda self, x, **options: self.layer(x, **options))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_the_bits_are_those_of_nodes_of_their_own(
    family: str, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = loaded(family, tmp_path)
    assert all(isinstance(layer.forward, OneNode) for layer in base.layers)
    ways: list[dict[str, Any]] = [
        {"specs": SPECS, "names": ["all", None, "other"], "entering": True},
        {"specs": SPECS, "names": ["all", "other", "all"], "entering": False},
        {
            "specs": LATE,
            "names": ["all", "all", "all"],
            "entering": False,
        },  # the rest of the layer needs none
        {"specs": LATE, "names": ["all", None, None], "entering": True},
    ]
    found = [results(base, checkpointing=checkpointing, **way) for way in ways]
    one_by_one(monkeypatch)
    for way, own in zip(ways, found, strict=True):
        expected = results(base, checkpointing=checkpointing, **way)
        assert all(torch.equal(one, two) for one, two in zip(own, expected, strict=True))


@pytest.mark.parametrize("quantise", ["int8", "nf4"])
def test_a_quantised_base_has_the_same_bits(
    quantise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = loaded("llama", tmp_path, quantise)
    given: dict[str, Any] = {"specs": LATE, "names": ["all", None, "other"]}
    found = results(base, **given)
    one_by_one(monkeypatch)
    assert all(torch.equal(one, two) for one, two in zip(found, results(base, **given), strict=True))


def test_a_layer_is_one_node(tmp_path: Path) -> None:
    base = loaded("llama", tmp_path)
    context = MicrobatchContext.of(torch.arange(3, 12), (0, 4, 9))
    x = torch.randn(9, base.hidden_size, requires_grad=True)
    out = base.layer(0, x, context)
    assert out.grad_fn is not None
    assert [next_node for next_node, _ in out.grad_fn.next_functions if next_node is not None] == [
        x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    ]
    with torch.no_grad():
        assert torch.equal(base.layer(0, x, context), out)


def test_what_needs_no_gradient_asks_for_none(tmp_path: Path) -> None:
    base = loaded("llama", tmp_path)
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    bank.attach("one", rank=2, scale=1.0, dropout=0.0, seed=0, sites=[base.sites[-1].name])
    row = torch.arange(9)
    routing = Routing.build(
        bank, [RoutedSegment("one", 0, 9)], RowCounters(row, row, row, row), training=True
    )
    context = MicrobatchContext.of(torch.arange(3, 12), (0, 4, 9), routing=routing)
    hidden = base.embed(context)
    for index in range(base.layer_count):
        assert not hidden.requires_grad
        hidden = base.layer(index, hidden, context)
    assert hidden.requires_grad


def test_a_layer_with_more_in_it_keeps_nodes_of_their_own(tmp_path: Path) -> None:
    """Something between the steps, which a chain would not differentiate."""
    base = loaded("llama", tmp_path)
    layer = base.layers[0]
    assert isinstance(layer.forward, OneNode)
    plain = layer.forward.layer
    inner = plain.mlp.forward
    plain.mlp.forward = lambda x: inner(x) * 2.0
    context = MicrobatchContext.of(torch.arange(3, 12), (0, 4, 9))
    rotation = base._rotation(0, context)
    layer.forward = type(layer).forward.__get__(layer)
    with torch.no_grad():
        fuse_layer(layer, base._binding, context, rotation)
    assert not isinstance(layer.forward, OneNode)
    assert isinstance(plain, Residual)
    drawn = torch.randn(9, base.hidden_size, generator=torch.Generator().manual_seed(0))
    x = drawn.requires_grad_()
    torch.autograd.backward(base.layer(0, x, context).sum())
    assert x.grad is not None
    step, direction = 1e-2, torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ahead, behind = (base.layer(0, x + sign * step * direction, context) for sign in (1.0, -1.0))
    slope = float((ahead.double() - behind.double()).sum()) / (2 * step)
    assert slope == pytest.approx(float((x.grad * direction).sum()), rel=1e-2)
