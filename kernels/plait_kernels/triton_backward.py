# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of the backward pass. Tables: `triton_common`.

Arguments that change with the microbatch are not specialised, so that no kernel is compiled again for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plait_kernels.triton_common import (
    ABSENT,
    SITE_FIELDS,
    SPAN_FIELDS,
    TILE_FIELDS,
    add_low_rank,
    drop_tile,
    load_site,
    load_span,
    swizzle,
)


@triton.jit(do_not_specialize=["packed", "split_stride", "site_count", "bank_sites", "slots"])
def up_gradient(
    grad, grad_stride, s, ds, packed, split_stride, origin, gradient_origin, partial, tiles, spans, scales,
    sites, site_count, addresses, gradients, bank_sites, slots, split_columns,
    ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dS = s dh B over one split of the columns, and dB = s dhᵀ S, from one read of dh.

    dB of an adapter's only tile is added to its gradient; of several, each tile's goes to its slot.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    span = tl.load(tile + 2)
    if span < 0:
        return
    site = tl.program_id(1) % site_count
    first_rank = (tl.program_id(1) // site_count) * BR
    span_first, rank, _, _, s_offset = load_span(spans, span)
    bank_site, _, column_first, column_count = load_site(sites, site)
    b_offset = tl.load(addresses + (span * bank_sites + bank_site) * 2 + 1)
    if (b_offset < ABSENT) | (first_rank >= rank):
        return
    rows = tl.load(tile) + tl.arange(0, BM)
    row_mask = rows < tl.load(tile + 1)
    ranks = first_rank + tl.arange(0, BR)
    rank_mask = ranks < rank
    scale = tl.load(scales + span)
    # Loaded here, not taken from load_site: a hint holds for what it is given, and a call's results lose it.
    first_column = tl.multiple_of(tl.load(sites + site * SITE_FIELDS + 2), ALIGN)
    own_columns = tl.multiple_of(tl.load(sites + site * SITE_FIELDS + 3), ALIGN)
    packed_at = site * packed + s_offset + (rows - span_first)[:, None] * rank + ranks[None, :]
    packed_mask = row_mask[:, None] & rank_mask[None, :]
    own_s = tl.load(s + packed_at, mask=packed_mask, other=0.0)
    slot = tl.load(tile + 3)
    target = gradient_origin + tl.load(gradients + (span * bank_sites + bank_site) * 2 + 1)
    if slot >= 0:
        target = partial + slots * column_first + slot * column_count
    start = tl.program_id(2) * split_columns
    end = tl.minimum(start + split_columns, own_columns)
    total = tl.zeros((BM, BR), tl.float32)
    for n in range(start, end, BN):
        columns = n + tl.arange(0, BN)
        column_mask = columns < end
        dh = tl.load(
            grad + rows[:, None] * grad_stride + (first_column + columns)[None, :],
            mask=row_mask[:, None] & column_mask[None, :],
            other=0.0,
        )
        mask = column_mask[:, None] & rank_mask[None, :]
        where = columns[:, None].to(tl.int64) * rank + ranks[None, :]
        own_b = tl.load(origin + b_offset + where, mask=mask, other=0.0)
        total = tl.dot(dh, own_b, total, input_precision=PRECISION)
        db = scale * tl.dot(tl.trans(dh), own_s, input_precision=PRECISION)
        if slot < 0:
            db += tl.load(target + where, mask=mask, other=0.0)
        tl.store(target + where, db, mask=mask)
    value = (scale * total).to(ds.dtype.element_ty)
    tl.store(ds + tl.program_id(2) * split_stride + packed_at, value, mask=packed_mask)


@triton.jit(do_not_specialize=["packed", "site_count", "bank_sites", "slots"])
def down_gradient(
    x, x_stride, ds, packed, gradient_origin, partial, chunks, spans, sites, site_count, gradients,
    bank_sites, slots, counters, features,
    DROPOUT: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dA = dSᵀ (D ∘ x) over one chunk of an adapter's rows."""
    chunk = chunks + tl.program_id(1) * TILE_FIELDS
    span = tl.load(chunk + 2)
    if span < 0:
        return
    site = tl.program_id(2) % site_count
    first_rank = (tl.program_id(2) // site_count) * BR
    span_first, rank, threshold, seed, s_offset = load_span(spans, span)
    bank_site, module, _, _ = load_site(sites, site)
    a_offset = tl.load(gradients + (span * bank_sites + bank_site) * 2)
    if (a_offset < ABSENT) | (first_rank >= rank):
        return
    first = tl.load(chunk)
    end = tl.minimum(first + ROWS, tl.load(chunk + 1))
    ranks = first_rank + tl.arange(0, BR)
    rank_mask = ranks < rank
    k = tl.program_id(0) * BK
    columns = k + tl.arange(0, BK)
    column_mask = columns < features
    total = tl.zeros((BR, BK), tl.float32)
    for row in range(first, end, BM):
        rows = row + tl.arange(0, BM)
        row_mask = rows < end
        mask = row_mask[:, None] & column_mask[None, :]
        values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
        if DROPOUT:
            dropped = drop_tile(
                values.to(tl.float32), counters, rows, row_mask, k, seed, module, threshold, BM, BK
            )
            values = dropped.to(values.dtype)
        own_ds = tl.load(
            ds + site * packed + s_offset + (rows - span_first)[None, :] * rank + ranks[:, None],
            mask=rank_mask[:, None] & row_mask[None, :],
            other=0.0,
        )
        total = tl.dot(own_ds, values, total, input_precision=PRECISION)
    slot = tl.load(chunk + 3)
    target = gradient_origin + a_offset
    if slot >= 0:
        target = partial + site * slots * features + slot * features
    where = ranks[:, None].to(tl.int64) * features + columns[None, :]
    mask = rank_mask[:, None] & column_mask[None, :]
    if slot < 0:
        total += tl.load(target + where, mask=mask, other=0.0)
    tl.store(target + where, total, mask=mask)


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
    rank = tl.load(spans + span * SPAN_FIELDS + 1)
    bank_site, _, column_first, column_count = load_site(sites, site)
    offset = tl.load(gradients + (span * bank_sites + bank_site) * 2 + IS_B)
    if offset < ABSENT:
        return
    width = tl.load(sites + site * SITE_FIELDS + 4)
    base = site * slots * width
    if IS_B:
        width = column_count
        base = slots * column_first
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < rank * width
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(0, tile_count):
        total += tl.load(partial + base + (first + tile * rank) * width + index, mask=mask, other=0.0)
    target = gradient_origin + offset + index
    tl.store(target, tl.load(target, mask=mask, other=0.0) + total, mask=mask)


@triton.jit
def low_rank_dx(
    total, ds, packed, origin, span, spans, sites, site_count, addresses, bank_sites, counters, rows,
    row_mask, k, features, DROPOUT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """total += Σ over sites of D ∘ (dS A)."""
    span_first, rank, threshold, seed, s_offset = load_span(spans, span)
    columns = k + tl.arange(0, BK)
    for site in range(0, site_count):
        bank_site, module, _, _ = load_site(sites, site)
        a_offset = tl.load(addresses + (span * bank_sites + bank_site) * 2)
        if a_offset >= ABSENT:
            low = tl.zeros((BM, BK), tl.float32)
            low = add_low_rank(
                low, ds, site * packed + s_offset, rows - span_first, row_mask,
                origin + tl.multiple_of(a_offset, 16), columns, columns < features, 1, features, rank,
                BR, PRECISION,
            )  # fmt: skip
            if DROPOUT:
                low = drop_tile(low, counters, rows, row_mask, k, seed, module, threshold, BM, BK)
            total += low
    return total


@triton.jit(do_not_specialize=["packed", "site_count", "bank_sites"])
def dx_low_rank(
    dx, dx_stride, ds, packed, origin, tiles, spans, sites, site_count, addresses, bank_sites, counters,
    features,
    DROPOUT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx += Σ over sites of D ∘ (dS A); the epilogue of a vendor's product."""
    tile = tiles + tl.program_id(1) * TILE_FIELDS
    span = tl.load(tile + 2)
    if span < 0:
        return
    rows = tl.load(tile) + tl.arange(0, BM)
    row_mask = rows < tl.load(tile + 1)
    k = tl.program_id(0) * BK
    columns = k + tl.arange(0, BK)
    total = tl.zeros((BM, BK), tl.float32)
    total = low_rank_dx(
        total, ds, packed, origin, span, spans, sites, site_count, addresses, bank_sites, counters, rows,
        row_mask, k, features, DROPOUT, BM, BK, BR, PRECISION,
    )  # fmt: skip
    target = dx + rows[:, None] * dx_stride + columns[None, :]
    mask = row_mask[:, None] & (columns < features)[None, :]
    value = tl.load(target, mask=mask, other=0.0).to(tl.float32) + total
    tl.store(target, value.to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["packed", "site_count", "bank_sites", "tile_count", "block_count"])
def dx_linear(
    grad, grad_stride, w, w_out_stride, w_in_stride, dx, dx_stride, ds, packed, origin, tiles, tile_count,
    spans, sites, site_count, addresses, bank_sites, counters, features, out_features, block_count,
    DROPOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx = dh W + Σ over sites of D ∘ (dS A), in one accumulator."""
    tile_index, block_index = swizzle(tl.program_id(0), tile_count, block_count, GROUP)
    tile = tiles + tile_index * TILE_FIELDS
    span = tl.load(tile + 2)
    rows = tl.load(tile) + tl.arange(0, BM)
    row_mask = rows < tl.load(tile + 1)
    k = block_index * BK
    columns = k + tl.arange(0, BK)
    column_mask = columns < features
    total = tl.zeros((BM, BK), tl.float32)
    for n in range(0, out_features, BN):
        inner = n + tl.arange(0, BN)
        inner_mask = inner < out_features
        dh = tl.load(
            grad + rows[:, None] * grad_stride + inner[None, :],
            mask=row_mask[:, None] & inner_mask[None, :],
            other=0.0,
        )
        own_w = tl.load(
            w + inner[:, None].to(tl.int64) * w_out_stride + columns[None, :].to(tl.int64) * w_in_stride,
            mask=inner_mask[:, None] & column_mask[None, :],
            other=0.0,
        )
        total = tl.dot(dh, own_w, total, input_precision=PRECISION)
    if span >= 0:
        total = low_rank_dx(
            total, ds, packed, origin, span, spans, sites, site_count, addresses, bank_sites, counters, rows,
            row_mask, k, features, DROPOUT, BM, BK, BR, PRECISION,
        )  # fmt: skip
    target = dx + rows[:, None] * dx_stride + columns[None, :]
    tl.store(target, total.to(dx.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
