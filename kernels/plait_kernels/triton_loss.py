# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernel of the cross-entropy: two reads of the logits and one write, of their gradient, in place."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _logits(row, column, vocabulary, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """A block of a row's logits in float32; −inf beyond the vocabulary."""
    value = tl.load(row + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
    if SCALED:
        value *= scale
    if CAPPED:  # softcap·tanh(value / softcap), which exp cannot overflow
        small = tl.exp(-2.0 * tl.abs(value) / softcap)
        tanh = (1.0 - small) / (1.0 + small)
        value = softcap * tl.where(value < 0.0, -tanh, tanh)
        value = tl.where(column < vocabulary, value, -float("inf"))
    return value


@triton.jit
def cross_entropy(
    logits_, targets, weights, nll, vocabulary, scale, softcap,
    GRADIENT: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """nll of one row; and in place of its logits their gradient, weight · (softmax − one at the target).

    Every lane sums its own columns, and then all lanes are summed, so the order is fixed.
    """
    index = tl.program_id(0)
    row = logits_ + index.to(tl.int64) * vocabulary
    target = tl.load(targets + index).to(tl.int32)
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    own = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = _logits(row, column, vocabulary, scale, softcap, SCALED, CAPPED)
        higher = tl.maximum(top, value)
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # inf − inf is not a number
        total = total * tl.exp(top - shift) + tl.exp(value - shift)
        top = higher
        own += tl.where(column == target, value, 0.0)
    highest = tl.max(top, axis=0)
    normaliser = highest + tl.log(tl.sum(total * tl.exp(top - highest), axis=0))
    tl.store(nll + index, normaliser - tl.sum(own, axis=0))
    if GRADIENT:
        weight = tl.load(weights + index)
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = _logits(row, column, vocabulary, scale, softcap, SCALED, CAPPED)
            grad = weight * (tl.exp(value - normaliser) - tl.where(column == target, 1.0, 0.0))
            if CAPPED:
                grad *= 1.0 - (value / softcap) * (value / softcap)
            if SCALED:
                grad *= scale
            tl.store(row + column, grad.to(logits_.dtype.element_ty), mask=column < vocabulary)
