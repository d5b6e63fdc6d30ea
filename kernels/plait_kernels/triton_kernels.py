# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of multi-adapter LoRA: needs Triton at import. `triton_backend` launches them.

Rows go by tiles. `tiles` holds for each tile (first row, end row, span, slot): the tile's rows end before
`end row`, span −1 has no adapter, and slot counts the ranks of all partial sums before this one, −1 where
the tile is its adapter's only one. `spans` holds for each span (first row, rank, dropout threshold, seed,
offset of its S), `scales` its alpha / rank. `sites` holds for each site of the call (index in the bank,
dropout module, first column, columns, features), `blocks` for each block of columns (site or −1, first
column, end column). `addresses` holds for each span and bank site the element offsets of A and B from a
pointer, below ABSENT where the adapter does not sit there. S and dS are packed: for each site one row of
`packed` elements, in it each span's (rows, rank). Sums have one fixed order; there are no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE_FIELDS = tl.constexpr(4)
SPAN_FIELDS = tl.constexpr(5)
SITE_FIELDS = tl.constexpr(5)
BLOCK_FIELDS = tl.constexpr(3)
ABSENT = tl.constexpr(-(2**61))


@triton.jit
def _philox(k0, k1, c0, c1, c2, c3):
    """Philox4x32-10 on uint32 (Salmon et al. 2011)."""
    for _ in tl.static_range(10):
        p_low = c0 * 0xD2511F53
        p_high = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        q_low = c2 * 0xCD9E8D57
        q_high = tl.umulhi(c2, tl.full(c2.shape, 0xCD9E8D57, tl.uint32))
        c0 = q_high ^ c1 ^ k0
        c1 = q_low
        c2 = p_high ^ c3 ^ k1
        c3 = p_low
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _keep(counters, rows, row_mask, first, seed, module, threshold, BM: tl.constexpr, BK: tl.constexpr):
    """Which of features [first, first + BK) are kept; one Philox call serves 8 of them."""
    zero = tl.zeros((BM, BK // 8), tl.uint32)
    words = counters + 3 * rows
    c0 = tl.load(words, mask=row_mask, other=0).to(tl.uint32)[:, None] + zero
    c1 = tl.load(words + 1, mask=row_mask, other=0).to(tl.uint32)[:, None] + zero
    c2 = tl.load(words + 2, mask=row_mask, other=0).to(tl.uint32)[:, None] + zero
    c3 = (first // 8 + tl.arange(0, BK // 8)).to(tl.uint32)[None, :] + zero
    w0, w1, w2, w3 = _philox(seed.to(tl.uint32), module.to(tl.uint32), c0, c1, c2, c3)
    low = tl.join(tl.join(w0 & 0xFFFF, w2 & 0xFFFF), tl.join(w1 & 0xFFFF, w3 & 0xFFFF))
    high = tl.join(tl.join(w0 >> 16, w2 >> 16), tl.join(w1 >> 16, w3 >> 16))
    return tl.reshape(tl.join(low, high) >= threshold.to(tl.uint32), (BM, BK))


@triton.jit
def _drop(
    values, counters, rows, row_mask, first, seed, module, threshold, BM: tl.constexpr, BK: tl.constexpr
):
    """D ∘ values for a tile of float32 values."""
    if threshold > 0:
        keep = _keep(counters, rows, row_mask, first, seed, module, threshold, BM, BK)
        values = tl.where(keep, values * (65536.0 / (65536 - threshold).to(tl.float32)), 0.0)
    return values


@triton.jit
def _span(spans, span):
    """(first row, rank, dropout threshold, seed, offset of S) of a span."""
    base = spans + span * SPAN_FIELDS
    return tl.load(base), tl.load(base + 1), tl.load(base + 2), tl.load(base + 3), tl.load(base + 4)


@triton.jit
def _site(sites, site):
    """(index in the bank, dropout module, first column, columns) of a site of the call."""
    base = sites + site * SITE_FIELDS
    return tl.load(base), tl.load(base + 1), tl.load(base + 2), tl.load(base + 3)


@triton.jit
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
    span_first, rank, threshold, seed, s_offset = _span(spans, span)
    bank_site, module, _, _ = _site(sites, site)
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
            dropped = _drop(
                values.to(tl.float32), counters, rows, row_mask, k, seed, module, threshold, BM, BK
            )
            values = dropped.to(values.dtype)
        a_mask = column_mask[:, None] & rank_mask[None, :]
        own_a = tl.load(a + ranks[None, :].to(tl.int64) * features + columns[:, None], mask=a_mask, other=0.0)
        total = tl.dot(values, own_a, total, input_precision=PRECISION)
    target = s + tl.program_id(2) * split_stride + site * packed + s_offset
    where = (rows - span_first)[:, None] * rank + ranks[None, :]
    tl.store(target + where, total.to(s.dtype.element_ty), mask=row_mask[:, None] & rank_mask[None, :])


@triton.jit
def sum_splits(partial, out, elements, split_stride, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """out = Σ over splits of partial, in order."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < elements
    total = tl.load(partial + index, mask=mask, other=0.0)
    for split in range(1, SPLITS):
        total += tl.load(partial + split * split_stride + index, mask=mask, other=0.0)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _low_rank(
    total, s, s_row, rows_in_span, row_mask, b, b_rows, b_mask, b_stride, r_stride, rank,
    BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total += S Mᵀ, M addressed by (b_rows·b_stride + rank·r_stride)."""
    for r in range(0, rank, BR):
        ranks = r + tl.arange(0, BR)
        rank_mask = ranks < rank
        own_s = tl.load(
            s + s_row + rows_in_span[:, None] * rank + ranks[None, :],
            mask=row_mask[:, None] & rank_mask[None, :],
            other=0.0,
        )
        own_b = tl.load(
            b + b_rows[None, :].to(tl.int64) * b_stride + ranks[:, None] * r_stride,
            mask=rank_mask[:, None] & b_mask[None, :],
            other=0.0,
        )
        total = tl.dot(own_s, own_b, total, input_precision=PRECISION)
    return total


@triton.jit
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
    span_first, rank, _, _, s_offset = _span(spans, span)
    bank_site, _, column_first, _ = _site(sites, site)
    b_offset = tl.load(addresses + (span * bank_sites + bank_site) * 2 + 1)
    if b_offset < ABSENT:
        return
    rows = tl.load(tile) + tl.arange(0, BM)
    row_mask = rows < tl.load(tile + 1)
    columns = tl.multiple_of(tl.load(block + 1), ALIGN) + tl.arange(0, BN)
    column_mask = columns < tl.multiple_of(tl.load(block + 2), ALIGN)
    total = tl.zeros((BM, BN), tl.float32)
    total = _low_rank(
        total, s, site * packed + s_offset, rows - span_first, row_mask, origin + b_offset,
        columns - column_first, column_mask, rank, 1, rank, BR, PRECISION,
    )  # fmt: skip
    target = out + rows[:, None] * out_stride + columns[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    value = tl.load(target, mask=mask, other=0.0).to(tl.float32) + tl.load(scales + span) * total
    tl.store(target, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def linear_up(
    x, x_stride, w, w_out_stride, w_in_stride, bias, out, out_stride, s, packed, origin, tiles, tile_count,
    spans, scales, sites, addresses, bank_sites, blocks, block_count, features,
    BIAS: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BR: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = x Wᵀ + b + s S Bᵀ, the low-rank term added in the base product's accumulator."""
    tile_index, block_index = _swizzle(tl.program_id(0), tile_count, block_count, GROUP)
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
        span_first, rank, _, _, s_offset = _span(spans, span)
        bank_site, _, column_first, _ = _site(sites, site)
        b_offset = tl.load(addresses + (span * bank_sites + bank_site) * 2 + 1)
        if b_offset >= ABSENT:
            low = tl.zeros((BM, BN), tl.float32)
            low = _low_rank(
                low, s, site * packed + s_offset, rows - span_first, row_mask, origin + b_offset,
                columns - column_first, column_mask, rank, 1, rank, BR, PRECISION,
            )  # fmt: skip
            total += tl.load(scales + span) * low
    target = out + rows[:, None] * out_stride + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def _swizzle(program, tile_count, block_count, GROUP: tl.constexpr):
    """Neighbouring programs share rows of x and columns of W, so that both stay in the cache."""
    group = program // (GROUP * block_count)
    first = group * GROUP
    size = tl.minimum(tile_count - first, GROUP)
    inside = program % (GROUP * block_count)
    return first + inside % size, inside // size


@triton.jit
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
    span_first, rank, _, _, s_offset = _span(spans, span)
    bank_site, _, column_first, column_count = _site(sites, site)
    b_offset = tl.load(addresses + (span * bank_sites + bank_site) * 2 + 1)
    if (b_offset < ABSENT) | (first_rank >= rank):
        return
    rows = tl.load(tile) + tl.arange(0, BM)
    row_mask = rows < tl.load(tile + 1)
    ranks = first_rank + tl.arange(0, BR)
    rank_mask = ranks < rank
    scale = tl.load(scales + span)
    # Loaded here, not taken from _site: a hint holds for what it is given, and a call's results lose it.
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


@triton.jit
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
    span_first, rank, threshold, seed, s_offset = _span(spans, span)
    bank_site, module, _, _ = _site(sites, site)
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
            dropped = _drop(
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


@triton.jit
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
    bank_site, _, column_first, column_count = _site(sites, site)
    offset = tl.load(gradients + (span * bank_sites + bank_site) * 2 + IS_B)
    width = tl.load(sites + site * SITE_FIELDS + 4)
    base = site * slots * width
    if IS_B:
        width = column_count
        base = slots * column_first
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (index < rank * width) & (offset >= ABSENT)
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(0, tile_count):
        total += tl.load(partial + base + (first + tile * rank) * width + index, mask=mask, other=0.0)
    target = gradient_origin + offset + index
    tl.store(target, tl.load(target, mask=mask, other=0.0) + total, mask=mask)


@triton.jit
def _low_rank_dx(
    total, ds, packed, origin, span, spans, sites, site_count, addresses, bank_sites, counters, rows,
    row_mask, k, features, DROPOUT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """total += Σ over sites of D ∘ (dS A)."""
    span_first, rank, threshold, seed, s_offset = _span(spans, span)
    columns = k + tl.arange(0, BK)
    for site in range(0, site_count):
        bank_site, module, _, _ = _site(sites, site)
        a_offset = tl.load(addresses + (span * bank_sites + bank_site) * 2)
        if a_offset >= ABSENT:
            low = tl.zeros((BM, BK), tl.float32)
            low = _low_rank(
                low, ds, site * packed + s_offset, rows - span_first, row_mask,
                origin + tl.multiple_of(a_offset, 16), columns, columns < features, 1, features, rank,
                BR, PRECISION,
            )  # fmt: skip
            if DROPOUT:
                low = _drop(low, counters, rows, row_mask, k, seed, module, threshold, BM, BK)
            total += low
    return total


@triton.jit
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
    total = _low_rank_dx(
        total, ds, packed, origin, span, spans, sites, site_count, addresses, bank_sites, counters, rows,
        row_mask, k, features, DROPOUT, BM, BK, BR, PRECISION,
    )  # fmt: skip
    target = dx + rows[:, None] * dx_stride + columns[None, :]
    mask = row_mask[:, None] & (columns < features)[None, :]
    value = tl.load(target, mask=mask, other=0.0).to(tl.float32) + total
    tl.store(target, value.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def dx_linear(
    grad, grad_stride, w, w_out_stride, w_in_stride, dx, dx_stride, ds, packed, origin, tiles, tile_count,
    spans, sites, site_count, addresses, bank_sites, counters, features, out_features, block_count,
    DROPOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx = dh W + Σ over sites of D ∘ (dS A), in one accumulator."""
    tile_index, block_index = _swizzle(tl.program_id(0), tile_count, block_count, GROUP)
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
        total = _low_rank_dx(
            total, ds, packed, origin, span, spans, sites, site_count, addresses, bank_sites, counters, rows,
            row_mask, k, features, DROPOUT, BM, BK, BR, PRECISION,
        )  # fmt: skip
    target = dx + rows[:, None] * dx_stride + columns[None, :]
    tl.store(target, total.to(dx.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
