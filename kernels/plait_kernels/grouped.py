"""The grouped backend: torch's matrix products on each segment's packed rows, as few and as large as
possible.

The sites of one adapter that read the same x are multiplied together if their A are contiguous and dropout
does not make their inputs differ. Products accumulate directly into their columns of the output, without
copies.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from plait_kernels.backends import Backend, register
from plait_kernels.bank import COMPUTE, GRADIENTS
from plait_kernels.fast_dropout import drop
from plait_kernels.layer import LayerCall, Placed
from plait_kernels.routing import Span

# Up to this rank one product with the block diagonal of all B is faster than one product for each site: the
# zeros cost less than starting a product. Measured in bfloat16 on two cores with 150 to 300 rows a segment.
_DIAGONAL_RANK = 32


def _diagonal(span: Span, placed: tuple[Placed, ...]) -> bool:
    return len(placed) > 1 and span.block.rank <= _DIAGONAL_RANK


def _columns(placed: tuple[Placed, ...]) -> slice:
    return slice(placed[0][1].start, placed[-1][1].stop)


def _stacked(span: Span, placed: tuple[Placed, ...], row: int) -> Tensor:
    """A of the sites, (sites·rank, in): a view if they lie end to end, else joined."""
    sites = [site for site, _ in placed]
    view = span.block.stacked_a(sites, row)
    if view is None:
        view = torch.cat([span.block.at(site, row)[0] for site in sites])
    return view


def _dropped(
    x: Tensor,
    call: LayerCall,
    span: Span,
    placed: tuple[Placed, ...],
    *,
    total: Tensor | None = None,
    part: Tensor | None = None,
) -> Tensor:
    modules = [site.module for site, _ in placed]
    rows = call.routing.counters[span.start : span.stop]
    first = placed[0][0].first_feature  # of their common input
    factor = span.block.scale
    return drop(
        x, span.block.seed, modules, rows, span.threshold, first, total=total, part=part, factor=factor
    )


def _down(x: Tensor, call: LayerCall, span: Span, placed: tuple[Placed, ...]) -> Tensor:
    """S of all the sites side by side: (rows, sites·rank)."""
    if span.threshold == 0:
        return x @ _stacked(span, placed, COMPUTE).T
    rank = span.block.rank
    s = x.new_empty(x.shape[0], len(placed) * rank)
    for index, dropped in enumerate(_dropped(x, call, span, placed)):
        a = span.block.at(placed[index][0], COMPUTE)[0]
        torch.mm(dropped, a.T, out=s[:, index * rank : (index + 1) * rank])
    return s


def _up(out: Tensor, s: Tensor, span: Span, placed: tuple[Placed, ...]) -> None:
    """out += s S Bᵀ, in place."""
    rank, scale = span.block.rank, span.block.scale
    if _diagonal(span, placed):
        out[:, _columns(placed)].addmm_(s, span.block.diagonal_b(placed).T, alpha=scale)
        return
    for index, (site, columns) in enumerate(placed):
        b = span.block.at(site, COMPUTE)[1]
        out[:, columns].addmm_(s[:, index * rank : (index + 1) * rank], b.T, alpha=scale)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, call: LayerCall) -> tuple[Tensor, list[Tensor]]:
    """Output (tokens, out) and S of every segment."""
    out = linear(x, weight, bias)
    saved = []
    for span, placed in call.owners:
        s = _down(x[span.start : span.stop], call, span, placed)
        _up(out[span.start : span.stop], s, span, placed)
        saved.append(s)
    return out, saved


def backward(
    grad: Tensor, x: Tensor, saved: list[Tensor], weight: Tensor, call: LayerCall, *, need_dx: bool
) -> Tensor | None:
    """Add the gradients of A and B to the bank; return that of x if it is needed."""
    dx = grad @ weight if need_dx else None
    for (span, placed), s in zip(call.owners, saved, strict=True):
        ds = _up_gradients(grad[span.start : span.stop], s, span, placed)
        rows = slice(span.start, span.stop)
        own_dx = None if dx is None else dx[rows]
        if span.threshold == 0:
            _down_gradients(ds, x[rows], span, placed, own_dx)
        else:
            _dropped_down_gradients(ds, x[rows], call, span, placed, own_dx)
    return dx


def _up_gradients(grad: Tensor, s: Tensor, span: Span, placed: tuple[Placed, ...]) -> Tensor:
    """dB += s dhᵀ S; returns dh B, (rows, sites·rank): dS without its factor s, which is not rounded so."""
    if _diagonal(span, placed):
        return _diagonal_up_gradients(grad[:, _columns(placed)], s, span, placed)
    ds = torch.empty_like(s)
    scale, rank = span.block.scale, span.block.rank
    for index, (site, columns) in enumerate(placed):
        part = slice(index * rank, (index + 1) * rank)
        dh = grad[:, columns]
        torch.mm(dh, span.block.at(site, COMPUTE)[1], out=ds[:, part])
        span.block.at(site, GRADIENTS)[1].add_(dh.T @ s[:, part], alpha=scale)
    return ds


def _diagonal_up_gradients(dh: Tensor, s: Tensor, span: Span, placed: tuple[Placed, ...]) -> Tensor:
    product, rank, origin = dh.T @ s, span.block.rank, placed[0][1].start
    for index, (site, columns) in enumerate(placed):
        own = product[columns.start - origin : columns.stop - origin, index * rank : (index + 1) * rank]
        span.block.at(site, GRADIENTS)[1].add_(own, alpha=span.block.scale)
    return dh @ span.block.diagonal_b(placed)


def _down_gradients(ds: Tensor, x: Tensor, span: Span, placed: tuple[Placed, ...], dx: Tensor | None) -> None:
    """dA += dSᵀ x and dx += dS A for all sites at once."""
    product = ds.T @ x
    stacked = span.block.stacked_a([site for site, _ in placed], GRADIENTS)
    if stacked is not None:
        stacked.add_(product, alpha=span.block.scale)
    else:
        for (site, _), part in zip(placed, torch.split(product, span.block.rank), strict=True):
            span.block.at(site, GRADIENTS)[0].add_(part, alpha=span.block.scale)
    if dx is not None:
        dx.addmm_(ds, _stacked(span, placed, COMPUTE), alpha=span.block.scale)


def _dropped_down_gradients(
    ds: Tensor, x: Tensor, call: LayerCall, span: Span, placed: tuple[Placed, ...], dx: Tensor | None
) -> None:
    """dA += dSᵀ (D ∘ x) and dx += D ∘ (dS A): each site has its own D, computed once for both."""
    part = None
    own = torch.split(ds, span.block.rank, dim=1)
    if dx is not None:
        part = x.new_empty(len(placed), *x.shape)
        for index, (site, _) in enumerate(placed):
            torch.mm(own[index], span.block.at(site, COMPUTE)[0], out=part[index])
    dropped = _dropped(x, call, span, placed, total=dx, part=part)
    for index, (site, _) in enumerate(placed):
        span.block.at(site, GRADIENTS)[0].add_(own[index].T @ dropped[index], alpha=span.block.scale)


GROUPED = register(Backend("grouped", forward, backward, candidate=lambda device: device.type != "cuda"))
