# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of the rows of pooled adapters: each program sums over its own vectors alone, in float32.

ALIGN divides where vectors begin, sites' columns and how many these are: of what comes from a table Triton
knows nothing, and would read one element at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _adapter(rows, sites, tables):
    """(row, site, rank, the offsets of its A); those of its B follow."""
    n, m = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    rank = tl.load(rows + 3 * n + 2)
    index = tl.load(sites + 3 * m)
    return tl.load(rows + 3 * n), n, m, rank, tables + tl.load(rows + 3 * n + 1) + 2 * rank * index


@triton.jit(do_not_specialize=["most"])
def down(
    x, pool, tables, rows, scales, sites, s, x_stride, features, most,
    ALIGN: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """s[row, site, k] = scale · (A_k · x)."""
    row, n, m, rank, table = _adapter(rows, sites, tables)
    scale = tl.load(scales + n)
    for first in range(0, rank, BK):
        k = first + tl.arange(0, BK)
        at = tl.multiple_of(tl.load(table + k, mask=k < rank, other=-1), [ALIGN])  # or below 0
        total = tl.zeros((BK,), dtype=tl.float32)
        for start in range(0, features, BF):
            f = start + tl.arange(0, BF)
            value = tl.load(x + row * x_stride + f, mask=f < features, other=0.0).to(tl.float32)
            mask = (at >= 0)[:, None] & (f < features)[None, :]
            a = tl.load(pool + at[:, None] + f[None, :], mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(a * value[None, :], axis=1)
        tl.store(s + (n * tl.num_programs(1) + m) * most + k, total * scale, mask=k < rank)


@triton.jit(do_not_specialize=["most"])
def up(
    out, pool, tables, rows, sites, s, out_stride, most,
    ALIGN: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """out += Σ_k s_k · B_k, in one block of a site's columns."""
    row, n, m, rank, table = _adapter(rows, sites, tables)
    f = tl.program_id(2) * BF + tl.arange(0, BF)
    inside = f < tl.multiple_of(tl.load(sites + 3 * m + 2), ALIGN)
    to = out + row * out_stride + tl.multiple_of(tl.load(sites + 3 * m + 1), ALIGN) + f
    total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, rank, BK):
        k = first + tl.arange(0, BK)
        at = tl.multiple_of(tl.load(table + rank + k, mask=k < rank, other=-1), [ALIGN])
        values = tl.load(s + (n * tl.num_programs(1) + m) * most + k, mask=k < rank, other=0.0)
        mask = (at >= 0)[:, None] & inside[None, :]
        b = tl.load(pool + at[:, None] + f[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(b * values[:, None], axis=0)
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)
