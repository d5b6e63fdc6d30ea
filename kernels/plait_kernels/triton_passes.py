# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of the passes between the products; each reads its inputs and writes its outputs once.

All arithmetic is in float32 and rounded once, but for the quotient of an RMSNorm without an offset, which is
rounded before the product with the weight, as in Llama. A LayerNorm is an RMSNorm of what is centred.
Rows do not meet: no sum goes over two of them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(program, rows, features, BR: tl.constexpr, BF: tl.constexpr):
    """(offsets, mask, row numbers, columns) of a block of whole rows."""
    row = program.to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BF)
    mask = (row < rows)[:, None] & (column < features)[None, :]
    return row[:, None] * features + column[None, :], mask, row, column


@triton.jit
def _centred(value, mask, features):
    """Whole rows less their means."""
    mean = tl.sum(value, axis=1) / features
    return tl.where(mask, value - mean[:, None], 0.0)


@triton.jit(do_not_specialize=["rows"])
def rms(
    x, residual, weight, bias, out, total, scales, rows, features, eps, offset,
    RESIDUAL: tl.constexpr, CENTRED: tl.constexpr, BIASED: tl.constexpr, ROUNDED: tl.constexpr,
    BR: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """total = x + residual; out = total / rms(total) · (offset + weight) + bias; scales = 1 / rms(total), all
    but total of what is CENTRED."""
    at, mask, row, column = _tile(tl.program_id(0), rows, features, BR, BF)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        summed = value.to(total.dtype.element_ty)
        tl.store(total + at, summed, mask=mask)
        value = summed.to(tl.float32)
    if CENTRED:
        value = _centred(value, mask, features)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / features + eps)
    tl.store(scales + row, scale, mask=row < rows)
    quotient = value * scale[:, None]
    if ROUNDED:
        quotient = quotient.to(out.dtype.element_ty).to(tl.float32)
    factor = offset + tl.load(weight + column, mask=column < features, other=0.0).to(tl.float32)
    value = quotient * factor[None, :]
    if BIASED:
        value += tl.load(bias + column, mask=column < features, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def rms_back(
    grad, x, weight, scales, more, dx, rows, features, offset,
    RESIDUAL: tl.constexpr, CENTRED: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """dx of `rms`, plus `more`, the gradient of x itself."""
    at, mask, row, column = _tile(tl.program_id(0), rows, features, BR, BF)
    factor = offset + tl.load(weight + column, mask=column < features, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32) * factor[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        value = _centred(value, mask, features)
        g = _centred(g, mask, features)
    scale = tl.load(scales + row, mask=row < rows, other=0.0)
    mean = tl.sum(g * value, axis=1) / features
    own = scale[:, None] * (g - value * (scale * scale * mean)[:, None])
    if RESIDUAL:
        own += tl.load(more + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + at, own.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _sigmoid(value):
    return 1.0 / (1.0 + tl.exp(-value))


@triton.jit
def activation(gate, KIND: tl.constexpr):
    """(act(gate), its slope) of `plain`'s kinds; GELU's tanh form is gate · sigmoid(2u)."""
    if KIND == 2:  # GELU itself, gate · Φ(gate)
        share = 0.5 * (1.0 + tl.erf(0.7071067811865476 * gate))
        slope = share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    elif KIND == 1:
        inner = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
        share = _sigmoid(inner)
        steep = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        slope = share + gate * share * _sigmoid(-inner) * steep  # 1 - share has lost its digits near 1
    else:
        share = _sigmoid(gate)
        slope = share * (1.0 + gate * (1.0 - share))
    return gate * share, slope


@triton.jit(do_not_specialize=["rows"])
def gated(x, out, rows, width, KIND: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr):
    """out = act(gate) · up, gate and up side by side in x."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BF + tl.arange(0, BF)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * (2 * width) + column[None, :]
    gate = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + at + width, mask=mask, other=0.0).to(tl.float32)
    act, _ = activation(gate, KIND)
    tl.store(out + row[:, None] * width + column[None, :], (act * up).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def gated_back(grad, x, dx, rows, width, KIND: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr):
    """The gradients of gate and up, side by side in dx."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BF + tl.arange(0, BF)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * (2 * width) + column[None, :]
    g = tl.load(grad + row[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + at + width, mask=mask, other=0.0).to(tl.float32)
    act, slope = activation(gate, KIND)
    tl.store(dx + at, (g * up * slope).to(dx.dtype.element_ty), mask=mask)
    tl.store(dx + at + width, (g * act).to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _block(rows, width, BR: tl.constexpr, BF: tl.constexpr):
    """(offsets, mask) of a block of rows and columns."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BF + tl.arange(0, BF)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    return row[:, None] * width + column[None, :], mask


@triton.jit(do_not_specialize=["rows"])
def activate(x, out, rows, width, KIND: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr):
    """out = act(x)."""
    at, mask = _block(rows, width, BR, BF)
    act, _ = activation(tl.load(x + at, mask=mask, other=0.0).to(tl.float32), KIND)
    tl.store(out + at, act.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def activate_back(grad, x, dx, rows, width, KIND: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr):
    """The gradient of x."""
    at, mask = _block(rows, width, BR, BF)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    _, slope = activation(tl.load(x + at, mask=mask, other=0.0).to(tl.float32), KIND)
    tl.store(dx + at, (g * slope).to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def rotate(
    x_, cos, sin, rows, x_stride, table_stride, heads, size, half, sign,
    BR: tl.constexpr, BH: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Rotate the first features of a row's heads in place, the first half of them against the second."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    feature = tl.arange(0, BF)
    own = (row < rows)[:, None] & (feature < half)[None, :]
    table = row[:, None] * table_stride + feature[None, :]
    c1 = tl.load(cos + table, mask=own, other=0.0).to(tl.float32)[:, None, :]
    c2 = tl.load(cos + table + half, mask=own, other=0.0).to(tl.float32)[:, None, :]
    s1 = sign * tl.load(sin + table, mask=own, other=0.0).to(tl.float32)[:, None, :]
    s2 = sign * tl.load(sin + table + half, mask=own, other=0.0).to(tl.float32)[:, None, :]
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    at = row[:, None, None] * x_stride + head[None, :, None] * size + feature[None, None, :]
    mask = own[:, None, :] & (head < heads)[None, :, None]
    first = tl.load(x_ + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ + at + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ + at, (first * c1 - second * s1).to(x_.dtype.element_ty), mask=mask)
    tl.store(x_ + at + half, (second * c2 + first * s2).to(x_.dtype.element_ty), mask=mask)
