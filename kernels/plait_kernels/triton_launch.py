"""Launches of the Triton kernels for one call of one layer, with the tables of `tables`.

The graph is split at S, which is small: (1) dropout and down-projection of each row's owner only; (2) base
product plus up-projection; (3) dS and dB from one read of dh; (4) dA; (5) base dx plus low-rank dx with the
mask recomputed. (2) and (5) are one Triton product, or the vendor's product with an epilogue, whichever was
measured to be faster (`autotuning`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from plait_kernels.launching import launch
from plait_kernels.layer import LayerCall
from plait_kernels.tables import block_table, site_table, span_table, tile_table
from plait_kernels.tiles import Choice, Tiles

_SUM_BLOCK = 1024


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


class Launcher:
    """The launches of one call of one layer, and what they share."""

    def __init__(self, call: LayerCall, x: Tensor, weight: Tensor, chosen: Choice) -> None:
        from plait_kernels import triton_backward, triton_forward

        self.forward: Any = triton_forward
        self.backward: Any = triton_backward
        self.call, self.x, self.weight, self.chosen = call, x, weight, chosen
        self.table = span_table(call.routing)
        self.sites = site_table(call)
        self.site_count = len(call.placed)
        self.features = x.shape[1]
        self.bank_sites = len(call.bank.sites)
        self.precision = "ieee" if x.dtype == torch.float32 else "tf32"
        self.widths = 1 + (self.table.max_rank > 16) + (self.table.max_rank > 32)
        self.rank_blocks = _blocks(self.table.max_rank, 8 << self.widths)
        self.counters = call.routing.counters
        # Where all columns begin at a multiple of 16, loads of several elements at once are allowed.
        starts = [edge for _, columns in call.placed for edge in (columns.start, columns.stop)]
        self.align = 16 if all(start % 16 == 0 for start in starts) else 1

    def common(self, tiles: Tiles) -> dict[str, Any]:
        """The arguments of every product's launch."""
        return {
            "RANKS": self.table.rank_factor,
            "PRECISION": self.precision,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }

    def packed(self, splits: int) -> Tensor:
        """An empty tensor for S or dS; float32 parts if several splits are summed afterwards."""
        shape = (self.site_count, self.table.packed)
        if splits == 1:
            return self.x.new_empty(shape)
        return self.x.new_empty((splits, *shape), dtype=torch.float32)

    def summed(self, parts: Tensor, splits: int) -> Tensor:
        """The sum over splits, in order, in the compute dtype.

        The elements of an adapter at a site that it does not target are never written, and their sum is never
        read; of what lay there it may be NaN, of which the interpreter warns.
        """
        if splits == 1:
            return parts
        out = self.packed(1)
        grid = (_blocks(out.numel(), _SUM_BLOCK),)
        launch(
            self.forward.sum_splits,
            grid,
            parts,
            out,
            out.numel(),
            out.numel(),
            SPLITS=splits,
            BLOCK=_SUM_BLOCK,
        )
        return out

    def down(self) -> Tensor:
        """S, packed."""
        tiles, table = self.chosen.down, self.table
        rows = tile_table(self.call.routing, tiles.rows)
        s = self.packed(tiles.splits)
        depth = _blocks(_blocks(self.features, tiles.splits), tiles.depth) * tiles.depth
        launch(
            self.forward.down,
            (rows.count, self.site_count * self.rank_blocks, tiles.splits),
            *(self.x, self.x.stride(0), s, table.packed, self.site_count * table.packed, table.origin),
            *(rows.tiles, table.spans, self.sites, self.site_count, table.addresses, self.bank_sites),
            *(self.counters, self.features, depth),
            **{"DROPOUT": table.dropout, "BM": tiles.rows, "BK": tiles.depth, "WIDTHS": self.widths},
            **self.common(tiles),
        )
        return self.summed(s, tiles.splits)

    def up(self, s: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output: base product and up-projection."""
        if self.chosen.fused_forward is not None:
            return self._linear_up(s, bias, self.chosen.fused_forward)
        out = linear(self.x, self.weight, bias)
        tiles, table = self.chosen.up, self.table
        rows = tile_table(self.call.routing, tiles.rows)
        blocks = block_table(self.call, tiles.columns)
        launch(
            self.forward.up,
            (blocks.shape[0], rows.count),
            *(out, out.stride(0), s, table.packed, table.origin, rows.tiles, table.spans, table.scales),
            *(self.sites, table.addresses, self.bank_sites, blocks),
            **{"ALIGN": self.align, "BM": tiles.rows, "BN": tiles.columns, **self.common(tiles)},
        )
        return out

    def _linear_up(self, s: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
        table, weight = self.table, self.weight
        out = self.x.new_empty(self.x.shape[0], weight.shape[0])
        rows = tile_table(self.call.routing, tiles.rows, base=True)
        blocks = block_table(self.call, tiles.columns, weight.shape[0])
        launch(
            self.forward.linear_up,
            (rows.count * blocks.shape[0],),
            *(self.x, self.x.stride(0), weight, weight.stride(0), weight.stride(1)),
            *(weight if bias is None else bias, out, out.stride(0), s, table.packed, table.origin),
            *(rows.tiles, rows.count, table.spans, table.scales, self.sites, table.addresses),
            *(self.bank_sites, blocks, blocks.shape[0], self.features),
            **{"BIAS": bias is not None, "ALIGN": self.align, "BM": tiles.rows, "BN": tiles.columns},
            **{"BK": tiles.depth, "GROUP": 8, **self.common(tiles)},
        )
        return out

    def up_gradient(self, grad: Tensor, s: Tensor) -> Tensor:
        """Add dB to the bank; return dS."""
        tiles, table = self.chosen.up_gradient, self.table
        rows = tile_table(self.call.routing, tiles.rows)
        widest = max(site.out_features for site, _ in self.call.placed)
        width = _blocks(_blocks(widest, tiles.splits), tiles.columns) * tiles.columns
        ds = self.packed(tiles.splits)
        partial = grad.new_empty(max(1, rows.slots * self.weight.shape[0]), dtype=torch.float32)
        launch(
            self.backward.up_gradient,
            (rows.count, self.site_count * self.rank_blocks, tiles.splits),
            *(grad, grad.stride(0), s, ds, table.packed, self.site_count * table.packed, table.origin),
            *(table.gradient_origin, partial, rows.tiles, table.spans, table.scales, self.sites),
            *(self.site_count, table.addresses, table.gradients, self.bank_sites, rows.slots, width),
            **{"ALIGN": self.align, "BM": tiles.rows, "BN": tiles.columns, "WIDTHS": self.widths},
            **self.common(tiles),
        )
        self._sum_partials(partial, rows.shared, rows.slots, widest, is_b=True)
        return self.summed(ds, tiles.splits)

    def down_gradient(self, ds: Tensor) -> None:
        """Add dA to the bank."""
        tiles, table = self.chosen.down_gradient, self.table
        chunk = tiles.rows * tiles.splits
        chunks = tile_table(self.call.routing, chunk)
        partial = ds.new_empty(max(1, chunks.slots * self.features * self.site_count), dtype=torch.float32)
        grid = (_blocks(self.features, tiles.columns), chunks.count, self.site_count * self.rank_blocks)
        launch(
            self.backward.down_gradient,
            grid,
            *(self.x, self.x.stride(0), ds, table.packed, table.gradient_origin, partial, chunks.tiles),
            *(table.spans, self.sites, self.site_count, table.gradients, self.bank_sites, chunks.slots),
            *(self.counters, self.features),
            **{"DROPOUT": table.dropout, "BM": tiles.rows, "BK": tiles.columns, "WIDTHS": self.widths},
            **self.common(tiles),
        )
        self._sum_partials(partial, chunks.shared, chunks.slots, self.features, is_b=False)

    def _sum_partials(self, partial: Tensor, shared: Tensor, slots: int, widest: int, *, is_b: bool) -> None:
        if slots == 0:
            return
        table = self.table
        grid = (_blocks(widest * table.max_rank, _SUM_BLOCK), shared.shape[0], self.site_count)
        launch(
            self.backward.sum_partials,
            grid,
            *(partial, table.gradient_origin, shared, table.spans, self.sites, table.gradients),
            *(self.bank_sites, slots),
            **{"IS_B": int(is_b), "BLOCK": _SUM_BLOCK},
        )

    def dx(self, grad: Tensor, ds: Tensor) -> Tensor:
        """The gradient of x: base product and low-rank part."""
        table, weight = self.table, self.weight
        tail = (self.sites, self.site_count, table.addresses, self.bank_sites, self.counters, self.features)
        tiles = self.chosen.fused_backward
        if tiles is not None:
            dx = grad.new_empty(self.x.shape)
            rows = tile_table(self.call.routing, tiles.rows, base=True)
            blocks = _blocks(self.features, tiles.depth)
            launch(
                self.backward.dx_linear,
                (rows.count * blocks,),
                *(grad, grad.stride(0), weight, weight.stride(0), weight.stride(1), dx, dx.stride(0), ds),
                *(table.packed, table.origin, rows.tiles, rows.count, table.spans, *tail),
                *(weight.shape[0], blocks),
                **{"DROPOUT": table.dropout, "BM": tiles.rows, "BN": tiles.columns, "BK": tiles.depth},
                **{"GROUP": 8, **self.common(tiles)},
            )
            return dx
        dx, tiles = grad @ weight, self.chosen.dx
        rows = tile_table(self.call.routing, tiles.rows)
        launch(
            self.backward.dx_low_rank,
            (_blocks(self.features, tiles.columns), rows.count),
            *(dx, dx.stride(0), ds, table.packed, table.origin, rows.tiles, table.spans, *tail),
            **{"DROPOUT": table.dropout, "BM": tiles.rows, "BK": tiles.columns, **self.common(tiles)},
        )
        return dx
