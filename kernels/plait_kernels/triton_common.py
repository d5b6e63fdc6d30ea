# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What the Triton kernels of multi-adapter LoRA share: how they find their work, dropout, low-rank products.

Rows go by tiles. `tiles` cover all rows: (first row, rows, span) of each, span −1 without adapter. `work`
holds what sums over an adapter's ranks go by, a tile and a block of ranks each: (first row, rows, span,
slot, first rank); slot counts the ranks of all partial sums before this one, −1 if the tile is its adapter's
only one. A launch takes the part of `work`, from `begin` on, whose blocks have one width. `spans` holds for
each span (rank, dropout threshold, seed, where row 0 of its S would lie), `scales` its alpha / rank. `sites`
holds for each site of the call (index in the bank, dropout module, first column, columns, features),
`blocks` for each block of columns (site or −1, first column, end column). `addresses` holds for each span
and bank site the element offsets of A and B from a pointer, below ABSENT if the adapter does not sit there.

S and dS are packed: for each site one row of `packed` elements, in it each span's (rows, stride), where the
stride is the rank rounded up to RANK_STEP and what lies beyond the rank is zero, so that whole vectors are
moved without a mask. Offsets inside a tile are 32 bits wide, those of tiles 64. Sums have one fixed order;
there are no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE_FIELDS = tl.constexpr(3)
WORK_FIELDS = tl.constexpr(5)
SPAN_FIELDS = tl.constexpr(4)
SITE_FIELDS = tl.constexpr(5)
BLOCK_FIELDS = tl.constexpr(3)
ABSENT = tl.constexpr(-(2**61))
NOWHERE = tl.constexpr(-(2**62))
RANK_STEP = tl.constexpr(16)  # the smallest size that a tensor core multiplies
A = tl.constexpr(0)
B = tl.constexpr(1)
M0, M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)  # Philox's multipliers
W0, W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)  # and what its keys grow by


@triton.jit
def _turned(word, factor: tl.constexpr):
    """(high, low) half of a word's product with a multiplier, by one wide multiplication."""
    product = word.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def row_words(counters, rows, row_mask, seed, module):
    """What Philox4x32-7 makes of a row's counter before it meets the feature's, (rows, 1) each.

    It is computed once for all features: of the first three rounds one product each depends on the feature.
    `counters` points to the tile's first row.
    """
    k0, k1 = seed.to(tl.uint32), module.to(tl.uint32)
    words = counters + 3 * rows
    c0 = tl.load(words, mask=row_mask, other=0).to(tl.uint32)[:, None]
    c1 = tl.load(words + 1, mask=row_mask, other=0).to(tl.uint32)[:, None]
    c2 = tl.load(words + 2, mask=row_mask, other=0).to(tl.uint32)[:, None]
    p_high, third = _turned(c0, M0)
    q_high, second = _turned(c2, M1)
    before_feature = p_high ^ k1
    p_high, fourth = _turned(q_high ^ c1 ^ k0, M0)
    k0, k1 = (k0 + W0).to(tl.uint32), (k1 + W1).to(tl.uint32)
    second ^= k0
    q_high, later = _turned(p_high ^ third ^ k1, M1)
    k0, k1 = (k0 + W0).to(tl.uint32), (k1 + W1).to(tl.uint32)
    return before_feature, second, q_high ^ k0, fourth ^ k1, later


