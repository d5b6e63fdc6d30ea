"""Quantised frozen weights: what they stand for against naive references, and layers with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.cost.peaks import StorageCounter
from plait_kernels import Bank, RoutedSegment, Routing, RowCounters, Site, multi_lora_linear, quantised
from plait_kernels.backends import BACKENDS
from plait_kernels.quantised import (
    MODES,
    Nf4,
    Quantised,
    dynamic_codes,
    made_bytes,
)

CPU = torch.device("cpu")
# As QLoRA's appendix E prints them.
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
]
SHAPES = [(96, 64), (17, 33), (300, 77), (64, 640)]


def naive_nf4(weight: Tensor) -> Tensor:
    """Block by block and weight by weight."""
    codes, scale_codes = torch.tensor(NF4), dynamic_codes(CPU)
    blocks = torch.split(weight.float().reshape(-1), 64)
    largest = torch.stack([block.abs().max() for block in blocks])
    mean = largest.mean()
    scales = torch.cat(
        [
            scale_codes[((part / part.abs().max()).unsqueeze(1) - scale_codes).abs().argmin(1)]
            * part.abs().max()
            for part in torch.split(largest - mean, 256)
        ]
    )
    nearest = [
        codes[((block / top).unsqueeze(1) - codes).abs().argmin(1)] * (scale + mean)
        for block, top, scale in zip(blocks, largest, scales, strict=True)
    ]
    return torch.cat(nearest).view(weight.shape)


def random_weight(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_nf4_has_quantiles_of_a_normal_distribution() -> None:
    """8 evenly spaced from the middle down and 9 up, to the same outermost probability: the mean of 1 − 1/30
    and 1 − 1/32. They share 0, and all are divided by the largest."""
    outermost = (1 - 1 / 30 + 1 - 1 / 32) / 2
    above = torch.special.ndtri(torch.linspace(0.5, outermost, 9, dtype=torch.float64))
    below = -torch.special.ndtri(torch.linspace(0.5, outermost, 8, dtype=torch.float64))
    expected = torch.cat((below.flip(0), above[1:])) / above[-1]
    assert pytest.approx(expected.tolist(), abs=1e-6) == NF4


@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_is_the_nearest_code_of_each_block(shape: tuple[int, int]) -> None:
    weight = random_weight(shape)
    assert torch.equal(Quantised((weight,), "nf4").dense(), naive_nf4(weight))


@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_is_that_of_bitsandbytes(shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = random_weight(shape)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    own = Nf4(weight).tensors()
    assert torch.equal(packed.view(-1), own[0][: packed.numel()])
    # A scale halfway between two codes may be rounded to either.
    assert (state.absmax.int() - own[1].int()).abs().max() <= 1
    assert torch.equal(functional.create_dynamic_map(), dynamic_codes(CPU))


@pytest.mark.parametrize(("mode", "most", "largest"), [("int8", 0.5 / 127, 127.0), ("fp8", 2.0**-4, 448.0)])
def test_rows_in_8_bits_have_scales_of_their_own(mode: str, most: float, largest: float) -> None:
    weight = random_weight((17, 33)) * torch.logspace(-3, 3, 17).unsqueeze(1)
    weight[3] = 0.0
    kept = Quantised((weight,), mode)
    off = (kept.dense() - weight).abs()
    assert bool((off <= most * 1.0001 * weight.abs().amax(1, keepdim=True)).all())
    assert off.max() > 0
    values, _ = kept.tensors()
    assert set(values.float().abs().amax(1).tolist()) == {0.0, largest}, "a row's largest is the last code"


@pytest.mark.parametrize("mode", MODES)
def test_slices_are_written_as_the_whole_with_the_bytes_that_are_counted(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Quantised((random_weight((300, 230)), random_weight((17, 230))), mode)
    whole = kept.dense()
    found = {}
    for written in (quantised.WRITTEN, 64 * 256):
        monkeypatch.setattr(quantised, "WRITTEN", written)
        with StorageCounter() as counter:
            for tensor in kept.tensors():
                counter.add(tensor)
            before = counter.live
            made = kept.dense()
        found[written] = counter.peak - before
        assert torch.equal(made, whole)
        counted = made_bytes(kept.sizes, 4, mode)
        assert 0.97 * counted <= found[written] <= counted + 8192, (written, found, counted)  # tables
    sliced, at_once = sorted(found.values())
    assert sliced < at_once


@pytest.mark.parametrize("mode", MODES)
def test_siblings_are_quantised_as_if_alone(mode: str) -> None:
    weights = [random_weight((24, 40), 1), random_weight((7, 40), 2), random_weight((11, 40), 3)]
    together = Quantised(weights, mode).dense()
    assert torch.equal(together, torch.cat([Quantised((each,), mode).dense() for each in weights]))


def run(weight: Tensor | Quantised, x: Tensor, backend: str, *, adapters: bool = True) -> list[Tensor]:
    """Output, gradient of x and gradients of A and B of three segments, the second without an adapter."""
    sites = (Site("q", 0, 64, 64), Site("k", 1, 64, 32))
    bank = Bank(sites, device=CPU, compute_dtype=x.dtype)
    segments = []
    for number, (start, stop) in enumerate([(0, 9), (14, 30)] if adapters else []):
        name = str(number)
        bank.attach(name, rank=3 + number, scale=2.0, dropout=0.1, seed=number, sites=["q", "k"])
        for own in bank.weights(name).values():
            for index, tensor in enumerate(own):
                tensor.copy_(random_weight((tensor.shape[0], tensor.shape[1]), 10 * number + index))
        segments.append(RoutedSegment(name, start, stop))
    bank.refresh()
    counters = RowCounters(*(torch.arange(30) for _ in range(4)))
    routing = Routing.build(bank, segments, counters, training=True)
    given = x.clone().requires_grad_()
    out = multi_lora_linear(
        given, weight, random_weight((1, 96), 7)[0], ["q", "k"], bank, routing, backend=backend
    )
    (out * random_weight((30, 96), 8)).sum().backward()
    assert given.grad is not None
    gradients = [
        tensor for segment in segments for own in bank.gradients(segment.adapter).values() for tensor in own
    ]
    return [out.detach(), given.grad, *gradients]


@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_each_backend_runs_on_quantised_weights(mode: str, backend: str, adapters: bool) -> None:
    if not BACKENDS[backend].runs(CPU, torch.float32):
        pytest.skip(f"{backend} does not run here")
    kept = Quantised((random_weight((64, 64), 5), random_weight((32, 64), 6)), mode)
    x = random_weight((30, 64), 4)
    found = run(kept, x, backend, adapters=adapters)
    expected = run(kept.dense(), x, backend, adapters=adapters)
    assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))
