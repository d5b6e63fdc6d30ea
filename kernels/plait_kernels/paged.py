"""Attention of rows over keys and values that lie in pages of a pool, for generation. Without gradients.

A page has each token's keys, then its values, of all heads. A request's table names its pages in order. By
Triton they are read where they lie; :func:`attend_by_products`, the reference, copies them.

Attention weighs the values of tokens that a row does not see by 0, which would not hide what is not finite.
So where a head's values are not, NaN is stored as its keys and 0 as its values: rows that see the token are
not finite, as they should be, and others are as without it. :func:`store_rows` and :func:`store_by_triton`.

A row's sums have one order, which depends on its position alone: its bits depend neither on what shares the
batch nor on where pages lie. A prompt's rows go by tiles of several, also where only one of them is left to
run; the row of a new token by itself. Its keys are read in chunks of ``CHUNK``, by programs of their own,
since there may be few such rows.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from plait_kernels.launching import GIVEN, Launch, room
from plait_kernels.tiles import power_of_two
from plait_kernels.uploads import together, upload

CHUNK = 256  # keys of a single row that one program reads
_EVERY = 2**30  # keys: more than there are
_LOG2E = math.log2(math.e)
# Rows of a prompt's tile, times query heads; float32's products, which no tensor core has, take the fewest.
_PROMPT_ROWS = 64
_FEWEST_ROWS = 16  # that a product has
_Launches = tuple[list[Launch], list[Launch]]


@dataclass(frozen=True, slots=True)
class PageShape:
    """How keys and values lie in a page, and the rule of attention over them.

    Attributes:
        tokens: of a page.
        shared: key and value heads.
        group: query heads of each.
        size: features of a head.
        scale, softcap: scores are softcap · tanh(scale · q·k / softcap); None: scale · q·k.
        window: keys that a row sees, its own the last; None: all.
    """

    tokens: int
    shared: int
    group: int
    size: int
    scale: float
    softcap: float | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A request's rows: the first one's number and position, how many, and whether they are its prompt's."""

    row: int
    rows: int
    position: int
    prompt: bool


