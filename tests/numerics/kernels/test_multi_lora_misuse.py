"""What multi_lora_linear refuses; autocast, no gradients, strange strides, adapters that come and go."""

from __future__ import annotations

import pytest
import torch

from plait_kernels import AdapterStep, KernelError, adamw_step, labelled_cross_entropy, multi_lora_linear


def _out(layer, x, backend="grouped", **changed):
    given = {"weight": layer.weight, "bias": layer.bias, "routing": layer.routing()} | changed
    return multi_lora_linear(
        *(x, given["weight"], given["bias"], layer.sites, layer.bank, given["routing"]), backend=backend
    )


def test_a_second_derivative_is_refused(place, make_layer):
    layer = make_layer(ranks=[3], lengths=[6], device=place[0])
    x = layer.x.detach().requires_grad_()
    out = _out(layer, x, place[1])
    with pytest.raises(KernelError, match="create_graph"):
        torch.autograd.grad(out, x, layer.grad, create_graph=True)


def test_a_second_derivative_of_the_loss_is_refused():
    hidden = torch.randn(3, 4, requires_grad=True)
    loss, _ = labelled_cross_entropy(hidden, torch.randn(5, 4), None, torch.arange(3), torch.ones(3))
    with pytest.raises(KernelError, match="create_graph"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_backward_after_the_weights_changed_is_refused(make_layer):
    layer = make_layer(ranks=[3, 4], lengths=[6, 5])
    out = _out(layer, layer.x.detach().requires_grad_())
    adamw_step(layer.bank, [AdapterStep("a1", 1, lr_a=0.1, lr_b=0.1)])
    with pytest.raises(KernelError, match=r"a1.*changed"):
        out.backward(layer.grad)


def test_other_adapters_come_and_go_while_a_graph_is_alive(place, make_layer):
    layer = make_layer(ranks=[3, 4], lengths=[6, 5], dropout=0.2, device=place[0])
    expected = layer.run(place[1])
    layer.bank.zero_gradients()
    x = layer.x.detach().requires_grad_()
    out = _out(layer, x, place[1])
    gone = layer.bank.block("a1")
    layer.bank.detach("a1")
    for index in range(3):
        layer.bank.attach(f"new{index}", rank=5, scale=1.0, dropout=0.0, seed=0, sites=["site0"])
    out.backward(layer.grad)
    assert torch.equal(x.grad, expected.dx)
    for (adapter, site), (a, b) in expected.gradients.items():
        block = gone if adapter == "a1" else layer.bank.block(adapter)
        own_a, own_b = block.at(layer.bank.sites[layer.bank.site_index[site]], 1)
        assert torch.equal(own_a, a)
        assert torch.equal(own_b, b)


def test_autocast_changes_nothing(place, make_layer):
    layer = make_layer(ranks=[3, 4], lengths=[6, 5], dropout=0.2, device=place[0])
    expected = layer.run(place[1])
    with torch.autocast(place[0], dtype=torch.bfloat16):
        got = layer.run(place[1])
    got.assert_equal(expected)


def test_without_gradients_nothing_is_kept(place, make_layer):
    layer = make_layer(ranks=[3, 4], lengths=[6, 5], device=place[0])
    expected = layer.run(place[1])
    with torch.no_grad():
        out = _out(layer, layer.x, place[1])
    assert out.grad_fn is None
    assert torch.equal(out, expected.out)


def test_gradients_and_rows_of_any_strides(place, make_layer):
    """A sum's gradient has strides of zero; a transposed x has its features far apart."""
    layer = make_layer(ranks=[3, 4], lengths=[6, 5], device=place[0])
    layer.grad = torch.ones((), device=place[0]).expand(layer.grad.shape)
    expected = layer.run(place[1])
    layer.x = layer.x.T.contiguous().T
    got = layer.run(place[1])
    layer.assert_accurate(got)
    torch.testing.assert_close(got.dx, expected.dx)


def test_a_microbatch_without_rows(place, make_layer):
    layer = make_layer(ranks=[3], lengths=[0], gap=0, device=place[0])
    got = layer.run(place[1])
    assert got.out.shape == (0, layer.weight.shape[0])
    assert all(not a.any() and not b.any() for a, b in got.gradients.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": lambda layer: layer.weight.double()}, "compute dtype"),
        ({"bias": lambda layer: layer.bias.half()}, "compute dtype"),
        ({"weight": lambda layer: layer.weight.clone().requires_grad_()}, "frozen"),
        ({"weight": lambda layer: layer.weight.to("meta")}, "one device"),
    ],
    ids=["weight's dtype", "bias's dtype", "wants a gradient", "device"],
)
def test_a_layer_that_does_not_fit_is_refused(make_layer, changes, message):
    layer = make_layer(ranks=[3], lengths=[6])
    _out(layer, layer.x)  # what fitted once is not looked at again, but what is given after it is
    with pytest.raises(KernelError, match=message):
        _out(layer, layer.x, **{name: change(layer) for name, change in changes.items()})


def test_a_routing_of_another_bank_is_refused(make_layer):
    layer, other = make_layer(ranks=[3], lengths=[6]), make_layer(ranks=[3], lengths=[6])
    with pytest.raises(KernelError, match="another bank"):
        _out(layer, layer.x, routing=other.routing())
