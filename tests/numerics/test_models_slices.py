"""A model sliced among several processes computes what the whole one does: losses, gradients and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from threads import ThreadSlicing, together
from torch import Tensor

from plait.adapters.slices import AdapterSlices
from plait.adapters.variants import attach, named_tensors
from plait.core.errors import ModelError
from plait.core.jobs import AdapterSpec
from plait.core.settings import ClusterSettings, ModelSettings, RunSettings
from plait.cost.memory import MemoryCoefficients, MemoryShape
from plait.cost.peaks import StorageCounter
from plait.distributed.tensor import SharedSides
from plait.engine.admission import Admission, activation_bytes
from plait.engine.build import worker_facts
from plait.engine.worker import ActivationShape, HeldPart
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.models.load import inspect_model, load_model
from plait.models.slices import layer_slices, vocabulary_slice
from plait_kernels import Bank, RoutedSegment, Routing, RowCounters
from plait_kernels.loss import VocabularySlice, chunk_rows, labelled_cross_entropy

OFFSETS = (0, 7, 20)
FAMILIES = ("llama", "gemma2", "qwen3", "gpt_neox")  # grouped queries; tied; norms of heads; biases
SPEC = AdapterSpec(rank=3, target_modules="all-linear", dropout=0.1)


def model_of(family: str, cache: Path, backend: str = "reference") -> BaseModel:
    base = load_model(ModelSettings(kind="tiny", family=family, dtype="float32", seed=3), cache=cache)
    base.install(backend=backend)
    return base


def bank_of(base: BaseModel) -> Bank:
    """An adapter on every layer, whose B is not zero."""
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    slices = AdapterSlices(base.slices, base.slicing)
    names = [site.name for site in base.sites]
    attach(bank, "one", SPEC, names, seed=5, weight_of=base.frozen_weight, slices=slices)
    for name, tensor in named_tensors(bank, "one").items():
        if "lora_B" in name:
            linear = next(each for each in base.linears if f".{each.name}." in name)
            generator = torch.Generator().manual_seed(base.linears.index(linear))
            tensor.copy_(slices.own(name, 0.1 * torch.randn(linear.out_features, 3, generator=generator)))
    bank.refresh()
    return bank


def train(base: BaseModel, bank: Bank) -> Tensor:
    """The loss of a microbatch of two samples; gradients are in the bank."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, base.vocabulary, (OFFSETS[-1],), generator=generator)
    row = torch.arange(OFFSETS[-1])
    counters = RowCounters(torch.ones_like(row), torch.zeros_like(row), torch.zeros_like(row), row)
    routing = Routing.build(bank, [RoutedSegment("one", 0, OFFSETS[-1])], counters, training=True)
    context = MicrobatchContext.of(tokens, OFFSETS, routing=routing)
    rows, targets = torch.tensor([2, 5, 9, 17]), torch.tensor([4, 8, 115, 216])
    loss, _ = base.loss(base.hidden(context), rows, targets, torch.full((4,), 0.25))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def whole_gradients(base: BaseModel, bank: Bank) -> dict[str, Tensor]:
    slices = AdapterSlices(base.slices, base.slicing)
    return {
        f"base_model.model.{site}.lora_{which}.weight": slices.joined(
            f"base_model.model.{site}.lora_{which}.weight", tensor
        ).clone()
        for site, pair in bank.gradients("one").items()
        for which, tensor in zip("AB", pair, strict=True)
    }


Found = tuple[Tensor, dict[str, Tensor], float]


def one_process(family: str, cache: Path, backend: str) -> Found:
    base = model_of(family, cache, backend)
    bank = bank_of(base)
    loss = train(base, bank)
    gradients = whole_gradients(base, bank)
    return loss, gradients, math.fsum(float(each.double().square().sum()) for each in gradients.values())


def one_slice(bases: Sequence[BaseModel], slicing: ThreadSlicing) -> Found:
    base = bases[slicing.number]
    base.take_slice(slicing)
    bank = bank_of(base)
    loss = train(base, bank)
    squares = SharedSides(slicing, base.slices, bank.sites).complete(bank.block("one"))
    return loss, whole_gradients(base, bank), squares


