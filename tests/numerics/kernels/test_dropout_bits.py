"""Which features were dropped, as the bits that Triton's forward leaves for its backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plait_kernels import RowCounters, dropout_mask, multi_lora_linear
from plait_kernels.autotuning import with_fused
from plait_kernels.layer import layer_call
from plait_kernels.synthetic import Shape, problem
from plait_kernels.tiles import DEFAULT, SMALL, SMALL_CANDIDATES, Choice
from plait_kernels.triton_backend import interpreted
from plait_kernels.triton_launch import Launcher

pytestmark = pytest.mark.skipif(not interpreted(), reason="looks at what kernels write, in the interpreter")
RANKS, DROPOUT = (3, 70, 16, 8), (0.3, 0.5, 0.0, 0.1)
CHOICES = {
    "usual": DEFAULT,
    "small": SMALL,
    "one split, one product": replace(
        with_fused(SMALL, SMALL_CANDIDATES), down=replace(SMALL.down, splits=1)
    ),
}


def launched(layer, chosen: Choice):
    """A layer's launches, and the call they are of."""
    call = layer_call(layer.bank, layer.routing(), layer.sites, layer.weight.shape[0])
    return Launcher(call, layer.x, layer.weight, chosen), call


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("features", "first_feature", "chosen"),
    [(40, 0, "usual"), (133, 24, "small"), (256, 400, "one split, one product")],
)
def test_forward_notes_what_is_dropped_and_nothing_else(make_layer, features, first_feature, chosen):
    """Of a site that an adapter does not target, of one without dropout and of rows without adapter nothing
    is written: there the memory is as it was, all ones."""
    layer = make_layer(
        ranks=RANKS,
        lengths=(20, 70, 5, 33, 9),
        in_features=features,
        dropout=DROPOUT,
        first_feature=first_feature,
    )
    own, call = launched(layer, CHOICES[chosen])
    _, bits = own.down(call, layer.x)
    assert bits.shape[:2] == (len(layer.sites), len(layer.x))
    noted = ((bits[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(2)[..., :features] == 1
    expected, written = torch.ones_like(noted), 0
    for span in call.routing.fused:
        rows = slice(span.start, span.stop)
        counters = RowCounters(
            *(getattr(layer.counters, name)[rows] for name in ("step", "sample", "draw", "position"))
        )
        for index, site in enumerate(layer.bank.sites):
            if span.threshold and site.name in span.block.targets:
                whole = dropout_mask(
                    *(span.block.seed, site.module, counters, first_feature + features, span.block.dropout)
                )
                expected[index, rows] = ~whole[:, first_feature:]
                written += 1
    assert written > 6
    assert torch.equal(noted, expected)


@pytest.mark.parametrize("chosen", CHOICES.values(), ids=CHOICES)
def test_backward_drops_what_forward_dropped_without_the_counters(make_layer, chosen, monkeypatch):
    monkeypatch.setattr("plait_kernels.triton_backend.choice", lambda _call, _x: chosen)
    layer = make_layer(ranks=RANKS, lengths=(9, 19, 3, 17, 5), in_features=133, dropout=DROPOUT)
    expected = layer.run("triton")
    layer.bank.zero_gradients()
    x, routing = layer.x.detach().requires_grad_(), layer.routing()
    out = multi_lora_linear(x, layer.weight, layer.bias, layer.sites, layer.bank, routing, backend="triton")
    routing.counters.fill_(77)
    out.backward(layer.grad)
    assert torch.equal(x.grad, expected.dx)
    for (adapter, site), pair in expected.gradients.items():
        for got, known in zip(layer.bank.gradients(adapter)[site], pair, strict=True):
            assert torch.equal(got, known)


def test_a_bit_of_each_feature_is_kept_only_where_something_drops():
    kept = []
    for dropout in (0.0, 0.1):
        made = problem(Shape(64, 256, (32, 16), (4, 8), dropout), device="meta", dtype=torch.bfloat16)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
            made.run("triton")
        kept.append(sum(each.numel() for each in saved if each.dtype == torch.uint8))
    assert kept == [0, 2 * 64 * 256 // 8]