@triton.jit
def drop_tile(values, words, first, seed, module, threshold, BM: tl.constexpr, BK: tl.constexpr):
    """Zero those of features [first, first + BK) that are dropped; with which these are, (BM, BK / 8) bytes.

    One Philox call serves 8 features, and so a byte, whose lowest bit is the first one's. Above the 32 bits
    of `module`: how many times 8 features of the layer come before the first one here. What is kept is not
    yet multiplied by `keep_factor`.
    """
    c3 = ((module >> 32).to(tl.int32) + first // 8 + tl.arange(0, BK // 8)).to(tl.uint32)[None, :]
    q_high, c1 = _turned(words[0] ^ c3, M1)  # the second round
    p_high, c3 = _turned(q_high ^ words[1], M0)  # the third
    c0, c1, c2 = words[2] ^ c1, words[4], p_high ^ words[3]
    k0, k1 = seed.to(tl.uint32), module.to(tl.uint32)
    for _ in tl.static_range(2):
        k0, k1 = (k0 + W0).to(tl.uint32), (k1 + W1).to(tl.uint32)
    for _ in tl.static_range(4):
        k0, k1 = (k0 + W0).to(tl.uint32), (k1 + W1).to(tl.uint32)
        p_high, p_low = _turned(c0, M0)
        q_high, q_low = _turned(c2, M1)
        c0, c1, c2, c3 = q_high ^ c1 ^ k0, q_low, p_high ^ c3 ^ k1, p_low
    low0, high0 = _beyond(c0, threshold)
    low1, high1 = _beyond(c1, threshold)
    low2, high2 = _beyond(c2, threshold)
    low3, high3 = _beyond(c3, threshold)
    low = tl.join(tl.join(low0, low2), tl.join(low1, low3))
    high = tl.join(tl.join(high0, high2), tl.join(high1, high3))
    beyond = tl.reshape(tl.join(low, high), (BM, BK))
    bits = _with_sign(_with_sign(_with_sign(_with_sign(0, high3), low3), high2), low2)
    bits = _with_sign(_with_sign(_with_sign(_with_sign(bits, high1), low1), high0), low0)
    return tl.where(beyond < 0, 0.0, values), bits.to(tl.uint8)


@triton.jit
def _beyond(word, threshold):
    """By how much a word's lower and upper half exceed the threshold: below 0, a feature is dropped."""
    least = threshold.to(tl.int32)
    return (word & 0xFFFF).to(tl.int32) - least, (word >> 16).to(tl.int32) - least


@triton.jit
def _with_sign(bits, number):
    """The bits with a number's sign behind them: one instruction, to compare and to select would be two."""
    return (bits << 1) | (number.to(tl.uint32, bitcast=True) >> 31)


@triton.jit
def load_bits(bits, stride, count, first, threshold, BM: tl.constexpr, BK: tl.constexpr):
    """What `down` noted of features [first, first + BK) of a tile's rows, (BM, BK / 8) bytes.

    `bits` points to those of the tile's first row; rows have room for whole blocks of BK features, of which
    `first` is a multiple. Of what drops nothing there are none.
    """
    rows, noted = tl.arange(0, BM), tl.where(threshold > 0, count, 0)
    byte = tl.multiple_of(first // 8, BK // 8) + tl.arange(0, BK // 8)
    place = bits + rows[:, None] * stride + byte[None, :]
    return tl.load(place, mask=(rows < noted)[:, None], other=0)


@triton.jit
def drop_again(values, bits, BM: tl.constexpr, BK: tl.constexpr):
    """Zero the values whose bits are set."""
    found = (bits.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.where(tl.reshape(found, (BM, BK)) != 0, 0.0, values)


@triton.jit
def keep_factor(threshold):
    """1 / (1 − p), by which the sum over a tile of kept values is multiplied."""
    return 65536.0 / (65536 - threshold).to(tl.float32)


@triton.jit
def load_tile(tiles, tile):
    """(first row, rows, span) of a tile."""
    base = tiles + tile * TILE_FIELDS
    return tl.load(base), tl.load(base + 1).to(tl.int32), tl.load(base + 2)


@triton.jit
def load_work(work, index):
    """(first row, rows, span, slot, first rank) of a piece of work."""
    base = work + index * WORK_FIELDS
    first_rank = tl.multiple_of(tl.load(base + 4).to(tl.int32), RANK_STEP)
    return tl.load(base), tl.load(base + 1).to(tl.int32), tl.load(base + 2), tl.load(base + 3), first_rank


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
def low_rank_product(
    s, rows, row_mask, b, b_rows, b_mask, b_stride, r_stride, rank,
    FEW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S Mᵀ over an adapter's own ranks, (BM, BN); `s` points to the tile's first row.

    M is addressed by b + b_rows·b_stride + rank·r_stride. FEW: no rank is above RANK_STEP, so that there is
    one product and nothing to sum.
    """
    if FEW:
        own_s, own_b = _step(s, rows, row_mask, b, b_rows, b_mask, b_stride, r_stride, 0, rank)
        total = tl.dot(own_s, own_b, input_precision=PRECISION)
    else:
        total = tl.zeros((BM, BN), tl.float32)
        for r in range(0, rank, RANK_STEP):
            own_s, own_b = _step(s, rows, row_mask, b, b_rows, b_mask, b_stride, r_stride, r, rank)
            total = tl.dot(own_s, own_b, total, input_precision=PRECISION)
    return total


@triton.jit
def _step(s, rows, row_mask, b, b_rows, b_mask, b_stride, r_stride, r, rank):
    """RANK_STEP ranks of S and of M, from `r` on."""
    ranks = r + tl.arange(0, RANK_STEP)
    own_s = tl.load(s + rows[:, None] * row_stride(rank) + ranks[None, :], mask=row_mask[:, None], other=0.0)
    own_b = tl.load(
        b + b_rows[None, :] * b_stride + ranks[:, None] * r_stride,
        mask=(ranks < rank)[:, None] & b_mask[None, :],
        other=0.0,
    )
    return own_s, own_b


@triton.jit
def swizzle(program, tile_count, block_count, GROUP: tl.constexpr):
    """Neighbouring programs share rows of x and columns of W, so that both stay in the cache."""
    group = program // (GROUP * block_count)
    first = group * GROUP
    size = tl.minimum(tile_count - first, GROUP)
    inside = program % (GROUP * block_count)
    return first + inside % size, inside // size