def error_of(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a tensor's gradient."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - own).norm() / own.norm()) for name, own in expected.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_give_the_whole_models_loss_and_gradients(family: str, tmp_path: Path) -> None:
    backend = "grouped" if family == "llama" else "reference"
    loss, gradients, squares = one_process(family, tmp_path, backend)
    bases = [model_of(family, tmp_path, backend) for _ in range(6)]  # from one generator of torch
    for own_bases in (bases[:2], bases[2:]):
        found = together(len(own_bases), partial(one_slice, own_bases))
        for own_loss, own, own_squares in found:
            assert float(own_loss) == pytest.approx(float(loss), rel=1e-6)
            assert error_of(own, gradients) < 1e-5, len(found)
            assert own_squares == pytest.approx(squares, rel=1e-6)
            assert torch.equal(own_loss, found[0][0])
            assert own_squares == found[0][2]
            assert all(torch.equal(own[name], found[0][1][name]) for name in own)


def test_a_mask_counted_over_a_slices_own_features_is_noticed(
    tmp_path: Path,
) -> None:
    _, gradients, _ = one_process("llama", tmp_path, "reference")
    bases = [model_of("llama", tmp_path) for _ in range(2)]

    def counted_anew(own: ThreadSlicing) -> Found:
        base = bases[own.number]
        base.take_slice(own)
        base._sites = [
            [tuple(replace(site, first_feature=0) for site in sites) for sites in layer]
            for layer in base._all_sites
        ]
        bank = bank_of(base)
        loss = train(base, bank)
        return loss, whole_gradients(base, bank), 0.0

    for _, own, _ in together(2, counted_anew):
        assert error_of(own, gradients) > 0.1


@pytest.mark.parametrize(
    ("family", "count", "words"),
    [
        ("gpt2", 2, r"cluster.tensor=2 with a model of type 'gpt2'.*\(none\)"),
        ("phi3", 2, r"o_proj \(rowwise_split_input\)"),
        ("llama", 3, "4 heads of queries and 2 of keys"),
        ("llama", 8, "4 heads of queries"),
    ],
)
def test_what_cannot_be_sliced_is_refused(family: str, count: int, words: str, tmp_path: Path) -> None:
    base = model_of(family, tmp_path)
    with pytest.raises(ModelError, match=words):
        layer_slices(base.linears, base._model.config, 0, count)
    with pytest.raises(ModelError, match=r"^cluster\.deployment=\[2x2\]"):
        layer_slices(base.linears, base._model.config, 0, count, "cluster.deployment=[2x2]")


def test_a_model_that_gives_other_results_in_slices_is_refused(tmp_path: Path) -> None:
    bases = [model_of("llama", tmp_path) for _ in range(2)]
    with torch.no_grad():
        bases[1].groups[0].weight[0] += 1.0  # the two have read different files
    with pytest.raises(ModelError, match="layer 0 in slices differs"):
        together(2, lambda own: bases[own.number].take_slice(own))


@pytest.mark.parametrize("count", [2, 4])
def test_adapters_of_slices_count_by_what_each_has(count: int, tmp_path: Path) -> None:
    """Four slices of two heads of keys have each twice."""
    tiny = ModelSettings(kind="tiny", dtype="float32", seed=3)
    settings = RunSettings(model=tiny, cluster=ClusterSettings(processes=count, tensor=count))
    facts = worker_facts(settings, inspect_model(tiny, cache=tmp_path), 2**30)
    demand = Admission(facts, settings).demand(SPEC, 20)
    bases = [model_of("llama", tmp_path) for _ in range(count)]
    whole = numbers_of(bases[0])

    def part(own: ThreadSlicing) -> int:
        bases[own.number].take_slice(own)
        return numbers_of(bases[own.number])

    layers = range(facts.shape.layers)
    expected = demand.bytes_on(layers, count) / demand.bytes_on(layers)
    assert [own / whole for own in together(count, part)] == pytest.approx([expected] * count)


def numbers_of(base: BaseModel) -> int:
    """Of an adapter on all its layers."""
    return sum(tensor.numel() for tensor in named_tensors(bank_of(base), "one").values())


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_memory_of_a_slice_s_loss_is_predicted(count: int) -> None:
    """A chunk has as many logits in slices as whole: each row a part of them, so there are more rows."""
    vocabulary, rows, hidden = 32_000, 4096, 64
    most = vocabulary_slice(vocabulary, 0, count).stop
    own = None if count == 1 else VocabularySlice(0, lambda each: [each] * count, lambda _: None)
    with torch.device("meta"), StorageCounter() as counter:
        states = torch.empty(rows, hidden, requires_grad=True)
        weight, targets = torch.empty(most, hidden), torch.empty(rows, dtype=torch.int64)
        before = counter.live
        labelled_cross_entropy(
            states, weight, None, targets, torch.empty(rows), chunk=chunk_rows(most), own=own
        )
        logits = counter.peak - before - states.nbytes  # beside the gradient of the states
    shape = ActivationShape(2, hidden, 2, vocabulary, 0, 0, 4, chunk_rows(vocabulary), 256)
    rule = partial(activation_bytes, shape, capacity=rows, longest=30, checkpointing=False)
    first, last = (HeldPart(range(at, at + 1), 0, 0, tensor=count) for at in range(2))
    by_rule = rule(part=last) - rule(part=first)
    fitted = MemoryCoefficients(logit_row=12.0 * vocabulary)
    by_fit = fitted.head(MemoryShape.of([rows]), chunk_rows(most), count)
    print(count, chunk_rows(most), logits / 2**20, by_rule / 2**20, by_fit / 2**20)
    assert by_rule == by_fit == pytest.approx(logits, rel=0.03)
