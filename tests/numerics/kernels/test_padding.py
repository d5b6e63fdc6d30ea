"""Tables that are filled up change no bit of what adapters compute: Triton's kernels, interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from plait_kernels import KernelError, RoutedSegment, Routing, multi_lora_linear
from plait_kernels.autotuning import taking, with_fused
from plait_kernels.routing import Padding
from plait_kernels.synthetic import Problem, Shape, counters_of, even_segments, problem
from plait_kernels.tables import (
    made_tables,
    make_tables,
    span_table,
    tile_table,
    work_table,
)
from plait_kernels.tiles import SMALL, SMALL_CANDIDATES
from plait_kernels.triton_backend import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="compares kernels in Triton's interpreter")
TOKENS, ROWS = 83, 128
RANKS = (3, 16, 40, 100)
CHOICES = {"written first": SMALL, "one product": with_fused(SMALL, SMALL_CANDIDATES)}


def rows_of_another_size(made: Problem, tokens: int, padding: Padding | None) -> tuple[Tensor, ...]:
    """Output, gradient of x and gradients of the adapters, of the same segments in so many rows."""
    more = torch.full((tokens - TOKENS, made.x.shape[1]), 7.0)
    x = torch.cat((made.x.detach(), more)).requires_grad_()
    grad = torch.cat((made.grad, torch.full((tokens - TOKENS, made.grad.shape[1]), 5.0)))
    segments = even_segments(TOKENS, [str(index) for index in range(len(made.shape.ranks))])
    segments = [*segments[:-1], *split(segments[-1])]  # one adapter has two
    counters = counters_of(tokens, "cpu", length=20)
    routing = Routing.build(made.bank, segments, counters, training=True, padding=padding)
    made.bank.zero_gradients()
    out = multi_lora_linear(x, made.weight, None, made.sites, made.bank, routing, backend="triton")
    out.backward(grad)
    assert x.grad is not None
    gradients = [
        each.clone()
        for name in made.bank.blocks
        for pair in made.bank.gradients(name).values()
        for each in pair
    ]
    return out.detach()[:TOKENS], x.grad[:TOKENS], *gradients


def split(segment: RoutedSegment) -> list[RoutedSegment]:
    middle = (segment.start + segment.stop) // 2
    return [replace(segment, stop=middle), replace(segment, start=middle)]


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("kind", CHOICES)
def test_padding_changes_no_bit(kind: str, dropout: float) -> None:
    made = problem(Shape(TOKENS, 24, (24, 40), RANKS, dropout), device="cpu", dtype=torch.float32)
    with taking(CHOICES[kind]):
        expected = rows_of_another_size(made, ROWS, None)
        found = rows_of_another_size(made, ROWS, Padding(9, (1, *RANKS, 128), dropout=True))
        fewer = rows_of_another_size(made, TOKENS, None)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    for pair in zip(found, fewer, strict=True):  # the vendor's product may order sums by the number of rows
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)
    assert any(each.abs().sum() > 0 for each in found[2:])


def test_adapters_whose_work_takes_no_space_leave_the_same_sizes() -> None:
    """Other segments, ranks and targets of the same padding have tables of the same sizes."""
    made = problem(Shape(TOKENS, 24, (24, 40), RANKS, 0.1), device="cpu", dtype=torch.float32)
    made.bank.attach("narrow", rank=16, scale=1.0, dropout=0.0, seed=9, sites=["site1"])
    padding = Padding(6, RANKS, dropout=True)
    kinds = []
    for segments in (
        even_segments(TOKENS, ["0", "1", "2", "3"]),
        [RoutedSegment("3", 0, 1)],
        [RoutedSegment("1", 0, 90), RoutedSegment("narrow", 90, 128)],
    ):
        routing = Routing.build(made.bank, segments, counters_of(ROWS, "cpu"), training=True, padding=padding)
        tables = (span_table(routing), tile_table(routing, 16), work_table(routing, 16, range(1, 33)))
        make_tables(routing, made_tables(routing))
        kinds.append([_sizes(table) for table in (*tables, work_table(routing, 32, range(33, 2**31)))])
    assert kinds[0] == kinds[1] == kinds[2]


def _sizes(table: object) -> dict[str, object]:
    found = {name: getattr(table, name) for name in table.__dataclass_fields__}  # type: ignore[attr-defined]
    return {
        name: (value.shape, value.dtype) if isinstance(value, Tensor) else value
        for name, value in found.items()
    }


@pytest.mark.parametrize(
    "wrong",
    [Padding(4, RANKS, dropout=True), Padding(9, RANKS[1:], dropout=True), Padding(9, RANKS, dropout=False)],
)
def test_padding_that_is_too_small_is_refused(wrong: Padding) -> None:
    made = problem(Shape(TOKENS, 24, (24,), RANKS, 0.1), device="cpu", dtype=torch.float32)
    segments = even_segments(TOKENS, list(made.bank.blocks))
    with pytest.raises(KernelError, match="leave the padding out"):
        Routing.build(made.bank, segments, counters_of(ROWS, "cpu"), training=True, padding=wrong)
