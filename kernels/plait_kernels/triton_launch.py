"""Launches of the Triton kernels for one call of one layer, with the tables of `tables`.

The graph is split at S, which is small: (1) dropout and down-projection of each row's owner only; (2) base
product plus up-projection; (3) dS and dB, from one read of dh if the ranks are few: with many, the partial
sums would outgrow dh; (4) dA; (5) base dx plus low-rank dx with the mask recomputed. (2) and (5) are one
Triton product, or the low-rank part is written first and the vendor's product added to it, whichever was
measured to be faster (`autotuning`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from plait_kernels.launching import add_product, launch, room
from plait_kernels.layer import LayerCall
from plait_kernels.tables import (
    FEW_RANKS,
    WidthClass,
    WorkTable,
    block_table,
    site_table,
    span_table,
    tile_table,
    work_table,
)
from plait_kernels.tiles import Choice, Tiles

_SUM_BLOCK = 1024
_EVERY_RANK, _FEW, _MANY = range(1, 2**31), range(1, FEW_RANKS + 1), range(FEW_RANKS + 1, 2**31)


@cache
def _kernels() -> tuple[Any, Any]:
    from plait_kernels import triton_backward, triton_forward

    return triton_forward, triton_backward


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


class Launcher:
    """The launches of one call of one layer, and what they share."""

    def __init__(self, call: LayerCall, x: Tensor, weight: Tensor, chosen: Choice) -> None:
        self.forward, self.backward = _kernels()
        self.call, self.x, self.weight, self.chosen = call, x, weight, chosen
        self.table = span_table(call.routing)
        self.sites = site_table(call)
        self.site_count = len(call.placed)
        self.features = x.shape[1]
        self.bank_sites = len(call.bank.sites)
        self.precision = "ieee" if x.dtype == torch.float32 else "tf32"
        self.counters = call.routing.counters
        self.align = call.layer.align

    def common(self, tiles: Tiles) -> dict[str, Any]:
        """The constants of every product's launch."""
        return {"PRECISION": self.precision, "num_warps": tiles.warps, "num_stages": tiles.stages}

    def packed(self, splits: int) -> Tensor:
        """An empty tensor for S or dS; float32 parts if several splits are summed afterwards."""
        shape = (self.site_count, self.table.packed)
        if splits == 1:
            return room(self.x, shape)
        return room(self.x, (splits, *shape), torch.float32)

    def summed(self, parts: Tensor, splits: int) -> Tensor:
        """The sum over splits, in order, in the compute dtype.

        The elements of an adapter at a site that it does not target are never written, and their sum is never
        read; of what lay there it may be NaN, of which the interpreter warns.
        """
        if splits == 1:
            return parts
        out = self.packed(1)
        elements = out.numel()
        constants = {"SPLITS": splits, "BLOCK": _SUM_BLOCK}
        grid = (_blocks(elements, _SUM_BLOCK),)
        launch(self.forward.sum_splits, grid, parts, out, elements, elements, **constants)
        return out

    def down(self) -> Tensor:
        """S, packed."""
        tiles, table = self.chosen.down, self.table
        work = work_table(self.call.routing, tiles.rows, _EVERY_RANK)
        s = self.packed(tiles.splits)
        depth = _blocks(_blocks(self.features, tiles.splits), tiles.depth) * tiles.depth
        for each in work.classes:
            launch(
                self.forward.down,
                (self.site_count, each.count, tiles.splits),
                *(self.x, self.x.stride(0), s, table.packed, self.site_count * table.packed, table.origin),
                *(work.work, each.begin, table.spans, self.sites, table.addresses, self.bank_sites),
                *(self.counters, self.features, depth),
                **{"DROPOUT": table.dropout, "RANKS": each.factor, "BR": each.width},
                **{"BM": tiles.rows, "BK": tiles.depth, **self.common(tiles)},
            )
        return self.summed(s, tiles.splits)

    def up(self, s: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output: base product and up-projection."""
        tiles, table, weight = self.chosen.fused_forward or self.chosen.up, self.table, self.weight
        out = room(self.x, (self.x.shape[0], weight.shape[0]))
        rows = tile_table(self.call.routing, tiles.rows)
        blocks = block_table(self.call, tiles.columns, weight.shape[0])
        shared = (s, table.packed, table.origin, rows.tiles)
        constants = {"BIAS": bias is not None, "ALIGN": self.align, "RANKS": table.rank_factor}
        constants |= {"BM": tiles.rows, "BN": tiles.columns, **self.common(tiles)}
        given_bias = weight if bias is None else bias
        if self.chosen.fused_forward is None:
            launch(
                self.forward.up,
                (blocks.shape[0], rows.count),
                *(out, out.stride(0), given_bias, *shared, table.spans, table.scales),
                *(self.sites, table.addresses, self.bank_sites, blocks),
                **constants,
            )
            return add_product(out, self.x, weight.T)
        launch(
            self.forward.linear_up,
            (rows.count * blocks.shape[0],),
            *(self.x, self.x.stride(0), weight, weight.stride(0), weight.stride(1)),
            *(given_bias, out, out.stride(0), *shared, rows.count, table.spans, table.scales),
            *(self.sites, table.addresses, self.bank_sites, blocks, blocks.shape[0], self.features),
            **{"BK": tiles.depth, "GROUP": 8, **constants},
        )
        return out

    def up_gradient(self, grad: Tensor, s: Tensor) -> Tensor:
        """Add dB to the bank; return dS."""
        tiles = self.chosen.up_gradient
        ds = self.packed(tiles.splits)
        widest = self.call.layer.widest
        few = work_table(self.call.routing, tiles.rows, _FEW)
        if few.classes:
            self._few_ranks(grad, s, ds, few, widest)
        if self.table.max_rank > FEW_RANKS:
            self._wide_ds(grad, ds, widest)
            self._wide_db(grad, s, widest)
        return self.summed(ds, tiles.splits)

    def _partial(self, slots: int, width: int) -> Tensor:
        """Room for the partial sums of adapters of several tiles."""
        return room(self.x, (max(1, slots * width),), torch.float32)

    def _few_ranks(self, grad: Tensor, s: Tensor, ds: Tensor, work: WorkTable, widest: int) -> None:
        """dS and dB of adapters of few ranks."""
        tiles, table = self.chosen.up_gradient, self.table
        width = _blocks(_blocks(widest, tiles.splits), tiles.columns) * tiles.columns
        partial = self._partial(work.slots, self.weight.shape[0])
        for each in work.classes:
            launch(
                self.backward.up_gradient,
                (self.site_count, each.count, tiles.splits),
                *(grad, grad.stride(0), s, ds, table.packed, self.site_count * table.packed, table.origin),
                *(table.gradient_origin, partial, work.work, each.begin, table.spans, table.scales),
                *(self.sites, table.addresses, table.gradients, self.bank_sites, work.slots, width),
                **self._by_width(each, tiles),
                **{"BM": tiles.rows, "BN": tiles.columns},
            )
        self._sum_partials(partial, work, widest, is_b=True)

    def _by_width(self, each: WidthClass, tiles: Tiles) -> dict[str, Any]:
        return {"ALIGN": self.align, "RANKS": each.factor, "BR": each.width, **self.common(tiles)}

    def _wide_ds(self, grad: Tensor, ds: Tensor, widest: int) -> None:
        """dS of adapters of many ranks."""
        tiles, table, splits = self.chosen.down, self.table, self.chosen.up_gradient.splits
        work = work_table(self.call.routing, tiles.rows, _MANY)
        width = _blocks(_blocks(widest, splits), tiles.depth) * tiles.depth
        for each in work.classes:
            launch(
                self.backward.wide_ds,
                (self.site_count, each.count, splits),
                *(grad, grad.stride(0), ds, table.packed, self.site_count * table.packed, table.origin),
                *(work.work, each.begin, table.spans, table.scales, self.sites, table.addresses),
                *(self.bank_sites, self.counters, width),
                **self._by_width(each, tiles),
                **{"BM": tiles.rows, "BK": tiles.depth},
            )

    def _wide_db(self, grad: Tensor, s: Tensor, widest: int) -> None:
        """dB of adapters of many ranks."""
        tiles, table = self.chosen.down_gradient, self.table
        work = work_table(self.call.routing, tiles.rows * tiles.splits, _MANY)
        partial = self._partial(work.slots, self.weight.shape[0])
        for each in work.classes:
            launch(
                self.backward.wide_db,
                (self.site_count, _blocks(widest, tiles.columns), each.count),
                *(grad, grad.stride(0), s, table.packed, table.gradient_origin, partial, work.work),
                *(each.begin, table.spans, table.scales, self.sites, table.gradients, self.bank_sites),
                *(work.slots, self.counters),
                **self._by_width(each, tiles),
                **{"BM": tiles.rows, "BK": tiles.columns},
            )
        self._sum_partials(partial, work, widest, is_b=True)

    def down_gradient(self, ds: Tensor) -> None:
        """Add dA to the bank."""
        tiles, table = self.chosen.down_gradient, self.table
        work = work_table(self.call.routing, tiles.rows * tiles.splits, _EVERY_RANK)
        partial = self._partial(work.slots, self.features * self.site_count)
        for each in work.classes:
            launch(
                self.backward.down_gradient,
                (self.site_count, _blocks(self.features, tiles.columns), each.count),
                *(self.x, self.x.stride(0), ds, table.packed, table.gradient_origin, partial, work.work),
                *(each.begin, table.spans, self.sites, table.gradients, self.bank_sites, work.slots),
                *(self.counters, self.features),
                **{"DROPOUT": table.dropout, "RANKS": each.factor, "BR": each.width},
                **{"BM": tiles.rows, "BK": tiles.columns, **self.common(tiles)},
            )
        self._sum_partials(partial, work, self.features, is_b=False)

    def _sum_partials(self, partial: Tensor, work: WorkTable, widest: int, *, is_b: bool) -> None:
        if work.slots == 0:
            return
        table = self.table
        launch(
            self.backward.sum_partials,
            (_blocks(widest * work.max_rank, _SUM_BLOCK), work.shared_count, self.site_count),
            *(partial, table.gradient_origin, work.shared, table.spans, self.sites, table.gradients),
            *(self.bank_sites, work.slots),
            **{"IS_B": int(is_b), "BLOCK": _SUM_BLOCK},
        )

    def dx(self, grad: Tensor, ds: Tensor) -> Tensor:
        """The gradient of x: base product and low-rank part."""
        table, weight = self.table, self.weight
        tiles = self.chosen.fused_backward or self.chosen.dx
        dx = room(grad, self.x.shape)
        rows = tile_table(self.call.routing, tiles.rows)
        low_rank = (ds, table.packed, table.origin, rows.tiles)
        tail = (self.sites, self.site_count, table.addresses, self.bank_sites, self.counters, self.features)
        constants = {"DROPOUT": table.dropout, "RANKS": table.rank_factor, "BM": tiles.rows}
        constants |= self.common(tiles)
        if self.chosen.fused_backward is None:
            launch(
                self.backward.dx_low_rank,
                (_blocks(self.features, tiles.columns), rows.count),
                *(dx, dx.stride(0), *low_rank, table.spans, *tail),
                **{"BK": tiles.columns, **constants},
            )
            return add_product(dx, grad, weight)
        blocks = _blocks(self.features, tiles.depth)
        launch(
            self.backward.dx_linear,
            (rows.count * blocks,),
            *(grad, grad.stride(0), weight, weight.stride(0), weight.stride(1), dx, dx.stride(0)),
            *(*low_rank, rows.count, table.spans, *tail, weight.shape[0], blocks),
            **{"BN": tiles.columns, "BK": tiles.depth, "GROUP": 8, **constants},
        )
        return dx
