"""Output and every gradient of every backend against float64, at sizes that fit no tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plait_kernels import multi_lora_linear
from plait_kernels.backends import BACKENDS

pytestmark = pytest.mark.usefixtures("poisoned_memory")
LOW_PRECISION = [torch.float16, torch.bfloat16]


def _interpreted(place):
    device, backend = place
    return device == "cpu" and backend == "triton"


def _dtype_runs(place, dtype):
    if dtype == torch.bfloat16 and _interpreted(place):
        pytest.skip("bfloat16 is silently wrong in Triton's interpreter")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION], ids=str)
def test_mixed_ranks_and_sites(place, make_layer, dtype, dropout):
    _dtype_runs(place, dtype)
    layer = make_layer(
        ranks=[3, 16, 17], lengths=[33, 1, 30], dropout=[dropout, 0.0, dropout], dtype=dtype, device=place[0]
    )
    layer.assert_accurate(layer.run(place[1]))


def test_a_slice_of_the_features_has_its_part_of_the_mask(place, make_layer):
    layer = make_layer(
        ranks=[3, 16, 70], lengths=[33, 1, 30], dropout=0.3, device=place[0], first_feature=8 * 5
    )
    layer.assert_accurate(layer.run(place[1]))


@pytest.mark.parametrize("rank", [1, 3, 16, 17, 100, 256])
def test_every_rank_is_accurate(place, make_layer, rank):
    layer = make_layer(ranks=[rank], lengths=[21], widths=[19], dropout=0.2, device=place[0])
    layer.assert_accurate(layer.run(place[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_all_ranks_at_odd_sizes_side_by_side(place, make_layer, dtype):
    """A rank of 1 beside one of 256, adapters without rows, features and outputs that fit no tile."""
    layer = make_layer(
        ranks=[1, 3, 16, 17, 100, 256, 40, 65],
        lengths=[9, 0, 7, 13, 5, 11, 0, 2],
        in_features=37,
        widths=[23, 9],
        dropout=[0.2, 0.0] * 4,
        dtype=dtype,
        device=place[0],
        absent=False,
    )
    layer.assert_accurate(layer.run(place[1]))


@pytest.mark.parametrize("tokens", [1, 63, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_number_of_tokens_is_accurate(place, make_layer, tokens, dtype):
    parts = [tokens - 2 * (tokens // 3), tokens // 3, tokens // 3]  # one token: two adapters have no rows
    layer = make_layer(ranks=[5, 8, 2], lengths=parts, widths=[20, 12], dtype=dtype, device=place[0])
    layer.assert_accurate(layer.run(place[1]))


def test_one_hundred_and_thirty_adapters(place, make_layer):
    ranks = [1 + index % 19 for index in range(130)]
    layer = make_layer(
        ranks=ranks, lengths=[(1, 0, 2, 0, 0)[i % 5] for i in range(130)], widths=[16], device=place[0]
    )
    layer.assert_accurate(layer.run(place[1]))


def test_an_adapter_of_several_segments_and_tiles(place, make_layer):
    lengths = [150, 40, 70, 5]
    layer = make_layer(ranks=[4, 20], lengths=lengths, widths=[33, 20], dropout=0.1, device=place[0])
    layer.assert_accurate(layer.run(place[1]))


def test_a_transposed_weight_and_strided_rows(place, make_layer):
    layer = make_layer(ranks=[4, 7], lengths=[20, 11], device=place[0])
    expected = layer.run(place[1])
    layer.weight = layer.weight.T.contiguous().T  # as GPT-2's Conv1D stores it
    layer.x = torch.cat((layer.x, layer.x), dim=1)[:, : layer.x.shape[1]]
    layer.grad = torch.cat((layer.grad, layer.grad), dim=1)[:, : layer.grad.shape[1]]
    got = layer.run(place[1])
    layer.assert_accurate(got)
    torch.testing.assert_close(got.out, expected.out)


def test_columns_without_adapters(place, make_layer):
    layer = make_layer(ranks=[4, 7], lengths=[20, 11], absent=False, device=place[0])
    whole = layer.run(place[1]).out
    for named in (["site0", None], ["site0", 9, 17], ["site0", None, None]):
        out = multi_lora_linear(
            layer.x, layer.weight, layer.bias, named, layer.bank, layer.routing(), backend=place[1]
        )
        torch.testing.assert_close(out[:, :24], whole[:, :24])
        plain = torch.nn.functional.linear(layer.x, layer.weight, layer.bias)
        torch.testing.assert_close(out[:, 24:], plain[:, 24:])


def test_gradients_add_up_and_runs_are_bit_equal(place, make_layer):
    layer = make_layer(ranks=[3, 20], lengths=[70, 31], dropout=0.2, device=place[0])
    first, second = layer.run(place[1]), layer.run(place[1])
    first.assert_equal(second)
    zeroed, layer.bank.zero_gradients = layer.bank.zero_gradients, lambda: None
    twice = layer.run(place[1]).gradients
    layer.bank.zero_gradients = zeroed
    for key, (a, b) in first.gradients.items():
        torch.testing.assert_close(twice[key][0], 2 * a)
        torch.testing.assert_close(twice[key][1], 2 * b)


def test_the_first_layer_computes_no_gradient_of_x(place, make_layer, monkeypatch):
    layer = make_layer(ranks=[3], lengths=[12], device=place[0])
    expected = layer.run(place[1])
    layer.bank.zero_gradients()
    seen = []
    backend = BACKENDS[place[1]]

    def record(*args, need_dx):
        seen.append(backend.backward(*args, need_dx=need_dx))
        return seen[-1]

    monkeypatch.setitem(BACKENDS, backend.name, replace(backend, backward=record))
    out = multi_lora_linear(
        layer.x, layer.weight, layer.bias, layer.sites, layer.bank, layer.routing(), backend=place[1]
    )
    out.backward(layer.grad)
    assert seen == [None]
    for key, (a, b) in expected.gradients.items():
        own_a, own_b = layer.bank.gradients(key[0])[key[1]]
        assert torch.equal(own_a, a)
        assert torch.equal(own_b, b)


def test_activation_checkpointing_sees_the_same_mask(place, make_layer):
    layer = make_layer(ranks=[3, 6], lengths=[22, 15], dropout=0.4, device=place[0])
    expected = layer.run(place[1])
    layer.bank.zero_gradients()
    x = layer.x.detach().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(
        lambda x: multi_lora_linear(
            x, layer.weight, layer.bias, layer.sites, layer.bank, layer.routing(), backend=place[1]
        ),
        x,
        use_reentrant=False,
    )
    out.backward(layer.grad)
    assert torch.equal(x.grad, expected.dx)
    for key, (a, b) in expected.gradients.items():
        own_a, own_b = layer.bank.gradients(key[0])[key[1]]
        assert torch.equal(own_a, a)
        assert torch.equal(own_b, b)


def test_evaluation_does_not_drop(place, make_layer):
    layer = make_layer(ranks=[3, 6], lengths=[22, 15], dropout=0.4, device=place[0])
    layer.training = False
    layer.assert_accurate(layer.run(place[1]))
