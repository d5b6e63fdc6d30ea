"""Keys and values in the pool's pages, and attention over them.

A seam: with the backend ``triton`` rows go through its kernel, on a CPU those of requests with few through
compiled code; both read the pages where they lie. Others go through torch, which copies keys and values out.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.core.errors import CapacityError
from plait.models.attention import AttentionLayout, AttentionRule, Heads, packed_attention
from plait.models.base import BaseModel
from plait.models.context import AttentionStore, MicrobatchContext
from plait.models.elementwise import PagesShape, attend_pages, compiled, store_pages
from plait_kernels import passes
from plait_kernels.attention import WIDEST_HEAD
from plait_kernels.paged import (
    PagedRows,
    PageShape,
    Span,
    attend_by_triton,
    attend_rows,
    store_by_triton,
    store_rows,
)
from plait_kernels.uploads import upload

FEW = 8  # rows of one request for which compiled code is the faster
FEWER = "Give the pool fewer tokens."
GATHERED = 2**25  # elements of keys and values that are copied out of their pages at once
KEPT_BYTES = 256 << 20  # of freed memory that the C library keeps for the next iterations
_MOST_KEPT = 32 << 20  # bytes of what it keeps, the most that it takes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # as malloc.h has them


def pool_memory(
    layers: int, pages: int, elements: int, base: BaseModel, *, reserve: int | None
) -> list[Tensor]:
    """Each layer's pages, (pages, elements), all zero.

    On a CPU they lie in the system's large pages where it has them: vectors of adapters and tokens are far
    apart, so that with small ones the processor looks for nearly each one's address.

    Args:
        reserve: take the memory now, of so many bytes that are free, and keep what iterations free; None: a
            CPU takes it when it is first used.

    Raises:
        CapacityError: there is not so much memory.
    """
    shape = pages, elements
    if base.device.type != "cpu":
        return [torch.zeros(shape, dtype=base.dtype, device=base.device) for _ in range(layers)]
    size = layers * pages * elements
    memory = _host_memory(size * base.dtype.itemsize, reserve)
    whole = torch.frombuffer(memory, dtype=base.dtype, count=size)
    if reserve is not None:
        whole.zero_()
        _keep_freed()
    return list(whole.view(layers, *shape).unbind())


def _keep_freed() -> None:
    """Have the C library keep the memory that iterations free.

    By itself it returns the end of its heap to the system now and then, by chance of what lies there, and the
    next prompts' layers take the same pages again and again. In the main thread it then keeps ``KEPT_BYTES``,
    in any other, as a server's, the one heap of 64 MiB that a thread cannot give back.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, musl has not
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _MOST_KEPT)
            mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def _host_memory(size: int, free: int | None) -> mmap.mmap:
    """Zeros in the system's large pages, if it has them."""
    pool = f"a pool of {size / 2**30:.2f} GiB for keys, values and adapters"
    if free is not None and size > free:  # the system would end the process without a word
        raise CapacityError(pool, f"{free / 2**30:.2f} GiB of memory are free.", FEWER)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(pool, "The system cannot allocate that much memory.", FEWER) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class TokenSizes:
    """A cache that stores nothing, and notes what it would have to.

    Attributes:
        elements: most of one token's keys and values in a layer.
        head: most features of a head.
    """

    def __init__(self) -> None:
        self.elements = self.head = 1

    @classmethod
    @torch.no_grad()
    def of(cls, base: BaseModel) -> TokenSizes:
        """The sizes of a model's tokens, found by running one."""
        sizes = cls()
        zero = torch.zeros(1, dtype=torch.int64, device=base.device)
        base.hidden(MicrobatchContext(zero, zero, (0, 1), cache=sizes))
        return sizes

    def attend(
        self, _layer: int, qkv: Tensor, heads: Heads, _rule: AttentionRule, _context: MicrobatchContext
    ) -> Tensor:
        """See ``AttentionStore``; the result is not looked at."""
        size = qkv.shape[-1] // heads.total
        self.elements, self.head = max(self.elements, 2 * heads.shared * size), max(self.head, size)
        return qkv.new_zeros(len(qkv), heads.query * size)


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests with equally many rows and earlier tokens.

    Attributes:
        rows, positions: (requests, rows).
        pages, inside: (requests, longest), where their keys are.
    """

    rows: Tensor
    positions: Tensor
    pages: Tensor
    inside: Tensor


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of an iteration.

    Attributes:
        counts, firsts: (requests,), their numbers of rows, and the first one of each.
        owner, positions: (rows,), the request of each, and its place in it.
    """

    counts: Tensor
    firsts: Tensor
    owner: Tensor
    positions: Tensor

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int]) -> _Rows:
        counts = torch.tensor(lengths)
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
        firsts = counts.cumsum(0) - counts
        positions = torch.arange(len(owner)) - (firsts - torch.tensor(starts))[owner]
        return cls(counts, firsts, owner, positions)


