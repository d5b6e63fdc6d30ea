"""A segment's result does not depend on what else is in the microbatch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait_kernels import (
    Bank,
    KernelError,
    RoutedSegment,
    Routing,
    RowCounters,
    Site,
    multi_lora_linear,
)
from plait_kernels.triton_backend import available


def _alone(layer, index):
    """The layer with one of its segments as the whole microbatch."""
    segment = layer.segments[index]
    rows = slice(segment.start, segment.stop)
    own = RowCounters(
        *(getattr(layer.counters, name)[rows] for name in ("step", "sample", "draw", "position"))
    )
    return type(layer)(
        bank=layer.bank,
        segments=[RoutedSegment(segment.adapter, 0, segment.stop - segment.start)],
        counters=own,
        sites=layer.sites,
        x=layer.x[rows],
        weight=layer.weight,
        bias=layer.bias,
        grad=layer.grad[rows],
        parts=layer.parts,
    )


def test_packed_equals_alone(place, make_layer):
    """Gradients of A and B bit for bit, since they are made of the segment's own rows alone.

    Output and dx only within rounding: the base product's library blocks its sums by the number of rows.
    """
    layer = make_layer(ranks=[5, 12, 3], lengths=[37, 50, 8], dropout=[0.2, 0.0, 0.5], device=place[0])
    packed = layer.run(place[1])
    for index, segment in enumerate(layer.segments):
        alone = _alone(layer, index).run(place[1])
        rows = slice(segment.start, segment.stop)
        torch.testing.assert_close(alone.out, packed.out[rows])
        torch.testing.assert_close(alone.dx, packed.dx[rows])
        for key, (a, b) in alone.gradients.items():
            if key[0] == segment.adapter:
                assert torch.equal(a, packed.gradients[key][0]), key
                assert torch.equal(b, packed.gradients[key][1]), key


def test_a_diverged_neighbour_does_not_spread(place, make_layer):
    layer = make_layer(ranks=[5, 12, 3], lengths=[37, 50, 8], dropout=0.1, device=place[0])
    expected = layer.run(place[1])
    sick = slice(layer.segments[1].start, layer.segments[1].stop)
    layer.x[sick] = float("nan")
    for a, _ in layer.bank.weights("a1").values():
        a.fill_(float("inf"))
    layer.bank.refresh(["a1"])
    got = layer.run(place[1])
    for key, (a, b) in got.gradients.items():
        if key[0] != "a1":
            assert torch.equal(a, expected.gradients[key][0]), key
            assert torch.equal(b, expected.gradients[key][1]), key
    healthy = torch.ones(layer.x.shape[0], dtype=torch.bool, device=layer.x.device)
    healthy[sick] = False
    assert torch.equal(got.out[healthy], expected.out[healthy])
    assert torch.equal(got.dx[healthy], expected.dx[healthy])
    assert got.out[sick].isnan().any()


_segment = st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 3))
_ROUTINGS = {
    "ranks": st.lists(st.integers(1, 9), min_size=4, max_size=4),
    "drawn": st.lists(_segment, min_size=1, max_size=6),
    "dropout": st.sampled_from([0.0, 0.25]),
    "seed": st.integers(0, 99),
}


def _check_routing(make_layer, backend, ranks, drawn, dropout, seed):
    layer = make_layer(ranks=ranks, lengths=[1, 1, 1, 1], in_features=13, dropout=dropout, seed=seed)
    layer.segments, end = [], 0
    for adapter, length, gap in drawn:
        layer.segments.append(RoutedSegment(f"a{adapter}", end, end + length))
        layer.segments.append(RoutedSegment(None, end + length, end + length + gap))
        end += length + gap
    row = torch.arange(end)
    layer.counters = RowCounters(row // 5, row // 4, row % 2, row % 4)
    generator = torch.Generator().manual_seed(seed)
    layer.x = torch.randn(end, 13, generator=generator)
    layer.grad = torch.randn(end, layer.weight.shape[0], generator=generator)
    layer.segments.reverse()  # their order does not matter
    layer.assert_close(layer.run(backend))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**_ROUTINGS)
@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_random_routings_are_accurate(make_layer, backend, **drawn):
    _check_routing(make_layer, backend, **drawn)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**_ROUTINGS)
def test_random_routings_are_accurate_with_tiles(make_layer, **drawn):
    if not available(torch.device("cpu")):
        pytest.skip("Triton runs on a CPU only in its interpreter, which is off where there is a GPU")
    _check_routing(make_layer, "triton", **drawn)


def _bank():
    bank = Bank([Site("q", 0, 6, 4), Site("k", 1, 6, 2)], device="cpu", compute_dtype=torch.float32)
    bank.attach("one", rank=2, scale=1.0, dropout=0.0, seed=0, sites=["q"])
    return bank


def _counters(tokens):
    row = torch.arange(tokens)
    return RowCounters(row, row, row, row)


@pytest.mark.parametrize(
    "segments",
    [
        [RoutedSegment("one", 0, 3), RoutedSegment("one", 2, 4)],
        [RoutedSegment("one", 3, 5)],
        [RoutedSegment("one", 2, 1)],
        [RoutedSegment("one", -1, 1)],
        [RoutedSegment("two", 0, 1)],
    ],
    ids=["overlap", "beyond the end", "backwards", "before the start", "unknown adapter"],
)
def test_a_wrong_routing_is_refused(segments):
    with pytest.raises(KernelError):
        Routing.build(_bank(), segments, _counters(4), training=True)


@pytest.mark.parametrize(
    ("sites", "backend", "x", "message"),
    [
        (["q", "v"], "grouped", torch.zeros(4, 6), "the bank has q, k"),
        (["q"], "grouped", torch.zeros(4, 6), "add up"),
        ([None, "q", None], "grouped", torch.zeros(4, 6), "add up"),
        (["q", "k"], "fast", torch.zeros(4, 6), "grouped, reference, triton"),
        (["q", "k"], "grouped", torch.zeros(4, 6, dtype=torch.float64), "compute dtype"),
        (["q", "k"], "grouped", torch.zeros(3, 6), "4 tokens"),
        (["q", "k"], "grouped", torch.zeros(4, 5), "weight is"),
    ],
)
def test_a_wrong_call_is_refused(sites, backend, x, message):
    bank = _bank()
    routing = Routing.build(bank, [RoutedSegment("one", 0, 4)], _counters(4), training=True)
    with pytest.raises(KernelError, match=message):
        multi_lora_linear(x, torch.zeros(6, 6), None, sites, bank, routing, backend=backend)


def test_without_adapters_the_layer_is_the_frozen_one():
    bank, x = _bank(), torch.randn(4, 6, requires_grad=True)
    routing = Routing.build(bank, [RoutedSegment(None, 0, 4)], _counters(4), training=True)
    weight = torch.randn(6, 6)
    out = multi_lora_linear(x, weight, None, ["q", "k"], bank, routing, backend="grouped")
    assert torch.equal(out, torch.nn.functional.linear(x, weight))


def test_a_bias_may_have_any_stride(place, make_layer):
    layer = make_layer(ranks=[3], lengths=[9], device=place[0])
    layer.bias = torch.stack((layer.bias, layer.bias + 1), dim=1)[:, 0]
    layer.assert_accurate(layer.run(place[1]))