class PagedRows:
    """The rows of one iteration and the pages of their requests; made once for all layers.

    Args:
        pages: of each request, in the order of its tokens.
        spans: the rows of each.

    Attributes:
        tables: (requests, longest) int32, the pages.
        single: (n, 4) int32, the rows of new tokens: row, 1, request, position.
        stores, attends: launches of layers of the same sizes, as they are needed; joins follow the latter.
    """

    def __init__(self, pages: Sequence[Sequence[int]], spans: Sequence[Span], device: torch.device) -> None:
        self.pages, self.spans = pages, spans
        longest = max(map(len, pages))
        padded = array("i")  # of nested lists torch makes a tensor in several times as long
        for own in pages:
            padded.extend(own)
            padded.frombytes(bytes(padded.itemsize * (longest - len(own))))
        tables = torch.frombuffer(padded, dtype=torch.int32).view(-1, longest)
        self._positions = [each.position for each in spans if not each.prompt]
        self._device = device
        self.tables, self.single = together([tables, self._tiles(1, prompt=False)], device)
        self._prompts: dict[int, Tensor] = {}
        self.stores: dict[object, Launch] = {}
        self.attends: dict[object, _Launches] = {}

    def prompts(self, most: int) -> Tensor:
        """(n, 4) int32, the prompts' rows in tiles of at most so many: first row, rows, request, position."""
        if most not in self._prompts:
            tiles = self._tiles(most, prompt=True)
            self._prompts[most] = upload(tiles, self._device) if len(tiles) else tiles
        return self._prompts[most]

    def chunks(self, shape: PageShape) -> int:
        """Most chunks of the keys of a single row."""
        window = shape.window
        firsts = (0 if window is None else max(0, last - window + 1) for last in self._positions)
        both = zip(firsts, self._positions, strict=True)
        return max((last // CHUNK - first // CHUNK + 1 for first, last in both), default=0)

    def _tiles(self, most: int, *, prompt: bool) -> Tensor:
        tiles = [
            (each.row + first, min(most, each.rows - first), request, each.position + first)
            for request, each in enumerate(self.spans)
            if each.prompt == prompt
            for first in range(0, each.rows, most)
        ]
        return torch.tensor(tiles, dtype=torch.int32).view(-1, 4)


def store_rows(qkv: Tensor, pool: Tensor, places: Tensor, shape: PageShape) -> None:
    """Store tokens' keys and values by torch; what is not finite changes ``qkv`` in the same way.

    Args:
        qkv: (tokens, …): after the query heads' features the keys, then the values.
        places: (tokens, 2) int64, the page of each, and the token in it.
    """
    new = qkv.view(len(qkv), -1, shape.size)[:, shape.shared * shape.group :]
    keys, values = new[:, : shape.shared], new[:, shape.shared :]
    spoilt = ~torch.isfinite(values).all(-1, keepdim=True)
    keys.masked_fill_(spoilt, torch.nan)
    values.masked_fill_(spoilt, 0.0)
    used = math.prod((shape.tokens, 2, shape.shared, shape.size))
    stored = pool[:, :used].view(-1, shape.tokens, 2 * shape.shared, shape.size)
    stored[places[:, 0], places[:, 1]] = new


def store_by_triton(qkv: Tensor, pool: Tensor, places: Tensor, rows: PagedRows, shape: PageShape) -> None:
    """:func:`store_rows` by Triton, in one launch; ``qkv`` stays."""
    key = (shape, qkv.dtype, qkv.stride(0), pool.shape[1])
    if key not in rows.stores:
        sizes = shape.group * shape.shared * shape.size, shape.shared * shape.size
        rows.stores[key] = Launch(
            _triton().store,
            (len(places), shape.shared),
            *(GIVEN, GIVEN, places, qkv.stride(0), pool.shape[1], *sizes),
            **{"SIZE": shape.size, "BD": power_of_two(shape.size), "num_warps": 1},
        )
    rows.stores[key](qkv, pool)


def attend_by_products(out: Tensor, qkv: Tensor, pool: Tensor, rows: PagedRows, shape: PageShape) -> None:
    """Fill the rows of ``out`` by torch's products over copies: the reference of :func:`attend_by_triton`.

    Args:
        out: (tokens, query heads · size).
        qkv: (tokens, …), beginning with the query heads.
        pool: (pages, elements), of which each begins with (tokens, 2, shared, size). The rows' own keys and
            values are there.
    """
    used = math.prod((shape.tokens, 2, shape.shared, shape.size))
    stored = pool[:, :used].view(-1, shape.tokens, 2, shape.shared, shape.size)
    heads = shape.shared * shape.group
    for own, each in zip(rows.pages, rows.spans, strict=True):
        end = each.position + each.rows
        pages = torch.tensor(own[: -(-end // shape.tokens)], device=pool.device)
        keys, values = stored[pages].flatten(0, 1)[None, :end].unbind(2)
        some = slice(each.row, each.row + each.rows)
        q = qkv[some, : heads * shape.size].reshape(1, each.rows, heads, shape.size)
        positions = torch.arange(each.position, end, device=pool.device)[None]
        out[some] = attend_rows(q, keys, values, positions, shape)[0]


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, shape: PageShape) -> Tensor:
    """Query rows against their samples' keys: (samples, rows, heads, size) to (samples, rows, heads · size).

    Args:
        keys, values: (samples, longest, shared, size), of which those up to a row's position count. The
            others may hold anything.
        positions: (samples, rows), rising in a sample.
    """
    grouped = q.reshape(*q.shape[:2], shape.shared, shape.group, -1)
    scores = torch.einsum("brsgd,bksd->brsgk", grouped, keys).float() * shape.scale
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    key = torch.arange(keys.shape[1], device=q.device)
    hidden = key > positions.unsqueeze(2)
    if shape.window is not None:
        hidden |= key <= positions.unsqueeze(2) - shape.window
    scores.masked_fill_(hidden[:, :, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1).to(q.dtype)
    unseen = hidden.all(1)[..., None, None]
    values = values.masked_fill(unseen, 0.0)  # no weight would hide what is not finite
    return torch.einsum("brsgk,bksd->brsgd", weights, values).flatten(2)


def attend_by_triton(out: Tensor, qkv: Tensor, pool: Tensor, rows: PagedRows, shape: PageShape) -> None:
    """Fill the rows of ``out`` by Triton; arguments as for :func:`attend_by_products`."""
    key = (shape, qkv.dtype, qkv.stride(0), out.stride(0), pool.shape[1])
    if key not in rows.attends:
        rows.attends[key] = _launches(out, qkv, pool.shape[1], rows, shape)
    attends, joins = rows.attends[key]
    for attend in attends:
        attend(qkv, pool, out)
    for join in joins:
        join(out)


def _launches(out: Tensor, qkv: Tensor, page: int, rows: PagedRows, shape: PageShape) -> _Launches:
    """The launches of layers of the same sizes, which follow each other and so share the chunks' sums."""
    chunks = rows.chunks(shape)
    most = _tile_rows(qkv.dtype, shape)
    prompts = rows.prompts(most // shape.group)
    strides = qkv.stride(0), out.stride(0), page
    attends: list[Launch] = []
    joins: list[Launch] = []
    if len(prompts):
        attends, _ = _attend(out, strides, rows.tables, prompts, shape, most, chunks=1)
    if chunks:
        most = max(_FEWEST_ROWS, power_of_two(shape.group))
        single, joins = _attend(
            out, strides, rows.tables, rows.single, shape, most, chunks=chunks, chunk=CHUNK
        )
        attends += single
    return attends, joins


def _tile_rows(dtype: torch.dtype, shape: PageShape) -> int:
    """Rows of a tile of a prompt, each counted once for each query head of a key head."""
    few = dtype == torch.float32
    return max(_FEWEST_ROWS if few else _PROMPT_ROWS, power_of_two(shape.group))


def _attend(
    out: Tensor,
    strides: tuple[int, int, int],
    tables: Tensor,
    tiles: Tensor,
    shape: PageShape,
    most: int,
    *,
    chunks: int,
    chunk: int = _EVERY,
) -> _Launches:
    """Attention of tiles, and of several chunks what joins their sums and marks.

    Args:
        out: as all calls give it.
        strides: of the rows of qkv and of out, and of the pool's pages.
    """
    split, capped = chunks > 1, shape.softcap is not None
    sums = marks = tables  # which are not written
    if split:
        places = len(tiles) * shape.shared * shape.group * chunks
        sums, marks = (room(out, (places, size), torch.float32) for size in (shape.size, 2))
    scale = shape.scale / shape.softcap if shape.softcap else shape.scale * _LOG2E
    attend = Launch(
        _triton().attend,
        (len(tiles), shape.shared, chunks),
        *(GIVEN, GIVEN, tables, tiles, GIVEN, sums, marks, *strides[:2], tables.shape[1]),
        *(shape.tokens, strides[2], shape.shared * shape.size, scale, (shape.softcap or 0.0) * _LOG2E),
        *(shape.window or _EVERY, chunk, chunks),
        **{"GROUP": shape.group, "SIZE": shape.size, "CAPPED": capped, "SPLIT": split, "BM": most},
        **_blocks(out.dtype, shape.size),
    )
    if not split:
        return [attend], []
    join = Launch(
        _triton().join,
        (len(tiles), shape.shared * shape.group),
        *(GIVEN, sums, marks, tiles, strides[1], shape.window or _EVERY, CHUNK, chunks),
        **{"SIZE": shape.size, "BD": power_of_two(shape.size), "num_warps": 1},
    )
    return [attend], [join]


def _blocks(dtype: torch.dtype, size: int) -> dict[str, Any]:
    """Constants of the kernel by what is the same for all requests."""
    width = max(16, power_of_two(size))
    exact = dtype == torch.float32  # whose products take registers, as no tensor core has them
    keys = 32 if exact or width > 128 else 64
    warps = 8 if width > (64 if exact else 128) else 4
    return {"BN": keys, "BD": width, "PRECISION": "ieee", "num_warps": warps, "num_stages": 2}


@cache
def _triton() -> Any:
    from plait_kernels import triton_paged

    return triton_paged
