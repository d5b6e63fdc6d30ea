"""Launches of the Triton kernels for one call of one layer, with the tables of `tables`.

The graph is split at S, which is small: (1) dropout and down-projection of each row's owner only; (2) base
product plus up-projection; (3) dS and dB, from one read of dh if the ranks are few: with many, the partial
sums would outgrow dh; (4) dA; (5) base dx plus low-rank dx. (1) also notes which features are dropped, a bit
each, for (4) and (5): to compute that again took them longer than their products. (2) and (5) are one Triton
product, or the low-rank part is written first and the vendor's product added to it, whichever was measured to
be faster (`autotuning`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from plait_kernels.launching import GIVEN, Launch, add_product, room
from plait_kernels.layer import LayerCall
from plait_kernels.tables import (
    FEW_RANKS,
    RANK_STEP,
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
_BITS_STEP = 128  # features that a row of bits has room for a multiple of, so that whole vectors are moved
_Made = TypeVar("_Made")
_EVERY_RANK, _FEW, _MANY = range(1, 2**31), range(1, FEW_RANKS + 1), range(FEW_RANKS + 1, 2**31)


@cache
def _kernels() -> tuple[Any, Any]:
    from plait_kernels import triton_backward, triton_forward

    return triton_forward, triton_backward


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


class _Scratch:
    """Memory that the calls of a microbatch use one after the other, in one of the shapes that are asked for;
    the largest stays.

    Args:
        memory: the microbatch's, by name.
        like: a tensor on its device.
    """

    __slots__ = ("_dtype", "_like", "_memory", "_name", "_shape", "_view", "_whole")

    def __init__(
        self, memory: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor
    ) -> None:
        self._memory, self._name, self._shape, self._dtype, self._like = memory, name, shape, dtype, like
        self._whole: Tensor | None = None
        self._view = like

    def __call__(self) -> Tensor:
        """It, with anything in it."""
        whole = self._memory.get(self._name)
        if whole is None or whole is not self._whole:
            size = math.prod(self._shape)
            if whole is None or whole.numel() < size:
                whole = self._memory[self._name] = room(self._like, (size,), self._dtype)
            self._whole, self._view = whole, whole[:size].view(self._shape)
        return self._view


@dataclass(frozen=True, slots=True)
class _Summed:
    """Launches that leave partial sums of some elements, and those that add them up."""

    launches: list[Launch]
    sums: list[Launch]
    partial: _Scratch


@dataclass(frozen=True, slots=True)
class _Down:
    """The launches of S, whose parts are summed if there are several."""

    launches: list[Launch]
    parts: _Scratch | None
    sum_parts: Launch | None


@dataclass(frozen=True, slots=True)
class _UpGradient:
    """The launches of dS and dB, those of many ranks apart."""

    ds: _Scratch
    few: _Summed
    wide_ds: list[Launch]
    wide_db: _Summed | None
    parts: _Scratch | None
    sum_parts: Launch | None


def bits_bytes(features: int, step: int = _BITS_STEP) -> int:
    """Bytes of a row of bits of dropped features, with room for whole blocks of so many."""
    return _blocks(features, step) * step // 8


class Launcher:
    """The launches of the calls of one kind of layer in one microbatch; see :func:`launcher`.

    What such layers share is looked at once: tables, numbers, grids, binaries. Scratch memory is that of the
    microbatch's calls in one stream, which follow each other.
    """

    def __init__(
        self, call: LayerCall, x: Tensor, weight: Tensor, chosen: Choice, *, stream: int = 0
    ) -> None:
        self.forward, self.backward = _kernels()
        self.chosen = chosen
        self.table = span_table(call.routing)
        self.site_count = len(call.placed)
        self.tokens, self.features, self.x_stride = x.shape[0], x.shape[1], x.stride(0)
        self.bits_stride = self._bits_stride()
        self.outputs, self.weight_strides = weight.shape[0], weight.stride()
        self.bank_sites = len(call.bank.sites)
        self.precision = "ieee" if x.dtype == torch.float32 else "tf32"
        self.counters = call.routing.counters
        self.align, self.widest = call.layer.align, call.layer.widest
        self.like = x.new_empty(0)
        self._memory: dict[str, Tensor] = call.routing.tables.setdefault(("memory", stream), {})
        self._made: dict[object, Any] = {}
        self.packed = (self.site_count, self.table.packed)  # the shape of S and dS
        dropped = (self.site_count, self.tokens, self.bits_stride) if self.table.dropout else (0,)
        self.bits = dropped  # that of a bit of each feature of each site's rows, 8 in a byte

    def _once(self, make: Callable[[LayerCall], _Made], call: LayerCall) -> _Made:
        """What a method makes, the first time that it is needed.

        The microbatch keeps its launchers, so they keep nothing of a call, which has the microbatch.
        """
        found = self._made[make.__name__] = make(call)
        return found

    # ---- memory ---------------------------------------------------------------------------------------

    def _bits_stride(self) -> int:
        """Bytes of a row of bits, with room for whole blocks of all kernels that write and read them."""
        chosen = self.chosen
        dx = chosen.dx.columns if chosen.fused_backward is None else chosen.fused_backward.depth
        step = max(_BITS_STEP, chosen.down.depth, chosen.down_gradient.columns, dx)
        return bits_bytes(self.features, step)

    def bits_at(self) -> tuple[object, int, int]:
        """The arguments of a launch about these bits."""
        return GIVEN, self.bits_stride, self.tokens * self.bits_stride

    def _scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> _Scratch:
        return _Scratch(self._memory, name, shape, dtype, self.like)

    def _parts(self, splits: int) -> tuple[_Scratch, Launch] | tuple[None, None]:
        """Room for the parts of several splits, and the launch that sums them; None for one split."""
        if splits == 1:
            return None, None
        return self._scratch("parts", (splits, *self.packed)), self._summing(splits)

    # ---- launches -------------------------------------------------------------------------------------

    def common(self, tiles: Tiles) -> dict[str, Any]:
        """The constants of every product's launch."""
        return {"PRECISION": self.precision, "num_warps": tiles.warps, "num_stages": tiles.stages}

    def all_ranks(self) -> dict[str, Any]:
        """The constants of a launch over all ranks of each tile."""
        return {"RANKS": self.table.rank_factor, "FEW": self.table.max_rank <= RANK_STEP}

    def _summing(self, splits: int) -> Launch:
        """Sums over splits, in order, in the compute dtype.

        The elements of an adapter at a site that it does not target are never written, and their sum is never
        read; of what lay there it may be NaN, of which the interpreter warns.
        """
        elements = self.site_count * self.table.packed
        constants = {"SPLITS": splits, "BLOCK": _SUM_BLOCK}
        grid = (_blocks(elements, _SUM_BLOCK),)
        return Launch(self.forward.sum_splits, grid, GIVEN, GIVEN, elements, elements, **constants)

    def _down(self, call: LayerCall) -> _Down:
        tiles, table = self.chosen.down, self.table
        work = work_table(call.routing, tiles.rows, _EVERY_RANK)
        depth = _blocks(_blocks(self.features, tiles.splits), tiles.depth) * tiles.depth
        launches = [
            Launch(
                self.forward.down,
                (self.site_count, each.count, tiles.splits),
                *(GIVEN, self.x_stride, GIVEN, table.packed, self.site_count * table.packed),
                *(*self.bits_at(), table.origin, work.work, each.begin, table.spans, GIVEN),
                *(table.addresses, self.bank_sites, self.counters, self.features, depth),
                **{"DROPOUT": table.dropout, "RANKS": each.factor, "BR": each.width},
                **{"BM": tiles.rows, "BK": tiles.depth, **self.common(tiles)},
            )
            for each in work.classes
        ]
        return _Down(launches, *self._parts(tiles.splits))

    def down(self, call: LayerCall, x: Tensor) -> tuple[Tensor, Tensor]:
        """S, packed, and the bits of which features are dropped."""
        made, sites = self._made.get("_down") or self._once(self._down, call), site_table(call)
        s, bits = room(self.like, self.packed), room(self.like, self.bits, torch.uint8)
        parts = s if made.parts is None else made.parts()
        for each in made.launches:
            each(x, parts, bits, sites)
        if made.sum_parts is not None:
            made.sum_parts(parts, s)
        return s, bits

    def _up_biased(self, call: LayerCall) -> Launch:
        return self._up(call, biased=True)

    def _up(self, call: LayerCall, *, biased: bool = False) -> Launch:
        tiles, table = self.chosen.fused_forward or self.chosen.up, self.table
        rows = tile_table(call.routing, tiles.rows)
        blocks = block_table(call, tiles.columns, self.outputs)
        shared = (GIVEN, table.packed, table.origin, rows.tiles)
        constants = {"BIAS": biased, "ALIGN": self.align, "BM": tiles.rows, "BN": tiles.columns}
        constants |= {**self.all_ranks(), **self.common(tiles)}
        if self.chosen.fused_forward is None:
            return Launch(
                self.forward.up,
                (blocks.shape[0], rows.count),
                *(GIVEN, self.outputs, GIVEN, *shared, table.spans, table.scales),
                *(GIVEN, table.addresses, self.bank_sites, blocks),
                **constants,
            )
        return Launch(
            self.forward.linear_up,
            (rows.count * blocks.shape[0],),
            *(GIVEN, self.x_stride, GIVEN, *self.weight_strides),
            *(GIVEN, GIVEN, self.outputs, *shared, rows.count, table.spans, table.scales),
            *(GIVEN, table.addresses, self.bank_sites, blocks, blocks.shape[0], self.features),
            **{"BK": tiles.depth, "GROUP": 8, **constants},
        )

    def up(self, call: LayerCall, x: Tensor, s: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output: base product and up-projection."""
        make = self._up if bias is None else self._up_biased
        run, sites = self._made.get(make.__name__) or self._once(make, call), site_table(call)
        out = room(x, (x.shape[0], self.outputs))
        given_bias = self.like if bias is None else bias  # of no size: nothing of it is read
        if self.chosen.fused_forward is None:
            run(out, given_bias, s, sites)
            return add_product(out, x, weight.T)
        run(x, weight, given_bias, out, s, sites)
        return out

    def up_gradient(self, call: LayerCall, grad: Tensor, s: Tensor) -> Tensor:
        """Add dB to the bank; return dS, which the microbatch's next call overwrites."""
        made, sites = self._made.get("_up_gradient") or self._once(self._up_gradient, call), site_table(call)
        ds = made.ds()
        parts = ds if made.parts is None else made.parts()
        self._run(made.few, sites, grad, s, parts)
        for each in made.wide_ds:
            each(grad, parts, sites)
        if made.wide_db is not None:
            self._run(made.wide_db, sites, grad, s)
        if made.sum_parts is not None:
            made.sum_parts(parts, ds)
        return ds

    def _up_gradient(self, call: LayerCall) -> _UpGradient:
        wide = self.table.max_rank > FEW_RANKS
        return _UpGradient(
            self._scratch("ds", self.packed, self.like.dtype),
            self._few_ranks(call),
            self._wide_ds(call) if wide else [],
            self._wide_db(call) if wide else None,
            *self._parts(self.chosen.up_gradient.splits),
        )

    def _run(self, made: _Summed, sites: Tensor, *given: Tensor) -> None:
        partial = made.partial()
        for each in made.launches:
            each(*given, partial, sites)
        for each in made.sums:
            each(partial, sites)

    def _summed(self, launches: list[Launch], work: WorkTable, widest: int, width: int, is_b: int) -> _Summed:
        """Sums of at most ``widest`` elements of each site, of ``width`` of all sites."""
        if work.slots == 0:
            return _Summed(launches, [], self._scratch("partial", (1,)))
        table = self.table
        sums = Launch(
            self.backward.sum_partials,
            (_blocks(widest * work.max_rank, _SUM_BLOCK), work.shared_count, self.site_count),
            *(GIVEN, table.gradient_origin, work.shared, table.spans, GIVEN, table.gradients),
            *(self.bank_sites, work.slots),
            **{"IS_B": is_b, "BLOCK": _SUM_BLOCK},
        )
        return _Summed(launches, [sums], self._scratch("partial", (work.slots * width,)))

    def _few_ranks(self, call: LayerCall) -> _Summed:
        """dS and dB of adapters of few ranks."""
        tiles, table = self.chosen.up_gradient, self.table
        work = work_table(call.routing, tiles.rows, _FEW)
        width = _blocks(_blocks(self.widest, tiles.splits), tiles.columns) * tiles.columns
        launches = [
            Launch(
                self.backward.up_gradient,
                (self.site_count, each.count, tiles.splits),
                *(GIVEN, self.outputs, GIVEN, GIVEN, table.packed, self.site_count * table.packed),
                *(table.origin, table.gradient_origin, GIVEN, work.work, each.begin, table.spans),
                *(table.scales, GIVEN, table.addresses, table.gradients, self.bank_sites, work.slots, width),
                **self._by_width(each, tiles),
                **{"BM": tiles.rows, "BN": tiles.columns},
            )
            for each in work.classes
        ]
        return self._summed(launches, work, self.widest, self.outputs, is_b=1)

    def _by_width(self, each: WidthClass, tiles: Tiles) -> dict[str, Any]:
        return {"ALIGN": self.align, "RANKS": each.factor, "BR": each.width, **self.common(tiles)}

    def _wide_ds(self, call: LayerCall) -> list[Launch]:
        """dS of adapters of many ranks."""
        tiles, table, splits = self.chosen.down, self.table, self.chosen.up_gradient.splits
        work = work_table(call.routing, tiles.rows, _MANY)
        width = _blocks(_blocks(self.widest, splits), tiles.depth) * tiles.depth
        return [
            Launch(
                self.backward.wide_ds,
                (self.site_count, each.count, splits),
                *(GIVEN, self.outputs, GIVEN, table.packed, self.site_count * table.packed, table.origin),
                *(work.work, each.begin, table.spans, table.scales, GIVEN, table.addresses),
                *(self.bank_sites, width),
                **self._by_width(each, tiles),
                **{"BM": tiles.rows, "BK": tiles.depth},
            )
            for each in work.classes
        ]

    def _wide_db(self, call: LayerCall) -> _Summed:
        """dB of adapters of many ranks."""
        tiles, table = self.chosen.down_gradient, self.table
        work = work_table(call.routing, tiles.rows * tiles.splits, _MANY)
        launches = [
            Launch(
                self.backward.wide_db,
                (self.site_count, _blocks(self.widest, tiles.columns), each.count),
                *(GIVEN, self.outputs, GIVEN, table.packed, table.gradient_origin, GIVEN, work.work),
                *(each.begin, table.spans, table.scales, GIVEN, table.gradients, self.bank_sites),
                *(work.slots,),
                **self._by_width(each, tiles),
                **{"BM": tiles.rows, "BK": tiles.columns},
            )
            for each in work.classes
        ]
        return self._summed(launches, work, self.widest, self.outputs, is_b=1)

    def _down_gradient(self, call: LayerCall) -> _Summed:
        tiles, table = self.chosen.down_gradient, self.table
        work = work_table(call.routing, tiles.rows * tiles.splits, _EVERY_RANK)
        launches = [
            Launch(
                self.backward.down_gradient,
                (self.site_count, _blocks(self.features, tiles.columns), each.count),
                *(GIVEN, self.x_stride, GIVEN, table.packed, *self.bits_at(), table.gradient_origin),
                *(GIVEN, work.work, each.begin, table.spans, GIVEN, table.gradients, self.bank_sites),
                *(work.slots, self.features),
                **{"DROPOUT": table.dropout, "RANKS": each.factor, "BR": each.width},
                **{"BM": tiles.rows, "BK": tiles.columns, **self.common(tiles)},
            )
            for each in work.classes
        ]
        return self._summed(launches, work, self.features, self.features * self.site_count, is_b=0)

    def down_gradient(self, call: LayerCall, x: Tensor, ds: Tensor, bits: Tensor) -> None:
        """Add dA to the bank."""
        made = self._made.get("_down_gradient") or self._once(self._down_gradient, call)
        self._run(made, site_table(call), x, ds, bits)

    def _dx(self, call: LayerCall) -> Launch:
        table = self.table
        tiles = self.chosen.fused_backward or self.chosen.dx
        rows = tile_table(call.routing, tiles.rows)
        low_rank = (GIVEN, table.packed, *self.bits_at(), table.origin, rows.tiles)
        tail = (GIVEN, self.site_count, table.addresses, self.bank_sites, self.features)
        constants = {"DROPOUT": table.dropout, "BM": tiles.rows, **self.all_ranks(), **self.common(tiles)}
        if self.chosen.fused_backward is None:
            return Launch(
                self.backward.dx_low_rank,
                (_blocks(self.features, tiles.columns), rows.count),
                *(GIVEN, self.features, *low_rank, table.spans, *tail),
                **{"BK": tiles.columns, **constants},
            )
        blocks = _blocks(self.features, tiles.depth)
        return Launch(
            self.backward.dx_linear,
            (rows.count * blocks,),
            *(GIVEN, self.outputs, GIVEN, *self.weight_strides, GIVEN, self.features),
            *(*low_rank, rows.count, table.spans, *tail, self.outputs, blocks),
            **{"BN": tiles.columns, "BK": tiles.depth, "GROUP": 8, **constants},
        )

    def dx(self, call: LayerCall, grad: Tensor, ds: Tensor, bits: Tensor, weight: Tensor) -> Tensor:
        """The gradient of x: base product and low-rank part."""
        run, sites = self._made.get("_dx") or self._once(self._dx, call), site_table(call)
        dx = room(grad, (grad.shape[0], self.features))
        if self.chosen.fused_backward is None:
            run(dx, ds, bits, sites)
            return add_product(dx, grad, weight)
        run(grad, weight, dx, ds, bits, sites)
        return dx


def launcher(call: LayerCall, x: Tensor, weight: Tensor, chosen: Choice) -> Launcher:
    """The launches of a layer's call, which layers of the same sizes in a microbatch share.

    Args:
        x: rows of contiguous features; gradients of the output must be contiguous.
    """
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    key = (call.layer.kind, x.shape[1], x.stride(0), x.dtype, weight.stride(), id(chosen), stream)
    found: Launcher | None = call.routing.tables.get(key)
    if found is None:  # it keeps `chosen`, so that its number stays its own
        found = call.routing.tables[key] = Launcher(call, x, weight, chosen, stream=stream)
    return found
