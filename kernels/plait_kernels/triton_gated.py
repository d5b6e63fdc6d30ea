# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of a gated MLP's passes with the adapters' part of the products around them.

The products' outputs are read here for the first time, so that what adapters add to them needs no pass of its
own. They are asked for before the adapters' factors, whose addresses take several loads, one after the other.
Tables and what kernels share: `triton_common`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plait_kernels.triton_backward import low_rank_dx
from plait_kernels.triton_common import load_tile
from plait_kernels.triton_forward import low_rank_up
from plait_kernels.triton_passes import activation


@triton.jit
def _gate_and_up(
    y, width, s, packed, origin, spans, scales, sites, addresses, bank_sites, span, first, rows, row_mask,
    column, columns, column_mask,
    RANKS: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The frozen products of a tile, side by side in y, plus s S Bᵀ of each."""
    mask = row_mask[:, None] & column_mask[None, :]
    at = y + first * (2 * width) + column + rows[:, None] * (2 * width) + columns[None, :]
    own_gate = tl.load(at, mask=mask, other=0.0)
    own_up = tl.load(at + width, mask=mask, other=0.0)
    gate = low_rank_up(
        s, packed, origin, spans, scales, sites, addresses, bank_sites, span, 0, first, rows, row_mask,
        column, columns, column_mask, RANKS, FEW, BM, BN, PRECISION,
    )  # fmt: skip
    gate += own_gate.to(tl.float32)
    up = low_rank_up(
        s, packed, origin, spans, scales, sites, addresses, bank_sites, span, 1, first, rows, row_mask,
        width + column, columns, column_mask, RANKS, FEW, BM, BN, PRECISION,
    )  # fmt: skip
    up += own_up.to(tl.float32)
    return gate, up


@triton.jit(do_not_specialize=["bank_sites"])
def gated_up(
    y, out, width, s, packed, origin, tiles, spans, scales, sites, addresses, bank_sites,
    KIND: tl.constexpr, RANKS: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out = act(gate) · up."""
    first, count, span = load_tile(tiles, tl.program_id(1))
    rows, columns, column = tl.arange(0, BM), tl.arange(0, BN), tl.program_id(0) * BN
    row_mask, column_mask = rows < count, columns < width - column
    gate, up = _gate_and_up(
        y, width, s, packed, origin, spans, scales, sites, addresses, bank_sites, span, first, rows, row_mask,
        column, columns, column_mask, RANKS, FEW, BM, BN, PRECISION,
    )  # fmt: skip
    act, _ = activation(gate, KIND)
    target = out + first * width + column + rows[:, None] * width + columns[None, :]
    tl.store(target, (act * up).to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["bank_sites"])
def gated_up_back(
    grad, y, dy, width, s, packed, origin, tiles, spans, scales, sites, addresses, bank_sites,
    ds, bits, bits_stride, bits_site, down_sites,
    KIND: tl.constexpr, DROPOUT: tl.constexpr, RANKS: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of gate and up, side by side in dy; `grad` + D ∘ (dS A) is that of act(gate) · up."""
    first, count, span = load_tile(tiles, tl.program_id(1))
    rows, columns, column = tl.arange(0, BM), tl.arange(0, BN), tl.program_id(0) * BN
    row_mask, column_mask = rows < count, columns < width - column
    mask = row_mask[:, None] & column_mask[None, :]
    at = grad + first * width + column + rows[:, None] * width + columns[None, :]
    own = tl.load(at, mask=mask, other=0.0)
    g = low_rank_dx(
        ds, packed, bits, bits_stride, bits_site, origin, spans, down_sites, 1, addresses, bank_sites, span,
        first, count, rows, row_mask, column, columns, column_mask, width,
        DROPOUT, RANKS, FEW, BM, BN, PRECISION,
    )  # fmt: skip
    g += own.to(tl.float32)
    gate, up = _gate_and_up(
        y, width, s, packed, origin, spans, scales, sites, addresses, bank_sites, span, first, rows, row_mask,
        column, columns, column_mask, RANKS, FEW, BM, BN, PRECISION,
    )  # fmt: skip
    act, slope = activation(gate, KIND)
    target = dy + first * (2 * width) + column + rows[:, None] * (2 * width) + columns[None, :]
    tl.store(target, (g * up * slope).to(dy.dtype.element_ty), mask=mask)
    tl.store(target + width, (g * act).to(dy.dtype.element_ty), mask=mask)
