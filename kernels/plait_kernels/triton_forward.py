# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of the forward pass. Tables and what kernels share: `triton_common`.

Arguments that change with the microbatch are not specialised, so that no kernel is compiled again for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plait_kernels.triton_common import (
    ABSENT,
    BLOCK_FIELDS,
    A,
    B,
    drop_tile,
    keep_factor,
    load_offset,
    load_site,
    load_span,
    load_tile,
    load_work,
    low_rank_product,
    row_stride,
    row_words,
    swizzle,
)


@triton.jit
def product_of_rows(
    x, x_stride, out, stride, m, m_stride, r_stride, bits, bits_stride, counters, count, left, start,
    end, seed, module, threshold, noted, factor,
    DROPOUT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BR ranks of factor · (D ∘ x) Mᵀ of one tile, over columns [start, end).

    The pointers are those of the tile's first row and rank; M is addressed by m + column·m_stride +
    rank·r_stride. Which columns of the first `noted` rows are dropped is written to `bits`, in whole blocks
    of BK columns.
    """
    rows, ranks = tl.arange(0, BM), tl.arange(0, BR)
    row_mask = rows < count
    total = tl.zeros((BM, BR), tl.float32)
    if DROPOUT:
        words = row_words(counters, rows, row_mask, seed, module)
        factor *= keep_factor(threshold)
    for k in range(start, end, BK):
        columns = k + tl.arange(0, BK)
        column_mask = columns < end
        mask = row_mask[:, None] & column_mask[None, :]
        values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
        if DROPOUT:
            values, own_bits = drop_tile(values, words, k, seed, module, threshold, BM, BK)
            byte = tl.multiple_of(k // 8, BK // 8) + tl.arange(0, BK // 8)
            place = bits + rows[:, None] * bits_stride + byte[None, :]
            tl.store(place, own_bits, mask=(rows < noted)[:, None])
        own_mask = column_mask[:, None] & (ranks < left)[None, :]
        own = tl.load(m + ranks[None, :] * r_stride + columns[:, None] * m_stride, mask=own_mask, other=0.0)
        total = tl.dot(values, own, total, input_precision=PRECISION)
    total = tl.where((ranks < left)[None, :], factor * total, 0.0).to(out.dtype.element_ty)
    out_mask = row_mask[:, None] & (ranks < row_stride(left))[None, :]
    tl.store(out + rows[:, None] * stride + ranks[None, :], total, mask=out_mask)


@triton.jit(do_not_specialize=["begin", "bank_sites"])
def down(
    x, x_stride, s, packed, split_stride, bits, bits_stride, bits_site, origin, work, begin, spans,
    sites, addresses, bank_sites, counters, features, split_features,
    DROPOUT: tl.constexpr, RANKS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """S = (D ∘ x) Aᵀ of each tile's own adapter, over one split of the features.

    Sites and blocks of ranks are the fastest axes, so that those who read the same x run together. Which
    features are dropped is written as bits with an adapter's first block of ranks, for backward.
    """
    site = tl.program_id(0)
    first, count, span, _slot, first_rank = load_work(work, begin + tl.program_id(1))
    bank_site, module, _, _ = load_site(sites, site, 1)
    a_offset = load_offset(addresses, span, bank_sites, bank_site, A)
    if a_offset < ABSENT:
        return
    rank, threshold, seed, s_start = load_span(spans, span, RANKS)
    stride = row_stride(rank)
    split = tl.program_id(2).to(tl.int64)
    start = tl.program_id(2) * split_features
    s += split * split_stride + site.to(tl.int64) * packed + s_start + first * stride + first_rank
    a = origin + a_offset + first_rank.to(tl.int64) * features
    x += first * x_stride
    end = tl.minimum(start + split_features, features)
    bits += site.to(tl.int64) * bits_site + first * bits_stride
    noted = tl.where(first_rank == 0, count, 0)
    if DROPOUT and threshold > 0:
        product_of_rows(
            x, x_stride, s, stride, a, 1, features, bits, bits_stride, counters + 3 * first, count,
            rank - first_rank, start, end, seed, module, threshold, noted, 1.0, True, BM, BK, BR, PRECISION,
        )  # fmt: skip
    else:
        product_of_rows(
            x, x_stride, s, stride, a, 1, features, bits, bits_stride, counters, count, rank - first_rank,
            start, end, seed, module, threshold, noted, 1.0, False, BM, BK, BR, PRECISION,
        )  # fmt: skip


@triton.jit
def sum_splits(partial, out, elements, split_stride, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """out = Σ over splits of partial, in order."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < elements
    total = tl.load(partial + index, mask=mask, other=0.0)
    for _ in range(1, SPLITS):
        partial += split_stride
        total += tl.load(partial + index, mask=mask, other=0.0)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def low_rank_up(
    s, packed, origin, spans, scales, sites, addresses, bank_sites, span, site, first, rows, row_mask,
    column, columns, column_mask,
    RANKS: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """s S Bᵀ of a tile in the columns that begin at `column`; zero without an adapter."""
    total = tl.zeros((BM, BN), tl.float32)
    own_site = tl.maximum(site, 0)
    bank_site, _, column_first, _ = load_site(sites, own_site, 1)
    b_offset = load_offset(addresses, tl.where(site < 0, -1, span), bank_sites, bank_site, B)
    if b_offset >= ABSENT:
        rank, _threshold, _seed, s_start = load_span(spans, span, RANKS)
        total = low_rank_product(
            s + own_site * packed + s_start + first * row_stride(rank), rows, row_mask,
            origin + b_offset + (column - column_first) * rank, columns, column_mask, rank, 1, rank,
            FEW, BM, BN, PRECISION,
        )  # fmt: skip
        total *= tl.load(scales + span)
    return total


@triton.jit(do_not_specialize=["bank_sites"])
def up(
    out, out_stride, bias, s, packed, origin, tiles, spans, scales, sites, addresses, bank_sites, blocks,
    BIAS: tl.constexpr, ALIGN: tl.constexpr, RANKS: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = b + s S Bᵀ, to which the vendor's product is added; nothing of `out` is read."""
    first, count, span = load_tile(tiles, tl.program_id(1))
    block = blocks + tl.program_id(0) * BLOCK_FIELDS
    site, column = tl.load(block), tl.multiple_of(tl.load(block + 1), ALIGN)
    rows, columns = tl.arange(0, BM), tl.arange(0, BN)
    row_mask = rows < count
    column_mask = columns < tl.multiple_of((tl.load(block + 2) - column).to(tl.int32), ALIGN)
    total = low_rank_up(
        s, packed, origin, spans, scales, sites, addresses, bank_sites, span, site, first, rows, row_mask,
        column, columns, column_mask, RANKS, FEW, BM, BN, PRECISION,
    )  # fmt: skip
    if BIAS:
        total += tl.load(bias + column + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    target = out + first * out_stride + column + rows[:, None] * out_stride + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["bank_sites", "tile_count", "block_count"])
def linear_up(
    x, x_stride, w, w_out_stride, w_in_stride, bias, out, out_stride, s, packed, origin, tiles, tile_count,
    spans, scales, sites, addresses, bank_sites, blocks, block_count, features,
    BIAS: tl.constexpr, ALIGN: tl.constexpr, RANKS: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = x Wᵀ + b + s S Bᵀ, the base product added to the low-rank term in one accumulator."""
    tile, block_index = swizzle(tl.program_id(0), tile_count, block_count, GROUP)
    first, count, span = load_tile(tiles, tile)
    block = blocks + block_index * BLOCK_FIELDS
    site, column = tl.load(block), tl.multiple_of(tl.load(block + 1), ALIGN)
    rows, columns = tl.arange(0, BM), tl.arange(0, BN)
    row_mask = rows < count
    column_mask = columns < tl.multiple_of((tl.load(block + 2) - column).to(tl.int32), ALIGN)
    total = low_rank_up(
        s, packed, origin, spans, scales, sites, addresses, bank_sites, span, site, first, rows, row_mask,
        column, columns, column_mask, RANKS, FEW, BM, BN, PRECISION,
    )  # fmt: skip
    x += first * x_stride
    w += column * w_out_stride
    for k in range(0, features, BK):
        inner = tl.arange(0, BK)
        inner_mask = inner < features - k
        own_x = tl.load(
            x + rows[:, None] * x_stride + inner[None, :],
            mask=row_mask[:, None] & inner_mask[None, :],
            other=0.0,
        )
        own_w = tl.load(
            w + columns[None, :] * w_out_stride + inner[:, None] * w_in_stride,
            mask=inner_mask[:, None] & column_mask[None, :],
            other=0.0,
        )
        total = tl.dot(own_x, own_w, total, input_precision=PRECISION)
        x += BK
        w += BK * w_in_stride
    if BIAS:
        total += tl.load(bias + column + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    target = out + first * out_stride + column + rows[:, None] * out_stride + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
