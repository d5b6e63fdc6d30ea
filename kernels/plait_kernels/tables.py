"""Tables with which Triton kernels find a tile's adapter, built on the host once per microbatch or layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from plait_kernels.bank import ABSENT, GRADIENTS
from plait_kernels.layer import LayerCall, Placed
from plait_kernels.routing import Routing
from plait_kernels.uploads import distance, table, upload

Row = tuple[int, int, int, int]
RANK_STEP = 16  # rows of S are padded to a multiple of it, as in `triton_common`


@dataclass(frozen=True)
class TileTable:
    """Tiles of at most `rows` rows, each of one span.

    Args:
        tiles: (count, 4) int64: first row, rows, span (−1: no adapter), slot (−1: only tile).
        count: number of tiles.
        slots: ranks of all partial sums together.
        shared: (adapters with several tiles, 3) int64: one of its spans, first slot, tiles.
    """

    tiles: Tensor
    count: int
    slots: int
    shared: Tensor


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


def _device(values: Sequence[object], routing: Routing, dtype: torch.dtype = torch.int64) -> Tensor:
    return table(values, routing.bank.device, dtype)


def span_table(routing: Routing) -> SpanTable:
    """The span table of a microbatch."""
    found = routing.tables.get("spans")
    if found is None:
        found = routing.tables["spans"] = _span_table(routing)
    return cast("SpanTable", found)


def _span_table(routing: Routing) -> SpanTable:
    bank, rows, packed = routing.bank, [], 0
    for span in routing.fused:
        stride = -(-span.block.rank // RANK_STEP) * RANK_STEP
        rows.append((span.block.rank, span.threshold, span.block.seed, packed - span.start * stride))
        packed += (span.stop - span.start) * stride
    origin = torch.zeros(16, dtype=bank.compute_dtype, device=bank.device)
    gradient_origin = torch.zeros(16, dtype=torch.float32, device=bank.device)
    local = torch.stack([span.block.local for span in routing.fused])
    weights = [distance(span.block.copy, origin) for span in routing.fused]
    gradients = [distance(span.block.state[GRADIENTS], gradient_origin) for span in routing.fused]
    return SpanTable(
        spans=_device(rows, routing),
        scales=_device([span.block.scale for span in routing.fused], routing, torch.float32),
        packed=packed,
        max_rank=max(span.block.rank for span in routing.fused),
        rank_factor=math.gcd(RANK_STEP, *(span.block.rank for span in routing.fused)),
        dropout=any(span.threshold for span in routing.fused),
        origin=origin,
        gradient_origin=gradient_origin,
        addresses=upload(_moved(local, weights), bank.device),
        gradients=upload(_moved(local, gradients), bank.device),
    )


def _moved(local: Tensor, distances: list[int]) -> Tensor:
    moved = local + torch.tensor(distances, dtype=torch.int64)[:, None, None]
    return torch.where(local == ABSENT, local, moved)


def tile_table(routing: Routing, rows: int, *, base: bool = False) -> TileTable:
    """Tiles of `rows` rows of every span; with `base` also of the rows that have no adapter."""
    key = ("tiles", rows, base)
    found = routing.tables.get(key)
    if found is None:
        found = routing.tables[key] = _tile_table(routing, rows, base)
    return cast("TileTable", found)


def _tile_table(routing: Routing, rows: int, base: bool) -> TileTable:
    by_adapter: dict[str, list[int]] = {}
    for index, span in enumerate(routing.fused):
        by_adapter.setdefault(span.block.adapter, []).append(index)
    tiles, shared, slots = [], [], 0
    for spans in by_adapter.values():
        own = [
            (first, routing.fused[index].stop, index)
            for index in spans
            for first in range(routing.fused[index].start, routing.fused[index].stop, rows)
        ]
        rank = routing.fused[spans[0]].block.rank
        if len(own) > 1:
            shared.append((spans[0], slots, len(own)))
        for first, end, index in own:
            tiles.append((first, min(rows, end - first), index, slots if len(own) > 1 else -1))
            slots += rank if len(own) > 1 else 0
    if base:
        tiles = sorted(tiles + _base_tiles(routing, rows))
    return TileTable(_device(tiles, routing), len(tiles), slots, _device(shared, routing))


def _base_tiles(routing: Routing, rows: int) -> list[Row]:
    holes, end = [], 0
    for span in routing.fused:
        holes.append((end, span.start))
        end = span.stop
    holes.append((end, routing.tokens))
    return [
        (first, min(rows, stop - first), -1, -1)
        for start, stop in holes
        for first in range(start, stop, rows)
    ]


def _layer_key(call: LayerCall) -> tuple[object, ...]:
    return tuple((site.name, columns.start) for site, columns in call.placed)


def site_table(call: LayerCall) -> Tensor:
    """(sites, 5) int64: index in the bank, dropout module, first column, columns, features."""
    key = ("sites", _layer_key(call))
    found = call.bank.tables.get(key)
    if found is None:
        rows = [
            (
                *(call.bank.site_index[site.name], site.module % 2**32),
                *(columns.start, site.out_features, site.in_features),
            )
            for site, columns in call.placed
        ]
        found = call.bank.tables[key] = _device(rows, call.routing)
    return found


def block_table(call: LayerCall, width: int, out_features: int | None = None) -> Tensor:
    """(blocks, 3) int64: blocks of at most `width` columns: site, or −1, first and end column.

    With `out_features` they cover all columns of the layer, else those of its sites.
    """
    key = ("blocks", _layer_key(call), width, out_features)
    found = call.bank.tables.get(key)
    if found is None:
        rows = _blocks(call.placed, width, out_features)
        found = call.bank.tables[key] = _device(rows, call.routing)
    return found


def _blocks(placed: tuple[Placed, ...], width: int, out_features: int | None) -> list[tuple[int, int, int]]:
    ranges, end = [], 0
    for index, (_, columns) in enumerate(placed):
        ranges += [(-1, end, columns.start), (index, columns.start, columns.stop)]
        end = columns.stop
    if out_features is not None:
        ranges.append((-1, end, out_features))
    return [
        (site, start, min(start + width, stop))
        for site, first, stop in ranges
        if site >= 0 or out_features is not None
        for start in range(first, stop, width)
    ]
