# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of one AdamW step over all adapters.

`ranges` holds for each range of trained weights with one learning rate (offsets of its weights, gradient,
first and second moment from one float32 pointer; of its compute copy from another; elements; the place of its
adapter's norm), `settings` its numbers. `adapters` holds for each adapter (offset of its gradient, elements).
All offsets and sizes are multiples of 16, as the bank lays its tensors out.
"""

from __future__ import annotations

import triton
import triton.language as tl

RANGE_FIELDS = tl.constexpr(7)
SETTINGS = tl.constexpr(9)


@triton.jit(do_not_specialize=["chunks"])
def squares(origin, adapters, partial, chunks, BLOCK: tl.constexpr):
    """Σ g² of one chunk of an adapter's gradient."""
    chunk, adapter = tl.program_id(0), tl.program_id(1)
    start, size = tl.multiple_of(tl.load(adapters + adapter * 2), 16), tl.load(adapters + adapter * 2 + 1)
    size = tl.multiple_of(size, 16)
    if chunk.to(tl.int64) * BLOCK >= size:
        return
    at = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(origin + start + at, mask=at < size, other=0.0)
    tl.store(partial + adapter.to(tl.int64) * chunks + chunk, tl.sum(g * g, axis=0))


@triton.jit(do_not_specialize=["chunks"])
def norms(adapters, partial, out, chunks, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Each adapter's norm, from its own chunks in their order."""
    adapter = tl.program_id(0)
    count = tl.cdiv(tl.load(adapters + adapter * 2 + 1), BLOCK)
    total = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, count, WIDTH):
        at = first + tl.arange(0, WIDTH)
        total += tl.load(partial + adapter.to(tl.int64) * chunks + at, mask=at < count, other=0.0)
    tl.store(out + adapter, tl.sqrt(tl.sum(total, axis=0)))


@triton.jit
def adamw(
    origin_, copies_, ranges, settings, norms, COPY: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr
):
    """One step of a chunk of a range; its gradient becomes zero, and its compute copy follows.

    The gradient is clipped as by torch.nn.utils.clip_grad_norm_; there is no step if its norm is not finite.
    """
    row = ranges + tl.program_id(1) * RANGE_FIELDS
    size = tl.multiple_of(tl.load(row + 5), 16)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if first >= size:
        return
    own = settings + tl.program_id(1) * SETTINGS
    limit, decay, b1, c1 = tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)
    b2, c2, rate = tl.load(own + 4), tl.load(own + 5), tl.load(own + 6)
    root, eps = tl.load(own + 7), tl.load(own + 8)
    at = first + tl.arange(0, BLOCK)
    mask = at < size
    weights = origin_ + tl.multiple_of(tl.load(row), 16) + at
    gradient = origin_ + tl.multiple_of(tl.load(row + 1), 16) + at
    moment = origin_ + tl.multiple_of(tl.load(row + 2), 16) + at
    square = origin_ + tl.multiple_of(tl.load(row + 3), 16) + at
    norm = tl.load(norms + tl.load(row + 6))
    if norm < float("inf"):  # which neither infinity nor NaN is
        factor = tl.where(norm > 0.0, tl.minimum(limit / (norm + 1e-6), 1.0), 1.0)
        g = factor * tl.load(gradient, mask=mask, other=0.0)
        m = b1 * tl.load(moment, mask=mask, other=0.0) + c1 * g
        v = b2 * tl.load(square, mask=mask, other=0.0) + c2 * g * g
        w = decay * tl.load(weights, mask=mask, other=0.0) - rate * m / (tl.sqrt(v) * root + eps)
        tl.store(weights, w, mask=mask)
        tl.store(moment, m, mask=mask)
        tl.store(square, v, mask=mask)
        if COPY:
            copy = copies_ + tl.multiple_of(tl.load(row + 4), 16) + at
            tl.store(copy, w.to(copies_.dtype.element_ty), mask=mask)
    if ZERO:
        tl.store(gradient, tl.zeros((BLOCK,), tl.float32), mask=mask)
