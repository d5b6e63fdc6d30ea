"""The reference backend: a variant's own formulas in plain torch, one segment and site at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

from torch import Tensor
from torch.nn.functional import linear

from plait_kernels.backends import Backend, register
from plait_kernels.bank import COMPUTE, GRADIENTS, Site
from plait_kernels.dropout import drop_by, keep_mask
from plait_kernels.layer import LayerCall, Owners
from plait_kernels.routing import Span
from plait_kernels.variant import SiteRows, Variant


def _drop(call: LayerCall, span: Span, site: Site) -> Callable[[Tensor], Tensor]:
    """D ∘ a tensor of the segment's rows at a site; its mask is computed when it is first needed."""
    if span.threshold == 0:
        return lambda values: values
    counters = call.routing.counters[span.start : span.stop]
    keep = cache(
        partial(
            keep_mask,
            (span.block.seed, site.module % 2**32),
            counters,
            site.in_features,
            span.threshold,
            site.first_feature,
        )
    )
    return lambda values: drop_by(keep(), values, span.threshold)


def _parts(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: LayerCall, owners: Owners
) -> Iterator[tuple[Variant, SiteRows, slice, slice]]:
    """For each segment at each site: its variant, the variant's input, and the rows and columns."""
    for span, placed in owners:
        block, own = span.block, slice(span.start, span.stop)
        for site, columns in placed:
            rows = SiteRows(
                x=x[own],
                weight=weight[columns],
                bias=None if bias is None else bias[columns],
                tensors=block.at(site, COMPUTE),
                gradients=block.at(site, GRADIENTS),
                scale=block.scale,
                drop=_drop(call, span, site),
            )
            yield block.variant, rows, own, columns


def add_forward(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, call: LayerCall, owners: Owners
) -> list[Tensor]:
    """Add the owners' part to `out`, which holds x Wᵀ + b; return what backward needs."""
    saved: list[Tensor] = []
    for variant, rows, own, columns in _parts(x, weight, bias, call, owners):
        saved += variant.forward(rows, out[own, columns])
    return saved


def add_backward(
    dx: Tensor | None,
    grad: Tensor,
    x: Tensor,
    saved: list[Tensor],
    weight: Tensor,
    call: LayerCall,
    owners: Owners,
) -> None:
    """Add the owners' gradients to the bank, and their part of the gradient of x to `dx`."""
    start = 0
    for variant, rows, own, columns in _parts(x, weight, None, call, owners):
        kept = tuple(saved[start : start + variant.saves])
        start += variant.saves
        variant.backward(rows, kept, grad[own, columns], None if dx is None else dx[own])


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, call: LayerCall) -> tuple[Tensor, list[Tensor]]:
    """Output (tokens, out) and what the variants save."""
    out = linear(x, weight, bias)
    return out, add_forward(out, x, weight, bias, call, call.owners)


def backward(
    grad: Tensor, x: Tensor, saved: list[Tensor], weight: Tensor, call: LayerCall, *, need_dx: bool
) -> Tensor | None:
    """Add the adapters' gradients to the bank; return that of x if it is needed."""
    dx = grad @ weight if need_dx else None
    add_backward(dx, grad, x, saved, weight, call, call.owners)
    return dx


REFERENCE = register(Backend("reference", forward, backward, any_variant=True))
