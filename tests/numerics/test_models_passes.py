"""The model's blocks with every pass by Triton, in its interpreter: as without it, and joint as solo."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.adapters.variants import attach
from plait.core.jobs import AdapterSpec
from plait.core.settings import ModelSettings
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.models.load import load_model
from plait.models.lora import LinearGroup
from plait.models.targets import resolve_targets
from plait_kernels import Bank, RoutedSegment, Routing, RowCounters, triton_backend
from plait_kernels.backends import BACKENDS
from plait_kernels.launching import noted

LENGTHS = {"one": 7, "two": 13}  # rows of each adapter
# Launches of rotations, gated MLPs, norms of sums, activations and attention with a softcap in a layer,
# forward: attention with norms of q and k is not fused, Gemma has norms of what is added, and GPT-NeoX and
# Cohere add attention and MLP to the same; of Cohere's both read one norm, so gate and up are no group.
FAMILIES = {
    "llama": (1, 1, 1, 0, 0),
    "phi3": (1, 1, 1, 0, 0),
    "gemma2": (1, 1, 0, 0, 1),
    "gemma3": (0, 1, 0, 0, 0),
    "cohere": (0, 0, 0, 1, 0),
    "gpt_neox": (0, 0, 0, 1, 0),
    "gpt2": (0, 0, 1, 1, 0),
}
# Each family's last layer has adapters on some linear layers that are not in one group.
SOME = {"llama": "q_proj|down_proj", "gemma2": "q_proj|down_proj", "gpt2": "c_attn|c_fc"}

pytestmark = [
    pytest.mark.skipif(
        not triton_backend.available(torch.device("cpu")), reason="Triton's interpreter is off"
    ),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]


def model(family: str, folder: Path) -> BaseModel:
    return load_model(ModelSettings(kind="tiny", family=family, dtype="float32", seed=21), cache=folder)


def bank_of(base: BaseModel, targets: str) -> Bank:
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    for seed, name in enumerate(LENGTHS):
        spec = AdapterSpec(rank=3 + seed, target_modules=targets, dropout=0.2)
        sites = resolve_targets(spec.target_modules, base.linears)
        attach(bank, name, spec, sites, seed=seed, weight_of=base.frozen_weight)
        for _, b in bank.weights(name).values():
            b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
    bank.refresh()
    return bank


def run(base: BaseModel, bank: Bank, names: list[str]) -> dict[str, list[Tensor]]:
    """Logits and gradients of each adapter's rows, of these adapters together."""
    lengths = [LENGTHS[name] for name in names]
    offsets = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    row = torch.cat([torch.arange(length) for length in lengths])
    ones = torch.ones_like(row)
    counters = RowCounters(ones, ones, ones, row)
    segments = [RoutedSegment(*each) for each in zip(names, offsets, offsets[1:], strict=False)]
    routing = Routing.build(bank, segments, counters, training=True)
    drawn = {name: torch.Generator().manual_seed(length) for name, length in LENGTHS.items()}
    tokens = [torch.randint(3, base.vocabulary, (LENGTHS[name],), generator=drawn[name]) for name in names]
    weights = [torch.randn(LENGTHS[name], base.vocabulary, generator=drawn[name]) for name in names]
    bank.zero_gradients()
    logits = base.logits(MicrobatchContext.of(torch.cat(tokens), offsets, routing=routing))
    (logits * torch.cat(weights)).sum().backward()
    return {
        name: [
            logits[low:high].detach().clone(),
            *(part.clone() for pair in bank.gradients(name).values() for part in pair),
        ]
        for name, low, high in zip(names, offsets, offsets[1:], strict=False)
    }


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_compute_the_same_with_triton_s_passes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes only: the adapters' own kernels have tests of their own, and take long in the interpreter."""
    exact = BACKENDS["reference"]
    monkeypatch.setitem(
        BACKENDS, "triton", replace(BACKENDS["triton"], forward=exact.forward, backward=exact.backward)
    )
    monkeypatch.setattr(LinearGroup, "gated_mlp", lambda *_: None)
    base = model(family, tmp_path)
    bank = bank_of(base, "all-linear")
    base.install(backend="reference")
    expected = run(base, bank, list(LENGTHS))
    base.install(backend="triton")
    launches: Counter[str] = Counter()

    def note(kernel: Any, given: tuple[object, ...]) -> None:
        residual = {"rms": 1, "rms_back": 4}.get(kernel.__name__)
        launches[kernel.__name__] += 1
        launches["residual"] += residual is not None and given[residual] is not None

    with noted(note):
        found = run(base, bank, list(LENGTHS))
    for name in LENGTHS:
        assert_close(found[name], expected[name])
    rotations, gates, sums, acts, capped = (base.layer_count * count for count in FAMILIES[family])
    assert launches["rotate"] == 2 * rotations  # and back
    assert launches["gated"] == launches["gated_back"] == gates
    # Backward, both norms of a layer have the gradient of what passes them, but for the first of all.
    assert launches["residual"] == max(0, 3 * sums - 1)
    assert launches["rms"] > 0
    assert launches["rms_back"] > 0
    assert launches["activate"] == launches["activate_back"] == acts
    assert launches["attend"] == launches["query_gradient"] == launches["key_gradient"] == capped


@pytest.mark.parametrize("family", SOME)
def test_joint_equals_solo_with_every_kernel_on(family: str, tmp_path: Path) -> None:
    base = model(family, tmp_path)
    bank = bank_of(base, rf".*\.3\..*({SOME[family]})")
    base.install(backend="triton")
    joint = run(base, bank, list(LENGTHS))
    again = run(base, bank, list(LENGTHS))
    for name in LENGTHS:
        assert all(torch.equal(one, two) for one, two in zip(joint[name], again[name], strict=True))
        assert_close(joint[name], run(base, bank, [name])[name])
