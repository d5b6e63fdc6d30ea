"""A layer with random weights, adapters and rows, for timing in tuning, selection and the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_kernels.bank import Bank, Site
from plait_kernels.dropout import RowCounters
from plait_kernels.linear import multi_lora_linear
from plait_kernels.routing import RoutedSegment, Routing


@dataclass(frozen=True)
class Shape:
    """Size of a problem: tokens shared evenly by one adapter for each rank.

    Args:
        tokens: rows of x.
        in_features: columns of x.
        out_features: outputs of each site; the sites share x.
        ranks: one adapter each.
        dropout: dropout of every adapter.
    """

    tokens: int
    in_features: int
    out_features: tuple[int, ...]
    ranks: tuple[int, ...]
    dropout: float = 0.0


@dataclass(frozen=True)
class Problem:
    """A layer's call, ready to run; `weight` is divided so that outputs stay near 1."""

    shape: Shape
    bank: Bank
    routing: Routing
    sites: tuple[str, ...]
    x: Tensor
    weight: Tensor
    grad: Tensor

    def run(self, backend: str, x: Tensor | None = None) -> Tensor:
        """Forward, of the problem's own x or another."""
        return multi_lora_linear(
            self.x if x is None else x,
            self.weight,
            None,
            self.sites,
            self.bank,
            self.routing,
            backend=backend,
        )

    def train(self, backend: str) -> None:
        """Forward and backward."""
        torch.autograd.backward(self.run(backend), self.grad)


def counters_of(tokens: int, device: torch.device | str, *, length: int = 512) -> RowCounters:
    """Counters of samples of `length` rows, one after the other, at step 1."""
    row = torch.arange(tokens, device=device)
    return RowCounters(torch.ones_like(row), row // length, torch.zeros_like(row), row % length)


def even_segments(tokens: int, adapters: Sequence[str]) -> list[RoutedSegment]:
    """Contiguous segments that divide the rows as evenly as possible."""
    edges = [tokens * index // len(adapters) for index in range(len(adapters) + 1)]
    return [
        RoutedSegment(adapter, start, stop)
        for adapter, start, stop in zip(adapters, edges[:-1], edges[1:], strict=True)
    ]


def problem(shape: Shape, *, device: torch.device | str, dtype: torch.dtype) -> Problem:
    """Build the same problem each time, on the device, where even a large one takes milliseconds."""
    drawn_on = "cpu" if torch.device(device).type == "meta" else device  # meta tensors draw nothing
    generator = torch.Generator(drawn_on).manual_seed(0)

    def normal(*size: int, scale: float) -> Tensor:
        drawn = torch.empty(*size, device=device, dtype=dtype)
        return drawn.normal_(std=scale, generator=generator)

    sites = tuple(
        Site(f"site{index}", index, shape.in_features, width)
        for index, width in enumerate(shape.out_features)
    )
    bank = Bank(sites, device=device, compute_dtype=dtype)
    names = [str(index) for index in range(len(shape.ranks))]
    for index, rank in enumerate(shape.ranks):
        bank.attach(
            names[index],
            rank=rank,
            scale=2.0,
            dropout=shape.dropout,
            seed=index,
            sites=[site.name for site in sites],
        )
        for a, b in bank.weights(names[index]).values():
            a.copy_(normal(*a.shape, scale=shape.in_features**-0.5).float())
            b.copy_(normal(*b.shape, scale=rank**-0.5).float())
    bank.refresh()
    out_features = sum(shape.out_features)
    return Problem(
        shape=shape,
        bank=bank,
        routing=Routing.build(
            *(bank, even_segments(shape.tokens, names), counters_of(shape.tokens, device)), training=True
        ),
        sites=tuple(site.name for site in sites),
        x=normal(shape.tokens, shape.in_features, scale=1.0).requires_grad_(),
        weight=normal(out_features, shape.in_features, scale=shape.in_features**-0.5),
        grad=normal(shape.tokens, out_features, scale=1.0),
    )
