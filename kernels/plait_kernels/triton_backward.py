# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of the backward pass. Tables and what kernels share: `triton_common`.

Arguments that change with the microbatch are not specialised, so that no kernel is compiled again for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plait_kernels.triton_common import (
    ABSENT,
    SITE_FIELDS,
    SPAN_FIELDS,
    A,
    B,
    drop_again,
    keep_factor,
    load_bits,
    load_offset,
    load_site,
    load_span,
    load_tile,
    load_work,
    low_rank_product,
    row_stride,
    swizzle,
)
from plait_kernels.triton_forward import product_of_rows


@triton.jit(do_not_specialize=["begin", "bank_sites", "slots"])
def up_gradient(
    grad, grad_stride, s, ds, packed, split_stride, origin, gradient_origin, partial, work, begin, spans,
    scales, sites, addresses, gradients, bank_sites, slots, split_columns,
    ALIGN: tl.constexpr, RANKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dS = s dh B over one split of the columns, and dB = s dhᵀ S, from one read of dh: for few ranks.

    dB of an adapter's only tile is added to its gradient; of several, each tile's goes to its slot.
    """
    site = tl.program_id(0)
    first, count, span, slot, _first_rank = load_work(work, begin + tl.program_id(1))
    bank_site, _, column_first, width = load_site(sites, site, ALIGN)
    b_offset = load_offset(addresses, span, bank_sites, bank_site, B)
    if b_offset < ABSENT:
        return
    rank, _, _, s_start = load_span(spans, span, RANKS)
    stride = row_stride(rank)
    target = gradient_origin + load_offset(gradients, span, bank_sites, bank_site, B)
    if slot >= 0:
        target = partial + slots * column_first + slot * width
    start = tl.program_id(2) * split_columns
    end = tl.minimum(start + split_columns, width)
    rows, ranks = tl.arange(0, BM), tl.arange(0, BR)
    row_mask, rank_mask = rows < count, ranks < rank
    packed_at = (
        site.to(tl.int64) * packed + s_start + first * stride + rows[:, None] * stride + ranks[None, :]
    )
    packed_mask = row_mask[:, None] & (ranks < stride)[None, :]
    own_s = tl.load(s + packed_at, mask=packed_mask, other=0.0)
    grad += first * grad_stride + column_first
    scale = tl.load(scales + span)
    total = tl.zeros((BM, BR), tl.float32)
    for n in range(start, end, BN):
        columns = n + tl.arange(0, BN)
        column_mask = columns < end
        dh = tl.load(
            grad + rows[:, None] * grad_stride + columns[None, :],
            mask=row_mask[:, None] & column_mask[None, :],
            other=0.0,
        )
        mask = column_mask[:, None] & rank_mask[None, :]
        where = columns[:, None] * rank + ranks[None, :]
        own_b = tl.load(origin + b_offset + where, mask=mask, other=0.0)
        total = tl.dot(dh, own_b, total, input_precision=PRECISION)
        db = scale * tl.dot(tl.trans(dh), own_s, input_precision=PRECISION)
        if slot < 0:
            db += tl.load(target + where, mask=mask, other=0.0)
        tl.store(target + where, db, mask=mask)
    value = tl.where(rank_mask[None, :], scale * total, 0.0).to(ds.dtype.element_ty)
    tl.store(ds + tl.program_id(2).to(tl.int64) * split_stride + packed_at, value, mask=packed_mask)


@triton.jit(do_not_specialize=["begin", "bank_sites"])
def wide_ds(
    grad, grad_stride, ds, packed, split_stride, origin, work, begin, spans, scales, sites, addresses,
    bank_sites, split_columns,
    ALIGN: tl.constexpr, RANKS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dS = s dh B of an adapter of many ranks, over one split of the columns."""
    site = tl.program_id(0)
    first, count, span, _slot, first_rank = load_work(work, begin + tl.program_id(1))
    bank_site, _, column_first, width = load_site(sites, site, ALIGN)
    b_offset = load_offset(addresses, span, bank_sites, bank_site, B)
    if b_offset < ABSENT:
        return
    rank, _, _, s_start = load_span(spans, span, RANKS)
    stride = row_stride(rank)
    split = tl.program_id(2).to(tl.int64)
    start = tl.program_id(2) * split_columns
    ds += split * split_stride + site.to(tl.int64) * packed + s_start + first * stride + first_rank
    product_of_rows(
        grad + first * grad_stride + column_first, grad_stride, ds, stride, origin + b_offset + first_rank,
        rank, 1, ds, 0, ds, count, rank - first_rank, start, tl.minimum(start + split_columns, width), 0, 0,
        0, 0, tl.load(scales + span), False, BM, BK, BR, PRECISION,
    )  # fmt: skip


@triton.jit
def _sum_over_rows(
    x, x_stride, ds, stride, target, r_stride, m_stride, bits, bits_stride, count, left, slot, k, end,
    threshold, factor,
    DROPOUT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BR ranks of factor · dSᵀ (D ∘ x) over one chunk of rows, in the columns from `k` on.

    The pointers are those of the chunk's first row and rank; the sum is addressed by target +
    rank·r_stride + column·m_stride.
    """
    ranks, columns = tl.arange(0, BR), k + tl.arange(0, BK)
    column_mask = columns < end
    total = tl.zeros((BR, BK), tl.float32)
    for row in range(0, count, BM):
        rows = tl.arange(0, BM)
        row_mask = rows < count - row
        mask = row_mask[:, None] & column_mask[None, :]
        values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
        if DROPOUT:
            own_bits = load_bits(bits, bits_stride, count - row, k, threshold, BM, BK)
            values = drop_again(values, own_bits, BM, BK)
        own_ds = tl.load(
            ds + rows[None, :] * stride + ranks[:, None],
            mask=(ranks < row_stride(left))[:, None] & row_mask[None, :],
            other=0.0,
        )
        total = tl.dot(own_ds, values, total, input_precision=PRECISION)
        x += BM * x_stride
        ds += BM * stride
        bits += BM * bits_stride
    total *= factor
    where = target + ranks[:, None] * r_stride + columns[None, :] * m_stride
    mask = (ranks < left)[:, None] & column_mask[None, :]
    if slot < 0:
        total += tl.load(where, mask=mask, other=0.0)
    tl.store(where, total, mask=mask)


@triton.jit(do_not_specialize=["begin", "bank_sites", "slots"])
def wide_db(
    grad, grad_stride, s, packed, gradient_origin, partial, work, begin, spans, scales, sites, gradients,
    bank_sites, slots,
    ALIGN: tl.constexpr, RANKS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dB = s dhᵀ S of an adapter of many ranks, over one chunk of its rows."""
    site = tl.program_id(0)
    first, count, span, slot, first_rank = load_work(work, begin + tl.program_id(2))
    bank_site, _, column_first, width = load_site(sites, site, ALIGN)
    b_offset = load_offset(gradients, span, bank_sites, bank_site, B)
    k = tl.program_id(1) * BK
    if (b_offset < ABSENT) | (k >= width):
        return
    rank, _, _, s_start = load_span(spans, span, RANKS)
    stride = row_stride(rank)
    target = gradient_origin + b_offset
    if slot >= 0:
        target = partial + slots * column_first + slot * width
    s += site.to(tl.int64) * packed + s_start + first * stride + first_rank
    _sum_over_rows(
        grad + first * grad_stride + column_first, grad_stride, s, stride, target + first_rank, 1, rank,
        s, 0, count, rank - first_rank, slot, k, width, 0, tl.load(scales + span),
        False, BM, BK, BR, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["begin", "bank_sites", "slots"])
def down_gradient(
    x, x_stride, ds, packed, bits, bits_stride, bits_site, gradient_origin, partial, work, begin,
    spans, sites, gradients, bank_sites, slots, features,
    DROPOUT: tl.constexpr, RANKS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dA = dSᵀ (D ∘ x) over one chunk of an adapter's rows."""
    site = tl.program_id(0)
    first, count, span, slot, first_rank = load_work(work, begin + tl.program_id(2))
    bank_site, _module, _first, _columns = load_site(sites, site, 1)
    a_offset = load_offset(gradients, span, bank_sites, bank_site, A)
    if a_offset < ABSENT:
        return
    rank, threshold, _seed, s_start = load_span(spans, span, RANKS)
    stride = row_stride(rank)
    target = gradient_origin + a_offset
    if slot >= 0:
        target = partial + (site.to(tl.int64) * slots + slot) * features
    target += first_rank.to(tl.int64) * features
    factor = 1.0
    if DROPOUT:
        factor *= keep_factor(threshold)
    ds += site.to(tl.int64) * packed + s_start + first * stride + first_rank
    _sum_over_rows(
        x + first * x_stride, x_stride, ds, stride, target, features, 1,
        bits + site.to(tl.int64) * bits_site + first * bits_stride, bits_stride, count, rank - first_rank,
        slot, tl.program_id(1) * BK, features, threshold, factor, DROPOUT, BM, BK, BR, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["bank_sites", "slots"])
def sum_partials(
    partial, gradient_origin, adapters, spans, sites, gradients, bank_sites, slots,
    IS_B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add an adapter's partial sums to its gradient, in the order of its tiles.

    `adapters` holds for each adapter of several tiles (one of its spans, first slot, tiles).
    """
    adapter = adapters + tl.program_id(1) * 3
    span, first, tile_count = tl.load(adapter), tl.load(adapter + 1), tl.load(adapter + 2)
    site = tl.program_id(2)
    rank = tl.load(spans + span * SPAN_FIELDS)
    bank_site, _, column_first, columns = load_site(sites, site, 1)
    offset = load_offset(gradients, span, bank_sites, bank_site, IS_B)
    if offset < ABSENT:
        return
    width = tl.load(sites + site * SITE_FIELDS + 4)
    base = site.to(tl.int64) * slots * width
    if IS_B:
        width = columns.to(tl.int64)
        base = slots * column_first
    block = tl.program_id(0).to(tl.int64) * BLOCK
    if block >= rank * width:
        return
    index = block + tl.arange(0, BLOCK)
    mask = index < rank * width
    total = tl.zeros((BLOCK,), tl.float32)
    part = partial + base + first * width
    for _ in range(0, tile_count):
        total += tl.load(part + index, mask=mask, other=0.0)
        part += rank * width
    target = gradient_origin + offset + index
    tl.store(target, tl.load(target, mask=mask, other=0.0) + total, mask=mask)


@triton.jit
def low_rank_dx(
    ds, packed, bits, bits_stride, bits_site, origin, spans, sites, site_count, addresses, bank_sites,
    span, first, count, rows, row_mask, k, columns, column_mask, features,
    DROPOUT: tl.constexpr, RANKS: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ over sites of D ∘ (dS A) of a tile in the features that begin at `k`; zero without an adapter."""
    total = tl.zeros((BM, BK), tl.float32)
    rank, threshold, _seed, s_start = load_span(spans, tl.maximum(span, 0), RANKS)
    ds += s_start + first * row_stride(rank)
    bits += first * bits_stride
    ahead = load_offset(addresses, span, bank_sites, tl.load(sites), A)
    for site in range(0, site_count):
        a_offset = ahead  # the next one's takes two loads, one after the other: they are asked for now
        next_site = tl.minimum(site + 1, site_count - 1)
        ahead = load_offset(addresses, span, bank_sites, tl.load(sites + next_site * SITE_FIELDS), A)
        if a_offset >= ABSENT:
            if DROPOUT:  # asked for before the product, so that they are there after it
                own_bits = load_bits(bits, bits_stride, count, k, threshold, BM, BK)
            low = low_rank_product(
                ds, rows, row_mask, origin + a_offset + k, columns, column_mask, 1, features, rank,
                FEW, BM, BK, PRECISION,
            )  # fmt: skip
            if DROPOUT:
                low = drop_again(low, own_bits, BM, BK)
            total += low
        ds += packed
        bits += bits_site
    if DROPOUT:
        total *= keep_factor(threshold)
    return total


@triton.jit(do_not_specialize=["site_count", "bank_sites"])
def dx_low_rank(
    dx, dx_stride, ds, packed, bits, bits_stride, bits_site, origin, tiles, spans, sites, site_count,
    addresses, bank_sites, features,
    DROPOUT: tl.constexpr, RANKS: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dx = Σ over sites of D ∘ (dS A), to which the vendor's product is added; nothing of `dx` is read."""
    first, count, span = load_tile(tiles, tl.program_id(1))
    rows, columns = tl.arange(0, BM), tl.arange(0, BK)
    k = tl.program_id(0) * BK
    row_mask, column_mask = rows < count, columns < features - k
    total = low_rank_dx(
        ds, packed, bits, bits_stride, bits_site, origin, spans, sites, site_count, addresses, bank_sites,
        span, first, count, rows, row_mask, k, columns, column_mask, features,
        DROPOUT, RANKS, FEW, BM, BK, PRECISION,
    )  # fmt: skip
    target = dx + first * dx_stride + k + rows[:, None] * dx_stride + columns[None, :]
    tl.store(target, total.to(dx.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["site_count", "bank_sites", "tile_count", "block_count"])
def dx_linear(
    grad, grad_stride, w, w_out_stride, w_in_stride, dx, dx_stride, ds, packed, bits, bits_stride,
    bits_site, origin, tiles, tile_count, spans, sites, site_count, addresses, bank_sites, features,
    out_features, block_count,
    DROPOUT: tl.constexpr, RANKS: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx = dh W + Σ over sites of D ∘ (dS A), the base product added in the low-rank term's accumulator."""
    tile, block_index = swizzle(tl.program_id(0), tile_count, block_count, GROUP)
    first, count, span = load_tile(tiles, tile)
    rows, columns = tl.arange(0, BM), tl.arange(0, BK)
    k = block_index * BK
    row_mask, column_mask = rows < count, columns < features - k
    total = low_rank_dx(
        ds, packed, bits, bits_stride, bits_site, origin, spans, sites, site_count, addresses, bank_sites,
        span, first, count, rows, row_mask, k, columns, column_mask, features,
        DROPOUT, RANKS, FEW, BM, BK, PRECISION,
    )  # fmt: skip
    grad += first * grad_stride
    w += k.to(tl.int64) * w_in_stride
    for n in range(0, out_features, BN):
        inner = tl.arange(0, BN)
        inner_mask = inner < out_features - n
        dh = tl.load(
            grad + rows[:, None] * grad_stride + inner[None, :],
            mask=row_mask[:, None] & inner_mask[None, :],
            other=0.0,
        )
        own_w = tl.load(
            w + inner[:, None] * w_out_stride + columns[None, :] * w_in_stride,
            mask=inner_mask[:, None] & column_mask[None, :],
            other=0.0,
        )
        total = tl.dot(dh, own_w, total, input_precision=PRECISION)
        grad += BN
        w += BN * w_out_stride
    target = dx + first * dx_stride + k + rows[:, None] * dx_stride + columns[None, :]
    tl.store(target, total.to(dx.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