class PagedCache:
    """Keys and values of every layer in pages of the pool.

    :meth:`placed` says where the rows of an iteration belong: first rows that have earlier tokens, then whole
    prompts.

    Args:
        pool: each layer's pages, (pages, elements).
        backend: the backend of the model's kernels.
        head: most features of a head; with wider ones than Triton's kernel takes, torch attends.

    Attributes:
        by_triton: whether Triton's kernels store and attend.
    """

    def __init__(self, pool: Sequence[Tensor], page_tokens: int, backend: str = "", *, head: int = 1) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._device = pool[0].device
        self.by_triton = head <= WIDEST_HEAD and passes.by_triton(backend, pool[0])
        self._few = 0 if compiled("attend", pool[0]) is None else FEW

    def placed(
        self,
        tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        lengths: Sequence[int],
        begun: int,
        answered: Sequence[bool],
    ) -> AttentionStore:
        """What stores and attends to the rows of an iteration.

        Args:
            tables: the pages of each request.
            starts, lengths: its earlier tokens and its rows.
            begun: so many requests, the first ones, have earlier tokens, the others none.
            answered: whether its rows are new tokens; else they are a prompt's.
        """
        rows = _Rows.of(starts, lengths)
        numbers, inside = rows.positions // self._page_tokens, rows.positions % self._page_tokens
        both = zip(rows.owner.tolist(), numbers.tolist(), strict=True)
        pages = torch.tensor([tables[request][number] for request, number in both])
        places = upload(torch.stack((pages, inside), dim=1), self._device)
        if self.by_triton:
            given = zip(rows.firsts.tolist(), lengths, starts, answered, strict=True)
            spans = [Span(row, count, start, prompt=not done) for row, count, start, done in given]
            paged = PagedRows(tables, spans, self._device)
            return _ByTriton(self._pool, self._page_tokens, places, paged)
        return self._by_torch(tables, rows, begun, places)

    def _by_torch(
        self, tables: Sequence[Sequence[int]], rows: _Rows, begun: int, places: Tensor
    ) -> AttentionStore:
        """The same without Triton."""
        longest = max(map(len, tables))
        padded = torch.tensor([[*table, *[0] * (longest - len(table))] for table in tables])
        counts, positions, owner = rows.counts, rows.positions, rows.owner
        few = ((counts <= self._few) & (torch.arange(len(tables)) < begun))[owner].nonzero()[:, 0]
        groups = []
        earlier, prompts = counts[:begun].tolist(), counts[begun:].tolist()
        for count in sorted({count for count in earlier if count > self._few}):
            own = (counts[:begun] == count).nonzero()[:, 0]
            groups.append(self._group(padded[own], rows.firsts[own], count, positions))
        return _ByTorch(
            self._pool,
            self._page_tokens,
            places,
            padded,
            torch.stack((few, owner[few], positions[few]), dim=1),
            tuple(groups),
            sum(earlier),
            AttentionLayout.of(prompts, self._device) if prompts else None,
        )

    def _group(self, tables: Tensor, firsts: Tensor, rows: int, positions: Tensor) -> _Group:
        """Requests with equally many rows, of which each begins at one of ``firsts``."""
        own = firsts[:, None] + torch.arange(rows)
        keys = torch.arange(int(positions[own].max()) + 1)
        pages = tables[:, keys // self._page_tokens]
        inside = (keys % self._page_tokens).expand_as(pages)
        return _Group(*(upload(each, self._device) for each in (own, positions[own], pages, inside)))


@dataclass(frozen=True, slots=True)
class _Placed(ABC):
    """The rows of an iteration, and where their keys and values go.

    Attributes:
        pool: each layer's pages.
        places: (rows, 2) int64, the page of each row, and the token in it.
    """

    pool: Sequence[Tensor]
    page_tokens: int
    places: Tensor

    def attend(
        self, layer: int, qkv: Tensor, heads: Heads, rule: AttentionRule, context: MicrobatchContext
    ) -> Tensor:
        """Store the new keys and values, and attend over all of them; see ``AttentionStore``."""
        del context  # as placed
        size = qkv.shape[1] // heads.total
        out = torch.empty(len(qkv), heads.query * size, dtype=qkv.dtype, device=qkv.device)
        shape = PageShape(
            self.page_tokens, heads.shared, heads.group, size, rule.scale, rule.softcap, rule.window
        )
        self.fill(out, qkv, self.pool[layer], heads, rule, shape)
        return out

    @abstractmethod
    def fill(
        self, out: Tensor, qkv: Tensor, pool: Tensor, heads: Heads, rule: AttentionRule, shape: PageShape
    ) -> None:
        """Fill ``out``, once the new keys and values are stored."""


@dataclass(frozen=True, slots=True)
class _ByTriton(_Placed):
    rows: PagedRows

    def fill(
        self, out: Tensor, qkv: Tensor, pool: Tensor, heads: Heads, rule: AttentionRule, shape: PageShape
    ) -> None:
        """See above."""
        del heads, rule  # in the shape
        store_by_triton(qkv, pool, self.places, self.rows, shape)
        attend_by_triton(out, qkv, pool, self.rows, shape)


@dataclass(frozen=True, slots=True)
class _ByTorch(_Placed):
    """The same without Triton.

    Attributes:
        tables: (requests, longest) int64, the pages of each.
        direct: (n, 3) int64, rows that compiled code takes: row, request, position.
        begun: rows of requests with earlier tokens.
        layout: of the prompts behind them.
    """

    tables: Tensor
    direct: Tensor
    groups: tuple[_Group, ...]
    begun: int
    layout: AttentionLayout | None

    def fill(
        self, out: Tensor, qkv: Tensor, pool: Tensor, heads: Heads, rule: AttentionRule, shape: PageShape
    ) -> None:
        """See above."""
        sizes = self._sizes(pool, shape)
        if not store_pages(qkv, pool, self.places, heads.query, sizes):
            store_rows(qkv, pool, self.places, shape)
        page = self.page_tokens, 2, heads.shared, shape.size
        stored = pool[:, : math.prod(page)].view(-1, *page)
        x = qkv.view(len(qkv), heads.total, -1)
        if len(self.direct):
            attend_pages(out, qkv, pool, self.tables, self.direct, sizes)
        for group in self.groups:
            most = max(1, GATHERED // (group.pages.shape[1] * math.prod(page[1:])))
            for first in range(0, len(group.rows), most):
                some = slice(first, first + most)
                rows = group.rows[some]
                keys, values = stored[group.pages[some], group.inside[some]].unbind(2)
                out[rows] = attend_rows(x[rows, : heads.query], keys, values, group.positions[some], shape)
        if self.layout is not None:
            out[self.begun :] = packed_attention(qkv[self.begun :], heads, self.layout, rule)

    def _sizes(self, pool: Tensor, shape: PageShape) -> PagesShape:
        longest = shape.window or self.page_tokens * self.tables.shape[1]
        sizes = shape.tokens, pool.shape[1], shape.shared, shape.group, shape.size
        return PagesShape(*sizes, longest, shape.scale, shape.softcap or 0.0)
