# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of attention with a softcap over packed samples; scores exist tile by tile only.

A tile begins at a multiple of its size within its own sample, and sums go through it in order, so a sample's
bits are its own whatever lies beside it. Every number is written by one program: nothing is added up in
memory. Scores and sums are in units of log 2, of which powers are one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(twice, EXACT: tl.constexpr):
    """tanh(x), given 2x / log 2; EXACT: to a few roundings near 0, too, which half precision cannot tell."""
    out = 1.0 - 2.0 / (tl.exp2(twice) + 1.0)
    if EXACT:
        x = twice * 0.34657359027997264
        y = x * x
        near = 21844 / 6081075 + y * (-929569 / 638512875)
        near = 2 / 15 + y * (-17 / 315 + y * (62 / 2835 + y * (-1382 / 155925 + y * near)))
        out = tl.where(tl.abs(x) < 0.5, x + x * y * (-1 / 3 + y * near), out)
    return out


@triton.jit
def _product(one, other, EXACT: tl.constexpr):
    return tl.dot(one, other, input_precision="ieee" if EXACT else "tf32")


@triton.jit
def _seen(row, key, window, WINDOWED: tl.constexpr):
    """Whether a query sees a key: its own, those before, and at most ``window`` of them."""
    seen = key <= row
    if WINDOWED:
        seen = seen & (row - key < window)
    return seen


@triton.jit
def _sample(ends, sample):
    """A sample's first row, and how many it has."""
    begin = tl.load(ends + sample)
    return begin.to(tl.int64), tl.load(ends + sample + 1) - begin


@triton.jit
def _keys(first, length, window, BM: tl.constexpr, BN: tl.constexpr, WINDOWED: tl.constexpr):
    """The keys [low, stop) that a tile of queries sees, low a multiple of BN."""
    low = first * 0
    if WINDOWED:
        low = tl.maximum(first - window + 1, 0) // BN * BN
    return low, tl.minimum(length, first + BM)


