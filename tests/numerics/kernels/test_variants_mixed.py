"""A variant without kernels of its own beside plain LoRA: exact itself, and the others keep every bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from frozen_a_kernel import FrozenA

from plait_kernels import multi_lora_linear

LENGTHS = [37, 1, 20, 63, 5, 9]


def freeze(layer, adapter):
    """Attach the adapter again, with the same weights, as one whose A is frozen."""
    bank, block, weights = layer.bank, layer.bank.block(adapter), layer.bank.weights(adapter)
    bank.detach(adapter)
    options = {"rank": block.rank, "scale": block.scale, "dropout": block.dropout, "seed": block.seed}
    bank.attach(adapter, **options, sites=list(weights), variant=FrozenA())
    for site, tensors in bank.weights(adapter).items():
        for tensor, before in zip(tensors, weights[site], strict=True):
            tensor.copy_(before)
    bank.refresh([adapter])


def run(layer, backend):
    """Output, gradient of x and all gradients in the bank."""
    x = layer.x.detach().requires_grad_()
    routing = layer.routing()
    out = multi_lora_linear(x, layer.weight, layer.bias, layer.sites, layer.bank, routing, backend=backend)
    out.backward(layer.grad)
    found = {name: layer.bank.gradients(name) for name in layer.bank.blocks}
    return out.detach(), x.grad, found


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("only", [False, True], ids=["beside plain LoRA", "alone"])
@pytest.mark.usefixtures("poisoned_memory")
def test_each_of_a_mixed_microbatch_is_exact(make_layer, place, dropout, only):
    device, backend = place
    ranks = [3] if only else [20, 3, 17]
    frozen = "a0" if only else "a1"
    layer = make_layer(ranks=ranks, lengths=LENGTHS, dropout=dropout, device=device)
    plain = run(layer, backend)
    others = [name for name in layer.bank.blocks if name != frozen]
    kept = {
        name: {site: [t.clone() for t in pair] for site, pair in plain[2][name].items()} for name in others
    }
    layer.bank.zero_gradients()
    freeze(layer, frozen)
    out, dx, gradients = run(layer, backend)
    truth = layer.unfused(torch.float64)
    filled = {
        (name, site): (truth.gradients[name, site][0], *found) if name == frozen else found
        for name, sites in gradients.items()
        for site, found in sites.items()
    }
    layer.assert_accurate(replace(truth, out=out, dx=dx, gradients=filled))
    for segment in layer.segments:
        if segment.adapter != frozen:
            own = slice(segment.start, segment.stop)
            assert torch.equal(out[own], plain[0][own])
            assert torch.equal(dx[own], plain[1][own])
    for name in others:
        for site, pair in kept[name].items():
            assert all(torch.equal(a, b) for a, b in zip(pair, gradients[name][site], strict=True))
