"""The reference backend: the formulas of multi-adapter LoRA in naive torch, one segment at a time.

S = (D ∘ x) Aᵀ; h = x Wᵀ + s S Bᵀ; dS = s dh B; dB = s dhᵀ S; dA = dSᵀ (D ∘ x); dx = dh W + D ∘ (dS A)
(mLoRA §3.3; LoRAFusion §4.1).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from plait_kernels.bank import GRADIENTS, Site
from plait_kernels.dropout import apply_dropout
from plait_kernels.layer import LayerCall
from plait_kernels.routing import Span


def _dropped(x: Tensor, call: LayerCall, span: Span, site: Site) -> Tensor:
    if span.threshold == 0:
        return x
    rows = call.routing.counters[span.start : span.stop]
    return apply_dropout(x, span.block.seed, site.module, rows, span.threshold)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, call: LayerCall) -> tuple[Tensor, list[Tensor]]:
    """Output (tokens, out) and S of every segment and site."""
    out = linear(x, weight, bias)
    saved = []
    for span, placed in call.owners:
        for site, columns in placed:
            a, b = span.block.pair(site, -1)
            s = _dropped(x[span.start : span.stop], call, span, site) @ a.T
            out[span.start : span.stop, columns] += span.block.scale * (s @ b.T)
            saved.append(s)
    return out, saved


def backward(
    grad: Tensor, x: Tensor, saved: list[Tensor], weight: Tensor, call: LayerCall, *, need_dx: bool
) -> Tensor | None:
    """Add the gradients of A and B to the bank; return that of x where it is needed."""
    dx = grad @ weight if need_dx else None
    remaining = iter(saved)
    for span, placed in call.owners:
        for site, columns in placed:
            s = next(remaining)
            a, b = span.block.pair(site, -1)
            grad_a, grad_b = span.block.pair(site, GRADIENTS)
            dh = span.block.scale * grad[span.start : span.stop, columns]
            ds = dh @ b
            grad_b += dh.T @ s
            grad_a += ds.T @ _dropped(x[span.start : span.stop], call, span, site)
            if dx is not None:
                dx[span.start : span.stop] += _dropped(ds @ a, call, span, site)
    return dx
