# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of the forward pass. Tables: `triton_common`.

Arguments that change with the microbatch are not specialised, so that no kernel is compiled again for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plait_kernels.triton_common import (
    ABSENT,
    BLOCK_FIELDS,
    TILE_FIELDS,
    add_low_rank,
    drop_tile,
    load_site,
    load_span,
    swizzle,
)


@triton.jit(do_not_specialize=["packed", "split_stride", "site_count", "bank_sites"])
def down(
    x, x_stride, s, packed, split_stride, origin, tiles, spans, sites, site_count, addresses, bank_sites,
    counters, features, split_features,
    DROPOUT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S = (D ∘ x) Aᵀ of each tile's own adapter, over one split of the features."""
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    span = tl.load(tile + 2)
    if span < 0:
        return
    site = tl.program_id(1) % site_count
    first_rank = (tl.program_id(1) // site_count) * BR
    span_first, rank, threshold, seed, s_offset = load_span(spans, span)
    bank_site, module, _, _ = load_site(sites, site)
    a_offset = tl.load(addresses + (span * bank_sites + bank_site) * 2)
    if (a_offset < ABSENT) | (first_rank >= rank):
        return
    rows = tl.load(tile) + tl.arange(0, BM)
    row_mask = rows < tl.load(tile + 1)
    ranks = first_rank + tl.arange(0, BR)
    rank_mask = ranks < rank
    a = origin + tl.multiple_of(a_offset, 16)
    start = tl.program_id(2) * split_features
    end = tl.minimum(start + split_features, features)
    total = tl.zeros((BM, BR), tl.float32)
    for k in range(start, end, BK):
        columns = k + tl.arange(0, BK)
        column_mask = columns < end
        mask = row_mask[:, None] & column_mask[None, :]
        values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
        if DROPOUT:
            dropped = drop_tile(
                values.to(tl.float32), counters, rows, row_mask, k, seed, module, threshold, BM, BK
            )
            values = dropped.to(values.dtype)
        a_mask = column_mask[:, None] & rank_mask[None, :]
        own_a = tl.load(a + ranks[None, :].to(tl.int64) * features + columns[:, None], mask=a_mask, other=0.0)
        total = tl.dot(values, own_a, total, input_precision=PRECISION)
    target = s + tl.program_id(2) * split_stride + site * packed + s_offset
    where = (rows - span_first)[:, None] * rank + ranks[None, :]
    tl.store(target + where, total.to(s.dtype.element_ty), mask=row_mask[:, None] & rank_mask[None, :])


@triton.jit(do_not_specialize=["split_stride", "elements"])
def sum_splits(partial, out, elements, split_stride, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """out = Σ over splits of partial, in order."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < elements
    total = tl.load(partial + index, mask=mask, other=0.0)
    for split in range(1, SPLITS):
        total += tl.load(partial + split * split_stride + index, mask=mask, other=0.0)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["packed", "bank_sites"])
def up(
    out, out_stride, s, packed, origin, tiles, spans, scales, sites, addresses, bank_sites, blocks,
    ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out += s S Bᵀ in the columns of one site; the epilogue of a vendor's product."""
    tile = tiles + tl.program_id(1) * TILE_FIELDS
    span = tl.load(tile + 2)
    block = blocks + tl.program_id(0) * BLOCK_FIELDS
    site = tl.load(block)
    if (span < 0) | (site < 0):
        return
    span_first, rank, _, _, s_offset = load_span(spans, span)
    bank_site, _, column_first, _ = load_site(sites, site)
    b_offset = tl.load(addresses + (span * bank_sites + bank_site) * 2 + 1)
    if b_offset < ABSENT:
        return
    rows = tl.load(tile) + tl.arange(0, BM)
    row_mask = rows < tl.load(tile + 1)
    columns = tl.multiple_of(tl.load(block + 1), ALIGN) + tl.arange(0, BN)
    column_mask = columns < tl.multiple_of(tl.load(block + 2), ALIGN)
    total = tl.zeros((BM, BN), tl.float32)
    total = add_low_rank(
        total, s, site * packed + s_offset, rows - span_first, row_mask, origin + b_offset,
        columns - column_first, column_mask, rank, 1, rank, BR, PRECISION,
    )  # fmt: skip
    target = out + rows[:, None] * out_stride + columns[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    value = tl.load(target, mask=mask, other=0.0).to(tl.float32) + tl.load(scales + span) * total
    tl.store(target, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["packed", "bank_sites", "tile_count", "block_count"])
def linear_up(
    x, x_stride, w, w_out_stride, w_in_stride, bias, out, out_stride, s, packed, origin, tiles, tile_count,
    spans, scales, sites, addresses, bank_sites, blocks, block_count, features,
    BIAS: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BR: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = x Wᵀ + b + s S Bᵀ, the low-rank term added in the base product's accumulator."""
    tile_index, block_index = swizzle(tl.program_id(0), tile_count, block_count, GROUP)
    tile, block = tiles + tile_index * TILE_FIELDS, blocks + block_index * BLOCK_FIELDS
    span, site, column_start = tl.load(tile + 2), tl.load(block), tl.multiple_of(tl.load(block + 1), ALIGN)
    rows = tl.load(tile) + tl.arange(0, BM)
    row_mask = rows < tl.load(tile + 1)
    columns = column_start + tl.arange(0, BN)
    column_mask = columns < tl.multiple_of(tl.load(block + 2), ALIGN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, features, BK):
        inner = k + tl.arange(0, BK)
        inner_mask = inner < features
        own_x = tl.load(
            x + rows[:, None] * x_stride + inner[None, :],
            mask=row_mask[:, None] & inner_mask[None, :],
            other=0.0,
        )
        own_w = tl.load(
            w + columns[None, :] * w_out_stride + inner[:, None].to(tl.int64) * w_in_stride,
            mask=inner_mask[:, None] & column_mask[None, :],
            other=0.0,
        )
        total = tl.dot(own_x, own_w, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if (span >= 0) & (site >= 0):
        span_first, rank, _, _, s_offset = load_span(spans, span)
        bank_site, _, column_first, _ = load_site(sites, site)
        b_offset = tl.load(addresses + (span * bank_sites + bank_site) * 2 + 1)
        if b_offset >= ABSENT:
            low = tl.zeros((BM, BN), tl.float32)
            low = add_low_rank(
                low, s, site * packed + s_offset, rows - span_first, row_mask, origin + b_offset,
                columns - column_first, column_mask, rank, 1, rank, BR, PRECISION,
            )  # fmt: skip
            total += tl.load(scales + span) * low
    target = out + rows[:, None] * out_stride + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
