"""Tables with which Triton kernels find a tile's adapter, built on the host once per microbatch or layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from plait_kernels.bank import ABSENT, GRADIENTS, Bank
from plait_kernels.errors import KernelError
from plait_kernels.layer import LayerCall, Placed
from plait_kernels.routing import Padding, Routing
from plait_kernels.uploads import distance, table, together

RANK_STEP = 16  # rows of S are padded to a multiple of it, as in `triton_common`
WIDTHS = (16, 32, 64)  # ranks that a program multiplies at once
Key = tuple[Any, ...]  # of a table: what makes it, and of what
NO_TILE, NO_WORK = (0, 0, -1), (0, 0, -1, -1, 0)
FEW_RANKS = 32  # up to so many, dS and dB come from one read of dh


@dataclass(frozen=True)
class TileTable:
    """Tiles of at most `rows` rows that cover all rows, each of one span or none.

    Args:
        tiles: (count, 3) int64: first row, rows, span (−1: no adapter).
        count: number of tiles.
    """

    tiles: Tensor
    count: int


@dataclass(frozen=True)
class WidthClass:
    """The part of the work whose blocks of ranks have one width, so that each launch has its own binary.

    Args:
        width: ranks of a block, those beyond an adapter's rank masked.
        begin, count: where the part lies.
        factor: the largest power of two up to 16 that divides all its adapters' ranks.
    """

    width: int
    begin: int
    count: int
    factor: int


@dataclass(frozen=True)
class WorkTable:
    """Tiles of at most `rows` rows of the adapters of some ranks, once for each block of their ranks.

    Args:
        work: (count, 5) int64: first row, rows, span, slot (−1: only tile), first rank.
        classes: its parts by width, those that there are.
        slots: ranks of all partial sums together.
        shared: (adapters with several tiles, 3) int64: one of its spans, first slot, tiles.
        shared_count: how many these are.
        max_rank: the largest rank among them.
    """

    work: Tensor
    classes: tuple[WidthClass, ...]
    slots: int
    shared: Tensor
    shared_count: int
    max_rank: int


@dataclass(frozen=True)
class SpanTable:
    """What kernels know about every span.

    Args:
        spans: (spans, 4) int64: rank, dropout threshold, seed, where row 0 of its S would lie.
        scales: (spans,) float32.
        packed: elements of one site's S.
        max_rank: the largest rank.
        rank_factor: the largest power of two up to 16 that divides every rank.
        dropout: whether any span drops.
        origin, gradient_origin: tensors whose addresses the offsets count from.
        addresses, gradients: (spans, bank sites, 2) int64 offsets of A and B.
    """

    spans: Tensor
    scales: Tensor
    packed: int
    max_rank: int
    rank_factor: int
    dropout: bool
    origin: Tensor
    gradient_origin: Tensor
    addresses: Tensor
    gradients: Tensor


def _table(routing: Routing, make: Callable[..., Any], *given: object) -> Any:
    """A table of the microbatch; those that earlier microbatches needed are made with it and sent as one."""
    key = (make, *given)
    found = routing.tables.get(key)
    if found is None:
        routing.bank.wanted[key] = None
        make_tables(routing, tuple(routing.bank.wanted))
        found = routing.tables[key]
    return found


def make_tables(routing: Routing, keys: Iterable[Key]) -> None:
    """Make those of these tables that the microbatch does not have yet; they are sent as one."""
    missing = [each for each in keys if each not in routing.tables]
    made = [each[0](routing, *each[1:]) for each in missing]
    routing.tables.update(zip(missing, _sent(made, routing.bank.device), strict=True))


def made_tables(routing: Routing) -> tuple[Key, ...]:
    """What :func:`make_tables` has made for a microbatch."""
    makers = (_span_table, _tile_table, _work_table)
    return tuple(key for key in routing.tables if isinstance(key, tuple) and key[0] in makers)


def _sent(made: Sequence[Any], device: torch.device) -> list[Any]:
    """The same tables on the device."""
    names = [[field.name for field in fields(table) if field.name in _SENT] for table in made]
    tensors = [getattr(table, name) for table, own in zip(made, names, strict=True) for name in own]
    there = iter(together(tensors, device))
    return [
        replace(table, **{name: next(there) for name in own}) for table, own in zip(made, names, strict=True)
    ]


_SENT = ("spans", "scales", "addresses", "gradients", "tiles", "work", "shared")


def _host(rows: Sequence[object]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def _origin(bank: Bank, dtype: torch.dtype) -> Tensor:
    """A tensor from whose address offsets count."""
    key = ("origin", dtype)
    if key not in bank.tables:
        bank.tables[key] = torch.zeros(16, dtype=dtype, device=bank.device)
    return bank.tables[key]


def span_table(routing: Routing) -> SpanTable:
    """The span table of a microbatch."""
    return cast("SpanTable", _table(routing, _span_table))


def _span_table(routing: Routing) -> SpanTable:
    bank, rows, packed = routing.bank, [], 0
    for span in routing.fused:
        stride = -(-span.block.rank // RANK_STEP) * RANK_STEP
        rows.append((span.block.rank, span.threshold, span.block.seed, packed - span.start * stride))
        packed += (span.stop - span.start) * stride
    origin, gradient_origin = _origin(bank, bank.compute_dtype), _origin(bank, torch.float32)
    local = torch.stack([span.block.local for span in routing.fused])
    weights = [distance(span.block.copy, origin) for span in routing.fused]
    gradients = [distance(span.block.state[GRADIENTS], gradient_origin) for span in routing.fused]
    found = SpanTable(
        spans=_host(rows),
        scales=torch.tensor([span.block.scale for span in routing.fused], dtype=torch.float32),
        packed=packed,
        max_rank=max(span.block.rank for span in routing.fused),
        rank_factor=math.gcd(RANK_STEP, *(span.block.rank for span in routing.fused)),
        dropout=any(span.threshold for span in routing.fused),
        origin=origin,
        gradient_origin=gradient_origin,
        addresses=_moved(local, weights),
        gradients=_moved(local, gradients),
    )
    return found if routing.padding is None else _padded_spans(found, routing, routing.padding)


def _padded_spans(table: SpanTable, routing: Routing, padding: Padding) -> SpanTable:
    """The same with spans of no rank and no adapter behind, and as much room for S as may be needed."""
    count = padding.spans
    return replace(
        table,
        spans=_filled(table.spans, count, (0, 0, 0, 0)),
        scales=_filled(table.scales, count, 0.0),
        packed=routing.tokens * (-(-padding.ranks[-1] // RANK_STEP) * RANK_STEP),
        max_rank=padding.ranks[-1],
        rank_factor=math.gcd(RANK_STEP, *padding.ranks),
        dropout=padding.dropout,
        addresses=_filled(table.addresses, count, ABSENT),
        gradients=_filled(table.gradients, count, ABSENT),
    )


def _filled(table: Tensor, count: int, row: object) -> Tensor:
    """A table with so many rows, those that are missing alike.

    Raises:
        KernelError: it has more.
    """
    if len(table) > count:
        raise KernelError(f"a table of {len(table)} rows", f"it is to have {count}", "leave the padding out")
    out = torch.tensor(row, dtype=table.dtype).expand(count, *table.shape[1:]).clone()
    out[: len(table)] = table
    return out


def _moved(local: Tensor, distances: list[int]) -> Tensor:
    moved = local + torch.tensor(distances, dtype=torch.int64)[:, None, None]
    return torch.where(local == ABSENT, local, moved)


def tile_table(routing: Routing, rows: int) -> TileTable:
    """Tiles of `rows` rows of every span, and of the rows that have no adapter."""
    return cast("TileTable", _table(routing, _tile_table, rows))


def _tile_table(routing: Routing, rows: int) -> TileTable:
    parts, end = [], 0
    for index, span in enumerate(routing.fused):
        parts += [(end, span.start, -1), (span.start, span.stop, index)]
        end = span.stop
    parts.append((end, routing.tokens, -1))
    tiles = [
        (first, min(rows, stop - first), index)
        for start, stop, index in parts
        for first in range(start, stop, rows)
    ]
    if routing.padding is not None:
        tiles += [NO_TILE] * (_most_tiles(routing, routing.padding, rows) - len(tiles))
    return TileTable(_host(tiles), len(tiles))


def _most_tiles(routing: Routing, padding: Padding, rows: int) -> int:
    """No microbatch that is filled up so has more tiles of so many rows: each span's last may be partial, and
    so may the one behind all of them."""
    return routing.tokens // rows + padding.spans


def work_table(routing: Routing, rows: int, ranks: range) -> WorkTable:
    """Work of tiles of `rows` rows, of the adapters whose rank is one of `ranks`."""
    return cast("WorkTable", _table(routing, _work_table, rows, ranks))


def _width(left: int) -> int:
    """Ranks of the block that begins where `left` are left."""
    return next((width for width in WIDTHS if left <= width), WIDTHS[-1])


def _work_table(routing: Routing, rows: int, ranks: range) -> WorkTable:
    by_adapter: dict[str, list[int]] = {}
    for index, span in enumerate(routing.fused):
        if span.block.rank in ranks:
            by_adapter.setdefault(span.block.adapter, []).append(index)
    work: dict[int, list[tuple[int, ...]]] = {width: [] for width in WIDTHS}
    factors = dict.fromkeys(WIDTHS, RANK_STEP)
    shared, slots = [], 0
    for spans in by_adapter.values():
        own = [
            (first, min(rows, routing.fused[index].stop - first), index)
            for index in spans
            for first in range(routing.fused[index].start, routing.fused[index].stop, rows)
        ]
        rank = routing.fused[spans[0]].block.rank
        several = len(own) > 1
        if several:
            shared.append((spans[0], slots, len(own)))
        for tile in own:
            for first_rank in range(0, rank, WIDTHS[-1]):
                width = _width(rank - first_rank)
                work[width].append((*tile, slots if several else -1, first_rank))
                factors[width] = math.gcd(factors[width], rank)
            slots += rank if several else 0
    max_rank = max((routing.fused[spans[0]].block.rank for spans in by_adapter.values()), default=0)
    if routing.padding is not None:
        own_ranks = [rank for rank in routing.padding.ranks if rank in ranks]
        tiles = _most_tiles(routing, routing.padding, rows)
        factors, max_rank = _pad_work(work, own_ranks, tiles), max(own_ranks, default=0)
        shared += [(routing.padding.spans - 1, 0, 0)] * (routing.padding.spans - len(shared))
        slots = tiles * max_rank
    return WorkTable(
        work=_host([piece for pieces in work.values() for piece in pieces]),
        classes=_classes(work, factors),
        slots=slots,
        shared=_host(shared),
        shared_count=len(shared),
        max_rank=max_rank,
    )


def _classes(work: dict[int, list[tuple[int, ...]]], factors: dict[int, int]) -> tuple[WidthClass, ...]:
    classes, begin = [], 0
    for width, pieces in work.items():
        if pieces:
            classes.append(WidthClass(width, begin, len(pieces), factors[width]))
        begin += len(pieces)
    return tuple(classes)


def _pad_work(work: dict[int, list[tuple[int, ...]]], ranks: Sequence[int], tiles: int) -> dict[int, int]:
    """Fill up the pieces of each width to as many as so many tiles of these ranks may have; each width's
    factor."""
    factors, most = dict.fromkeys(WIDTHS, RANK_STEP), dict.fromkeys(WIDTHS, 0)
    for rank in ranks:
        widths = [_width(rank - first) for first in range(0, rank, WIDTHS[-1])]
        for width in set(widths):
            factors[width] = math.gcd(factors[width], rank)
            most[width] = max(most[width], widths.count(width))
    for width, pieces in work.items():
        pieces += [NO_WORK] * (tiles * most[width] - len(pieces))
    return factors


def site_table(call: LayerCall) -> Tensor:
    """(sites, 5) int64: index in the bank, dropout module, first column, columns, features.

    Above the 32 bits of the module: how many times 8 features of the layer come before those here.
    """
    found: Tensor | None = call.layer.tables.get("sites")
    if found is None:
        rows = [
            (
                *(call.bank.site_index[site.name], site.module % 2**32 + (site.first_feature // 8 << 32)),
                *(columns.start, site.out_features, site.in_features),
            )
            for site, columns in call.placed
        ]
        found = call.layer.tables["sites"] = table(rows, call.bank.device)
    return found


def block_table(call: LayerCall, width: int, out_features: int) -> Tensor:
    """(blocks, 3) int64: site or −1, first and end column of blocks that cover all columns."""
    key = ("blocks", width)
    found = call.layer.tables.get(key)
    if found is None:
        rows = _blocks(call.placed, width, out_features)
        found = call.layer.tables[key] = table(rows, call.bank.device)
    return cast("Tensor", found)


def _blocks(placed: tuple[Placed, ...], width: int, out_features: int) -> list[tuple[int, int, int]]:
    ranges, end = [], 0
    for index, (_, columns) in enumerate(placed):
        ranges += [(-1, end, columns.start), (index, columns.start, columns.stop)]
        end = columns.stop
    ranges.append((-1, end, out_features))
    return [
        (site, start, min(start + width, stop))
        for site, first, stop in ranges
        for start in range(first, stop, width)
    ]
