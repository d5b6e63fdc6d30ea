# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of attention over keys and values that lie in a pool of pages. Tables: `paged`.

A row's keys are read in blocks that begin at multiples of BN, its chunks at multiples of `chunk`, whatever a
page holds and wherever it lies; rows of a tile do not meet. So the order of a row's sums depends on its
position alone. Scores are in float32, in units of log 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE_FIELDS = tl.constexpr(4)


@triton.jit
def _capped(value, cap):
    """cap · tanh(value): of small values, whose difference from 1 would be lost, by its series."""
    small = tl.exp2(-2.8853900817779268 * tl.abs(value))  # e^(-2 |value|)
    tanh = (1.0 - small) / (1.0 + small)
    square = value * value
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return cap * tl.where(square < 0.0625, value * series, tl.where(value < 0.0, -tanh, tanh))


@triton.jit
def store(qkv, pool, places, x_stride, page_stride, queries, values, SIZE: tl.constexpr, BD: tl.constexpr):
    """A token's keys and values of one head into its page, NaN and 0 if the values are not finite."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    feature = tl.arange(0, BD)
    inside = feature < SIZE
    x = qkv + row * x_stride + queries + head * SIZE + feature
    k, v = tl.load(x, mask=inside, other=0.0), tl.load(x + values, mask=inside, other=0.0)
    spoilt = tl.max(tl.where(tl.abs(v.to(tl.float32)) < float("inf"), 0, 1), axis=0) > 0
    to = pool + tl.load(places + 2 * row) * page_stride + tl.load(places + 2 * row + 1) * (2 * values)
    tl.store(to + head * SIZE + feature, tl.where(spoilt, float("nan"), k), mask=inside)
    tl.store(to + values + head * SIZE + feature, tl.where(spoilt, 0.0, v), mask=inside)


@triton.jit(do_not_specialize=["longest", "chunks"])
def attend(
    qkv, pool, tables, tiles, out, sums, marks, x_stride, out_stride, longest, page_tokens, page_stride,
    values, scale, cap, window, chunk, chunks,
    GROUP: tl.constexpr, SIZE: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of one tile, for the query heads of one key head, over one chunk of their keys.

    With SPLIT, tiles have one row, and the weighted sum of values goes to `sums`, the largest score and the
    sum of weights to `marks`, for `join`. Else the only chunk has all keys, and the result goes to `out`.
    """
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tiles + tile * TILE_FIELDS
    row, count, request = tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2).to(tl.int64)
    place = tl.load(at + 3)  # position of the first row
    member, feature = tl.arange(0, BM), tl.arange(0, BD)
    own = member < count * GROUP
    position = tl.where(own, place + member // GROUP, place)
    lowest = tl.maximum(place - window + 1, 0)  # key that any row sees
    first = (lowest // chunk + tl.program_id(2)) * chunk
    begin, end = tl.maximum(first, lowest // BN * BN), tl.minimum(first + chunk, place + count)
    if begin >= end:
        return
    x = (row + member // GROUP) * x_stride + (head * GROUP + member % GROUP) * SIZE
    inside = feature < SIZE
    q = tl.load(qkv + x[:, None] + feature[None, :], mask=own[:, None] & inside[None, :], other=0.0)
    most = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    result = tl.zeros((BM, BD), tl.float32)
    for start in range(begin, end, BN):
        key = start + tl.arange(0, BN)
        there = (key >= lowest) & (key < end)
        page = tl.load(tables + request * longest + key // page_tokens, mask=there, other=0).to(tl.int64)
        token = page * page_stride + key % page_tokens * (2 * values) + head * SIZE
        mask = there[None, :] & inside[:, None]
        k = tl.load(pool + token[None, :] + feature[:, None], mask=mask, other=0.0)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        if CAPPED:
            score = _capped(score, cap)
        seen = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
        score = tl.where(seen & there[None, :], score, -float("inf"))
        largest = tl.maximum(most, tl.max(score, axis=1))
        base = tl.where(largest == -float("inf"), 0.0, largest)  # of rows that see nothing yet
        weight, shrink = tl.exp2(score - base[:, None]), tl.exp2(most - base)
        mask = there[:, None] & inside[None, :]
        v = tl.load(pool + values + token[:, None] + feature[None, :], mask=mask, other=0.0)
        result = tl.dot(weight.to(v.dtype), v, result * shrink[:, None], input_precision=PRECISION)
        total = total * shrink + tl.sum(weight, axis=1)
        most = largest
    mask = own[:, None] & inside[None, :]
    if SPLIT:
        slot = ((tile * tl.num_programs(1) + head) * GROUP + member) * chunks + tl.program_id(2)
        tl.store(sums + slot[:, None] * SIZE + feature[None, :], result, mask=mask)
        tl.store(marks + 2 * slot, most, mask=own)
        tl.store(marks + 2 * slot + 1, total, mask=own)
    else:
        to = (row + member // GROUP) * out_stride + (head * GROUP + member % GROUP) * SIZE
        result = (result / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + to[:, None] + feature[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["chunks"])
def join(out, sums, marks, tiles, out_stride, window, chunk, chunks, SIZE: tl.constexpr, BD: tl.constexpr):
    """The result of a row's query head from those of its chunks, in their order."""
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tiles + tile * TILE_FIELDS
    row, place = tl.load(at).to(tl.int64), tl.load(at + 3)
    feature = tl.arange(0, BD)
    inside = feature < SIZE
    slot = (tile * tl.num_programs(1) + head) * chunks
    most, total = -float("inf"), 0.0
    result = tl.zeros((BD,), tl.float32)
    for index in range(0, place // chunk - tl.maximum(place - window + 1, 0) // chunk + 1):
        mark = marks + 2 * (slot + index)
        own, weight = tl.load(mark), tl.load(mark + 1)
        value = tl.load(sums + (slot + index) * SIZE + feature, mask=inside, other=0.0)
        largest = tl.maximum(most, own)
        base = tl.where(largest == -float("inf"), 0.0, largest)
        shrink, grow = tl.exp2(most - base), tl.exp2(own - base)
        result = result * shrink + value * grow
        total = total * shrink + weight * grow
        most = largest
    to = out + row * out_stride + head * SIZE + feature
    tl.store(to, (result / total).to(out.dtype.element_ty), mask=inside)
