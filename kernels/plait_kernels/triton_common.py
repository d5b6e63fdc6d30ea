# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What the Triton kernels of multi-adapter LoRA share: how they find their work, dropout, low-rank products.

Rows go by tiles. `tiles` holds for each tile (first row, rows, span, slot): span −1 has no adapter, and slot
counts the ranks of all partial sums before this one, −1 if the tile is its adapter's only one. `spans`
holds for each span (rank, dropout threshold, seed, where row 0 of its S would lie), `scales` its alpha /
rank. `sites` holds for each site of the call (index in the bank, dropout module, first column, columns,
features), `blocks` for each block of columns (site or −1, first column, end column). `addresses` holds for
each span and bank site the element offsets of A and B from a pointer, below ABSENT if the adapter does
not sit there.

S and dS are packed: for each site one row of `packed` elements, in it each span's (rows, stride), where the
stride is the rank rounded up to RANK_STEP and what lies beyond the rank is zero, so that whole vectors are
moved without a mask. Offsets inside a tile are 32 bits wide, those of tiles 64. Sums have one fixed order;
there are no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE_FIELDS = tl.constexpr(4)
SPAN_FIELDS = tl.constexpr(4)
SITE_FIELDS = tl.constexpr(5)
BLOCK_FIELDS = tl.constexpr(3)
ABSENT = tl.constexpr(-(2**61))
NOWHERE = tl.constexpr(-(2**62))
RANK_STEP = tl.constexpr(16)  # the smallest size that a tensor core multiplies
A = tl.constexpr(0)
B = tl.constexpr(1)


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
def keep_tile(counters, rows, row_mask, first, seed, module, threshold, BM: tl.constexpr, BK: tl.constexpr):
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
def drop_tile(
    values, counters, rows, row_mask, first, seed, module, threshold, BM: tl.constexpr, BK: tl.constexpr
):
    """D ∘ values for a tile of float32 values; `counters` points to the tile's first row."""
    if threshold > 0:
        keep = keep_tile(counters, rows, row_mask, first, seed, module, threshold, BM, BK)
        values = tl.where(keep, values * (65536.0 / (65536 - threshold).to(tl.float32)), 0.0)
    return values


@triton.jit
def load_tile(tiles, tile):
    """(first row, rows, span, slot) of a tile."""
    base = tiles + tile * TILE_FIELDS
    return tl.load(base), tl.load(base + 1).to(tl.int32), tl.load(base + 2), tl.load(base + 3)


@triton.jit
def load_span(spans, span, RANKS: tl.constexpr):
    """(rank, dropout threshold, seed, where row 0 of its S would lie) of a span.

    RANKS, a power of two, divides every rank. Hints stand beside the loads that they are about: those given
    to a function's results are lost.
    """
    base = spans + span * SPAN_FIELDS
    rank = tl.multiple_of(tl.load(base).to(tl.int32), RANKS)
    return rank, tl.load(base + 1), tl.load(base + 2), tl.multiple_of(tl.load(base + 3), 16)


@triton.jit
def load_site(sites, site, ALIGN: tl.constexpr):
    """(index in the bank, dropout module, first column, columns); ALIGN divides the last two."""
    base = sites + site * SITE_FIELDS
    first, columns = tl.load(base + 2), tl.load(base + 3).to(tl.int32)
    return tl.load(base), tl.load(base + 1), tl.multiple_of(first, ALIGN), tl.multiple_of(columns, ALIGN)


@triton.jit
def load_offset(addresses, span, bank_sites, bank_site, SIDE: tl.constexpr):
    """Elements from the addresses' pointer to an adapter's A or B; below ABSENT if there is none."""
    at = (tl.maximum(span, 0) * bank_sites + bank_site) * 2 + SIDE
    return tl.multiple_of(tl.where(span < 0, NOWHERE, tl.load(addresses + at)), 16)


@triton.jit
def row_stride(rank):
    """Elements from one row of S to the next."""
    return (rank + RANK_STEP - 1) // RANK_STEP * RANK_STEP


@triton.jit
def rank_width(left):
    """Ranks that a program multiplies at once if `left` are left: 16, 32 or 64.

    WIDTHS counts those that occur in a launch; its programs' ranks lie 8 << WIDTHS apart.
    """
    return tl.where(left <= 16, 16, tl.where(left <= 32, 32, 64))


@triton.jit
def add_low_rank(
    total, s, rows, row_mask, b, b_rows, b_mask, b_stride, r_stride, rank, PRECISION: tl.constexpr
):
    """total += S Mᵀ over an adapter's own ranks; `s` points to the tile's first row.

    M is addressed by b + b_rows·b_stride + rank·r_stride.
    """
    stride = row_stride(rank)
    for r in range(0, rank, RANK_STEP):
        ranks = r + tl.arange(0, RANK_STEP)
        own_s = tl.load(s + rows[:, None] * stride + ranks[None, :], mask=row_mask[:, None], other=0.0)
        own_b = tl.load(
            b + b_rows[None, :] * b_stride + ranks[:, None] * r_stride,
            mask=(ranks < rank)[:, None] & b_mask[None, :],
            other=0.0,
        )
        total = tl.dot(own_s, own_b, total, input_precision=PRECISION)
    return total


@triton.jit
def swizzle(program, tile_count, block_count, GROUP: tl.constexpr):
    """Neighbouring programs share rows of x and columns of W, so that both stay in the cache."""
    group = program // (GROUP * block_count)
    first = group * GROUP
    size = tl.minimum(tile_count - first, GROUP)
    inside = program % (GROUP * block_count)
    return first + inside % size, inside // size
