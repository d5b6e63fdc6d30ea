"""Adapters through the blocks: gradients equal PEFT's, recomputation changes no bit, the base gets none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from plait.adapters.variants import attach
from plait.core.jobs import AdapterSpec
from plait.core.settings import ModelSettings
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.models.load import load_model, transformers_model
from plait.models.targets import resolve_targets
from plait.models.tiny import FAMILIES
from plait_kernels import Bank, RoutedSegment, Routing, RowCounters

LENGTHS = (7, 13)
OFFSETS = (0, 7, 20)


def settings_of(family: str) -> ModelSettings:
    return ModelSettings(kind="tiny", family=family, dtype="float32", seed=21)


def prepare(base: BaseModel, *, dropout: float = 0.0) -> tuple[Bank, Routing]:
    """Two adapters, one sample each: one on all layers, one on the last part of the model only."""
    base.install(backend="reference")
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    last = rf".*\.{base.layer_count - 1}\..*"
    for seed, (name, targets) in enumerate((("all", "all-linear"), ("last", last))):
        spec = AdapterSpec(rank=3 + seed, target_modules=targets, dropout=dropout)
        sites = resolve_targets(spec.target_modules, base.linears)
        attach(bank, name, spec, sites, seed=seed, weight_of=base.frozen_weight)
        for _, b in bank.weights(name).values():
            b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
        bank.refresh([name])
    row = torch.arange(OFFSETS[-1])
    counters = RowCounters(torch.ones_like(row), torch.zeros_like(row), torch.zeros_like(row), row)
    segments = [RoutedSegment("all", 0, 7), RoutedSegment("last", 7, 20)]
    return bank, Routing.build(bank, segments, counters, training=True)


def tokens_of(base: BaseModel) -> Tensor:
    return torch.randint(3, base.vocabulary, (OFFSETS[-1],), generator=torch.Generator().manual_seed(1))


def backward(base: BaseModel, routing: Routing, weight: Tensor, *, checkpointing: bool) -> Tensor:
    context = MicrobatchContext.of(tokens_of(base), OFFSETS, routing=routing, checkpointing=checkpointing)
    logits = base.logits(context)
    (logits * weight).sum().backward()
    return logits.detach()


def weight_of(base: BaseModel) -> Tensor:
    return torch.randn(OFFSETS[-1], base.vocabulary, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_gradients_equal_pefts(family: str, tmp_path: Path) -> None:
    base = load_model(settings_of(family), cache=tmp_path)
    bank, routing = prepare(base)
    weight, tokens = weight_of(base), tokens_of(base)
    backward(base, routing, weight, checkpointing=False)
    for name, low, high in (("all", 0, 7), ("last", 7, 20)):
        plain = transformers_model(settings_of(family), cache=tmp_path)
        plain.set_attn_implementation("eager")
        weights, gradients = bank.weights(name), bank.gradients(name)
        rank = next(iter(weights.values()))[0].shape[0]
        config = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=list(weights), fan_in_fan_out=family == "gpt2"
        )
        model = get_peft_model(plain, config)
        parameters = dict(model.named_parameters())
        for module, pair in weights.items():
            for which, tensor in zip("AB", pair, strict=True):
                parameters[f"base_model.model.{module}.lora_{which}.default.weight"].data.copy_(tensor)
        logits = model(tokens[low:high].unsqueeze(0), use_cache=False).logits[0]
        (logits * weight[low:high]).sum().backward()
        for module, pair in gradients.items():
            for which, found in zip("AB", pair, strict=True):
                expected = parameters[f"base_model.model.{module}.lora_{which}.default.weight"].grad
                assert expected is not None
                assert float((found - expected).norm() / expected.norm()) < 1e-4, (name, module, which)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "gpt_neox"])
def test_recomputation_changes_no_bit(family: str, tmp_path: Path) -> None:
    base = load_model(settings_of(family), cache=tmp_path)
    bank, routing = prepare(base, dropout=0.2)
    results = []
    for checkpointing in (False, True):
        bank.zero_gradients()
        logits = backward(base, routing, weight_of(base), checkpointing=checkpointing)
        grads = [
            part.clone()
            for name in ("all", "last")
            for pair in bank.gradients(name).values()
            for part in pair
        ]
        results.append([logits, *grads])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    assert any(bool(grad.any()) for grad in results[0][1:])


def test_nothing_below_the_lowest_adapter_is_differentiated(tmp_path: Path) -> None:
    base = load_model(settings_of("llama"), cache=tmp_path)
    _, routing = prepare(base)
    only_last = [span for span in routing.spans if span.block.adapter == "last"]
    assert len(only_last) == 1
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    sites = resolve_targets(r".*\.2\.self_attn\.q_proj", base.linears)
    bank.attach("one", rank=2, scale=1.0, dropout=0.0, seed=0, sites=sites)
    row = torch.arange(OFFSETS[-1])
    routing = Routing.build(
        bank, [RoutedSegment("one", 0, 20)], RowCounters(row, row, row, row), training=True
    )
    context = MicrobatchContext.of(tokens_of(base), OFFSETS, routing=routing)
    hidden = base.embed(context)
    assert not hidden.requires_grad
    needed = []
    for index in range(base.layer_count):
        hidden = base.layer(index, hidden, context)
        needed.append(hidden.requires_grad)
    assert needed == [False, False, True, True]
    base.head(hidden).sum().backward()
    frozen = [*base._model.parameters()]
    assert frozen
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in frozen)