@triton.jit
def _attend(
    acc, top, total, q, qkv, row, begin, stop, length, stride, values, size, window, inner, outer,
    WINDOWED: tl.constexpr, EXACT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The sums of rows of queries, with those over keys [begin, stop)."""
    feature = tl.arange(0, BD)
    at = tl.arange(0, BN)[:, None] * stride + feature[None, :]
    for start in range(begin, stop, BN):
        key = start + tl.arange(0, BN)
        there = (key < length)[:, None] & (feature < size)[None, :]
        here = qkv + tl.cast(start, tl.int64) * stride
        k = tl.load(here + at, mask=there, other=0.0)
        scores = outer * _tanh(inner * _product(q, tl.trans(k), EXACT), EXACT)
        scores = tl.where(_seen(row[:, None], key[None, :], window, WINDOWED), scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        part = tl.exp2(scores - higher[:, None])
        fading = tl.exp2(top - higher)
        total = total * fading + tl.sum(part, axis=1)
        v = tl.load(here + values + at, mask=there, other=0.0)
        acc = acc * fading[:, None] + _product(part.to(v.dtype), v, EXACT)
        top = higher
    return acc, top, total


@triton.jit
def attend(
    qkv, ends, out, sums, query, shared, size, window, inner, outer,
    WINDOWED: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out = softmax(outer · tanh(inner · q·k)) v, sums = log2 of each row's sum, for a tile of queries."""
    head = tl.program_id(1)
    begin, length = _sample(ends, tl.program_id(2))
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # the longest work begins first
    if first < length:
        stride = (query + 2 * shared) * size
        row = first + tl.arange(0, BM)
        feature = tl.arange(0, BD)
        there = (row < length)[:, None] & (feature < size)[None, :]
        inside = tl.arange(0, BM)[:, None]
        own = qkv + (begin + first) * stride + head * size
        q = tl.load(own + inside * stride + feature[None, :], mask=there, other=0.0)
        keys = qkv + begin * stride + (query + head // (query // shared)) * size
        low, stop = _keys(first, length, window, BM, BN, WINDOWED)
        acc = tl.zeros((BM, BD), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        top = total - outer  # no score is below
        values = shared * size
        acc, top, total = _attend(
            acc, top, total, q, keys, row, low, stop, length, stride, values, size, window, inner, outer,
            WINDOWED, EXACT, BN, BD,
        )  # fmt: skip
        into = out + ((begin + first) * query + head) * size
        at = inside * (query * size) + feature[None, :]
        tl.store(into + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=there)
        at = (begin + first) * query + head + tl.arange(0, BM) * query
        tl.store(sums + at, top + tl.log2(total), mask=row < length)


@triton.jit
def _query_sums(
    dq, q, grad, sums, delta, qkv, row, begin, stop, length, stride, values, size, window, inner, outer,
    WINDOWED: tl.constexpr, EXACT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The gradient of rows of queries, with that over keys [begin, stop)."""
    feature = tl.arange(0, BD)
    at = tl.arange(0, BN)[:, None] * stride + feature[None, :]
    for start in range(begin, stop, BN):
        key = start + tl.arange(0, BN)
        there = (key < length)[:, None] & (feature < size)[None, :]
        here = qkv + tl.cast(start, tl.int64) * stride
        k = tl.load(here + at, mask=there, other=0.0)
        capped = _tanh(inner * _product(q, tl.trans(k), EXACT), EXACT)
        part = tl.exp2(outer * capped - sums[:, None])
        part = tl.where(_seen(row[:, None], key[None, :], window, WINDOWED), part, 0.0)
        v = tl.load(here + values + at, mask=there, other=0.0)
        steep = _product(grad, tl.trans(v), EXACT) - delta[:, None]
        slope = part * steep * (1.0 - capped * capped)
        dq += _product(slope.to(k.dtype), k, EXACT)
    return dq


@triton.jit
def query_gradient(
    grad, qkv, ends, out, sums, deltas, dqs, query, shared, size, window, scale, inner, outer,
    WINDOWED: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries, and deltas, each row's grad · out."""
    head = tl.program_id(1)
    begin, length = _sample(ends, tl.program_id(2))
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    if first < length:
        stride = (query + 2 * shared) * size
        row = first + tl.arange(0, BM)
        feature = tl.arange(0, BD)
        there = (row < length)[:, None] & (feature < size)[None, :]
        inside = tl.arange(0, BM)[:, None]
        own = (begin + first) * stride + head * size
        at = inside * stride + feature[None, :]
        q = tl.load(qkv + own + at, mask=there, other=0.0)
        flat = ((begin + first) * query + head) * size
        narrow = inside * (query * size) + feature[None, :]
        g = tl.load(grad + flat + narrow, mask=there, other=0.0)
        o = tl.load(out + flat + narrow, mask=there, other=0.0)
        delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), axis=1)
        place = (begin + first) * query + head + tl.arange(0, BM) * query
        tl.store(deltas + place, delta, mask=row < length)
        total = tl.load(sums + place, mask=row < length, other=0.0)
        keys = qkv + begin * stride + (query + head // (query // shared)) * size
        low, stop = _keys(first, length, window, BM, BN, WINDOWED)
        dq = tl.zeros((BM, BD), tl.float32)
        values = shared * size
        dq = _query_sums(
            dq, q, g, total, delta, keys, row, low, stop, length, stride, values, size, window, inner, outer,
            WINDOWED, EXACT, BN, BD,
        )  # fmt: skip
        tl.store(dqs + own + at, (scale * dq).to(dqs.dtype.element_ty), mask=there)


@triton.jit
def _key_sums(
    dk, dv, k, v, qkv, grad, sums, deltas, key, begin, stop, length, stride, query, size, window, inner,
    outer, WINDOWED: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values, with those of rows [begin, stop) of a head's queries."""
    feature = tl.arange(0, BD)
    inside = tl.arange(0, BM)
    for start in range(begin, stop, BM):
        row = start + inside
        there = (row < length)[:, None] & (feature < size)[None, :]
        far = tl.cast(start, tl.int64)
        at = inside[:, None] * stride + feature[None, :]
        q = tl.load(qkv + far * stride + at, mask=there, other=0.0)
        at = far * query + inside * query
        total = tl.load(sums + at, mask=row < length, other=0.0)
        delta = tl.load(deltas + at, mask=row < length, other=0.0)
        capped = _tanh(inner * _product(k, tl.trans(q), EXACT), EXACT)
        part = tl.exp2(outer * capped - total[None, :])
        seen = _seen(row[None, :], key[:, None], window, WINDOWED) & (row < length)[None, :]
        part = tl.where(seen, part, 0.0)  # rows beyond the sample have no sums
        at = inside[:, None] * (query * size) + feature[None, :]
        g = tl.load(grad + far * (query * size) + at, mask=there, other=0.0)
        dv += _product(part.to(g.dtype), g, EXACT)
        steep = _product(v, tl.trans(g), EXACT) - delta[None, :]
        slope = part * steep * (1.0 - capped * capped)
        dk += _product(slope.to(q.dtype), q, EXACT)
    return dk, dv


@triton.jit
def key_gradient(
    grad, qkv, ends, sums, deltas, dkvs, query, shared, size, window, scale, inner, outer,
    WINDOWED: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and of their values, over all heads that share them, in order."""
    head = tl.program_id(1)
    begin, length = _sample(ends, tl.program_id(2))
    first = tl.program_id(0) * BN
    if first < length:
        stride = (query + 2 * shared) * size
        key = first + tl.arange(0, BN)
        feature = tl.arange(0, BD)
        there = (key < length)[:, None] & (feature < size)[None, :]
        at = tl.arange(0, BN)[:, None] * stride + feature[None, :]
        own = (begin + first) * stride + (query + head) * size
        values = shared * size
        k = tl.load(qkv + own + at, mask=there, other=0.0)
        v = tl.load(qkv + own + values + at, mask=there, other=0.0)
        stop = length
        if WINDOWED:
            stop = tl.minimum(length, first + BN + window - 1)
        dk = tl.zeros((BN, BD), tl.float32)
        dv = tl.zeros((BN, BD), tl.float32)
        for member in range(query // shared):
            number = head * (query // shared) + member
            q = qkv + begin * stride + number * size
            g = grad + (begin * query + number) * size
            total = sums + begin * query + number
            delta = deltas + begin * query + number
            dk, dv = _key_sums(
                dk, dv, k, v, q, g, total, delta, key, first // BM * BM, stop, length, stride, query,
                size, window, inner, outer, WINDOWED, EXACT, BM, BD,
            )  # fmt: skip
        own = (begin + first) * stride + head * size  # of what begins with the first key
        tl.store(dkvs + own + at, (scale * dk).to(dkvs.dtype.element_ty), mask=there)
        tl.store(dkvs + own + values + at, dv.to(dkvs.dtype.element_ty), mask=there)
