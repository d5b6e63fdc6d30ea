"""Adapters as cells of the pool's pages: one rank of one layer. What a call reads lies together: of sites
with one input, for each rank, first their rows of A, then their columns of B.

A page holds as many whole cells as fit. A cell that is larger than a page is cut into pieces, between two
sites' vectors, and each piece is laid out like a cell. On a CPU pages that follow each other are laid out
like one large page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from plait.core.errors import InputError, PlaitError, StorageError
from plait.serve.scheduler import page_runs
from plait_kernels import Bank, Site
from plait_kernels.bank import WEIGHTS
from plait_kernels.pooled import (
    PLACED,
    AdapterPool,
    Placing,
    PooledAdapter,
    place_vectors,
    places,
)
from plait_kernels.uploads import table, upload

LEAST_PAGE, MOST_PAGE = 16, 64  # tokens of a page
MOST_KINDS = 256  # of adapters, by rank and sites, whose placements are kept
Weights = Mapping[str, tuple[Tensor, ...]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Vector = tuple[int, int, int]  # a site's number, a side (0: A, 1: B), and its features
AdapterKey = tuple[str, int]  # its name, and a number that changes with its weights


@dataclass(frozen=True, slots=True)
class Parts:
    """Weights that are read part by part, each in the memory of the one before.

    Attributes:
        tensors: as ``Placing`` takes them, but by their first bytes in the file.
        read: reads them: which ones, and the difference of their addresses from those bytes.
    """

    tensors: Tensor
    dtype: torch.dtype
    read: Iterator[tuple[slice, int]]


class Adapter(Protocol):
    """An adapter that requests may name."""

    @property
    def key(self) -> AdapterKey:
        """Names these very weights; it changes when they do."""

    @property
    def pooled(self) -> bool:
        """Whether it is plain LoRA, whose weights go into the pool."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def scale(self) -> float:
        """The factor of its part."""

    @property
    def sites(self) -> frozenset[str]:
        """The linear layers that it targets."""

    def weights(self) -> Weights:
        """A (rank, in) and B (out, rank) by site.

        Raises:
            StorageError: they cannot be read.
        """

    def expect(self) -> None:
        """Prepare for being read soon."""

    def parts(self) -> Parts | None:
        """The weights part by part; None: only :meth:`weights` has them."""


class AdapterSource(Protocol):
    """Where adapters come from."""

    @property
    def bank(self) -> Bank | None:
        """The bank that computes adapters which are not pooled."""

    def find(self, name: str) -> Adapter:
        """The adapter with this name; InputError if there is none."""

    def knows(self, key: AdapterKey) -> bool:
        """Whether requests may name the adapter with this key now."""

    def lasting(self) -> Sequence[Adapter]:
        """Adapters for which the pool has room beside its tokens."""


@dataclass(frozen=True, slots=True)
class _BankAdapter:
    bank: Bank
    name: str

    @property
    def key(self) -> AdapterKey:
        return self.name, self.bank.blocks[self.name].generation

    @property
    def pooled(self) -> bool:
        return self.bank.blocks[self.name].variant.fused

    @property
    def rank(self) -> int:
        return self.bank.blocks[self.name].rank

    @property
    def scale(self) -> float:
        return self.bank.blocks[self.name].scale

    @property
    def sites(self) -> frozenset[str]:
        return frozenset(self.bank.blocks[self.name].layout.specs)

    def weights(self) -> Weights:
        block = self.bank.blocks[self.name]
        sites = self.bank.sites
        return {name: block.at(sites[self.bank.site_index[name]], WEIGHTS) for name in block.layout.specs}

    def expect(self) -> None:
        """It is in memory."""

    def parts(self) -> None:
        """It is in memory as a whole."""


@dataclass(frozen=True, slots=True)
class BankAdapters:
    """The adapters of a bank, as they are while they train."""

    bank: Bank

    def find(self, name: str) -> Adapter:
        """The adapter with this name."""
        if name not in self.bank.blocks:
            raise InputError(f"adapter {name!r}", "A request's adapter must be loaded.")
        return _BankAdapter(self.bank, name)

    def knows(self, key: AdapterKey) -> bool:
        """Whether it is one of them as it is now."""
        name, generation = key
        return name in self.bank.blocks and self.bank.blocks[name].generation == generation

    def lasting(self) -> Sequence[Adapter]:
        """All that are pooled."""
        every = (_BankAdapter(self.bank, name) for name in self.bank.blocks)
        return [each for each in every if each.pooled]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of each of a layer's cells.

    Attributes:
        parts: what calls read of it, each vectors end to end.
        per_page: how many of them a page holds.
        first, pages: its pages among the adapter's.
    """

    parts: tuple[tuple[Vector, ...], ...]
    per_page: int
    first: int
    pages: int

    @property
    def sizes(self) -> list[int]:
        """Elements of each part."""
        return [sum(size for _, _, size in part) for part in self.parts]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where adapters of one rank and the same sites lie in their pages.

    Attributes:
        layers: the pieces of each layer.
        pages: pages that an adapter has.
        stretches: first, pages and per_page of pieces, each once.
        kinds: (kinds, 4) int64, of vectors, each once, as layers are mostly alike: the number of its stretch,
            elements of its piece's parts before its own, of this part, and of the vectors before it there.
        kind: (sites, 2) int64, that of each site's A and B; -1 where there is none.
    """

    rank: int
    layers: tuple[tuple[Piece, ...], ...]
    pages: int
    stretches: tuple[tuple[int, int, int], ...]
    kinds: Integers
    kind: Integers

    def offsets(self, pages: Sequence[int], elements: int, *, joined: bool) -> Integers:
        """(sites, 2, rank) int64: where each vector begins in its layer's pages; -1 where there is none.

        Args:
            pages: the adapter's.
            elements: of a page in one layer.
            joined: whether pages that follow each other are laid out like one.
        """
        found = []
        for first, count, per_page in self.stretches:
            own = [range(page, page + 1) for page in pages[first : first + count]]
            runs = page_runs(own) if joined else own
            cells = np.array([len(run) * per_page for run in runs])
            earlier = np.cumsum(cells) - cells
            begins = np.array([run.start for run in runs]) * elements
            rows = np.stack((begins, cells, earlier)).repeat(cells, axis=1)[:, : self.rank]
            rows[2] = np.arange(self.rank) - rows[2]
            found.append(rows)
        begins, cells, number = np.stack(found, axis=1)[:, self.kinds[:, 0]]
        before, size, inside = self.kinds.T[1:, :, None]
        offsets = begins + cells * before + number * size + inside
        return np.concatenate((offsets, np.full((1, self.rank), -1))).take(self.kind, axis=0)


@dataclass(slots=True)
class CellLayout:
    """Where cells lie in pages of a model.

    Attributes:
        layers: the sites of each layer.
        elements: of a page in one layer.
        inputs: a number for each site, the same for neighbours that read the same input.
    """

    layers: Sequence[Sequence[Site]]
    elements: int
    inputs: Mapping[str, int]
    _placements: Callable[[int, frozenset[str]], Placement] = field(init=False)

    def __post_init__(self) -> None:
        self._placements = lru_cache(MOST_KINDS)(self._placed)

    @property
    def align(self) -> int:
        """What divides where vectors begin and their sizes, a power of two up to 16."""
        sizes = (
            size for own in self.layers for each in own for size in (each.in_features, each.out_features)
        )
        return math.gcd(16, self.elements, *sizes)

    def placement(self, adapter: Adapter) -> Placement:
        """The placement of an adapter.

        Raises:
            InputError: a vector of it is larger than a page.
        """
        return self._placements(adapter.rank, adapter.sites)

    def _placed(self, rank: int, sites: frozenset[str]) -> Placement:
        kind = np.full((sum(map(len, self.layers)), 2), -1)
        stretches, kinds = dict[tuple[int, int, int], int](), dict[tuple[int, int, int, int], int]()
        layers, number = [], 0
        for own in self.layers:
            numbered = [(number + index, site) for index, site in enumerate(own) if site.name in sites]
            number += len(own)
            pieces = self._pieces(numbered, rank)
            for piece in pieces:
                key = piece.first, piece.pages, piece.per_page
                stretch = stretches.setdefault(key, len(stretches))
                before = 0
                for part, size in zip(piece.parts, piece.sizes, strict=True):
                    inside = 0
                    for site, side, features in part:
                        kind[site, side] = kinds.setdefault((stretch, before, size, inside), len(kinds))
                        inside += features
                    before += size
            layers.append(pieces)
        pages = max((sum(piece.pages for piece in pieces) for pieces in layers), default=0)
        return Placement(rank, tuple(layers), pages, tuple(stretches), np.array(list(kinds)), kind)

    def _pieces(self, sites: Sequence[tuple[int, Site]], rank: int) -> tuple[Piece, ...]:
        groups: list[list[list[Vector]]] = []  # the parts of each piece
        room = 0
        for _, together in groupby(sites, lambda each: self.inputs[each[1].name]):
            own = list(together)
            vectors = [(number, 0, site.in_features) for number, site in own]
            vectors += [(number, 1, site.out_features) for number, site in own]
            if groups:
                groups[-1].append([])
            for vector in vectors:
                if vector[2] > self.elements:
                    raise InputError(
                        f"a layer of {vector[2]} features",
                        f"A page has {self.elements} elements in a layer, and holds whole rows of A and B.",
                    )
                if vector[2] > room:
                    groups.append([[]])
                    room = self.elements
                groups[-1][-1].append(vector)
                room -= vector[2]
        pieces, first = [], 0
        for group in groups:
            parts = tuple(tuple(part) for part in group if part)
            per_page = self.elements // sum(size for part in parts for _, _, size in part)
            pieces.append(Piece(parts, per_page, first, -(-rank // per_page)))
            first += pieces[-1].pages
        return tuple(pieces)

    def pack(self, adapter: Adapter, weights: Weights, like: Tensor) -> list[Tensor]:
        """The pages' contents in ``like``'s dtype: (pages, elements) for each piece of each layer."""
        sites = [site for own in self.layers for site in own]
        packed = []
        for piece in (piece for pieces in self.placement(adapter).layers for piece in pieces):
            vectors = [vector for part in piece.parts for vector in part]
            sides = [(weights[sites[site].name][side], side) for site, side, _ in vectors]
            cells = torch.cat([(each.T if side else each).to(like.dtype) for each, side in sides], dim=1)
            missing = piece.pages * piece.per_page - adapter.rank
            padded = torch.nn.functional.pad(cells, (0, 0, 0, missing)) if missing else cells
            whole = padded.view(piece.pages, piece.per_page, -1)
            parts = torch.split(whole, piece.sizes, dim=2)
            packed.append(torch.cat([part.flatten(1) for part in parts], dim=1))
        return packed


def page_tokens(token_elements: int, cells: Sequence[tuple[int, int]], least: int) -> int:
    """Tokens of a page, such that pages of cells waste least; the fewest among equals.

    Args:
        token_elements: of a token's keys and values in one layer.
        cells: for each adapter that is known, its largest cell in elements, and its rank.
        least: elements that a page must have.
    """

    def waste(tokens: int) -> float:
        elements = tokens * token_elements
        used = total = 0
        for cell, rank in cells:
            fitting = max(1, elements // cell)
            total += max(-(-rank // fitting), -(-rank * cell // elements)) * elements
            used += rank * cell
        return total / used if used else 1.0

    fewest = max(LEAST_PAGE, -(-least // token_elements))
    return min(
        range(fewest, max(fewest, MOST_PAGE) + 1), key=lambda tokens: (round(waste(tokens), 3), tokens)
    )


class CellStore:
    """Brings adapters into their pages.

    On a CPU they are read from their files into the pool, part by part: the system keeps files in its memory,
    and a copy of our own would cost new pages, which take longer than reading. For another device they are
    packed, and kept in host memory up to a limit.

    Args:
        layout: where cells lie.
        pool: each layer's pages, (pages, elements).
        sites: the same pages for each site.
        most_bytes: of what is kept on the host; the least recently needed goes first. 0: nothing is kept.
        known: whether the adapter with a key may be needed again; others are not kept.

    Attributes:
        loads: adapters read so far.
        bytes: of adapters that are kept.
    """

    def __init__(
        self,
        layout: CellLayout,
        pool: Sequence[Tensor],
        sites: AdapterPool,
        *,
        most_bytes: int,
        known: Callable[[AdapterKey], bool],
    ) -> None:
        self.layout = layout
        self._pool = pool
        self._sites = sites
        self._direct = places(pool[0])
        self._most_bytes = most_bytes
        self._known = known
        self._kept: dict[AdapterKey, list[Tensor]] = {}
        self.bytes = 0
        self._coming: dict[AdapterKey, Future[Any]] = {}
        self._reader = ThreadPoolExecutor(1, "adapters") if most_bytes else None
        self.loads = 0

    def expect(self, adapters: Iterable[Adapter]) -> None:
        """Read those of these adapters that are not kept here, on a thread of its own: they are needed soon.

        What was expected and is no longer among them is forgotten, unless it is being read.
        """
        if self._reader is None:
            return
        soon = {each.key: each for each in adapters if each.key not in self._kept}
        for key, coming in list(self._coming.items()):
            if key not in soon and (coming.done() or coming.cancel()):
                del self._coming[key]
        for key, each in soon.items():
            if key not in self._coming:
                read = (each.expect,) if self._direct else (self._loaded, each)
                self._coming[key] = self._reader.submit(*read)

    def _loaded(self, adapter: Adapter) -> list[Tensor]:
        with _own_errors(adapter):
            weights = adapter.weights()
        found = self.layout.pack(adapter, weights, self._pool[0])
        pinned = self._most_bytes and self._pool[0].device.type == "cuda"
        return [each.cpu().pin_memory() for each in found] if pinned else found

    def place(self, adapter: Adapter, pages: Sequence[int]) -> PooledAdapter:
        """Write an adapter into its pages.

        Raises:
            StorageError: its weights cannot be read.
        """
        placement = self.layout.placement(adapter)
        found = placement.offsets(pages, self.layout.elements, joined=self._direct)
        offsets = upload(torch.from_numpy(found), self._pool[0].device)
        placed = PooledAdapter(adapter.rank, adapter.scale, adapter.sites, offsets)
        if self._direct:
            self._place_directly(adapter, placed)
        else:
            self._place_packed(self._found(adapter), placement, pages)
        return placed

    def _place_directly(self, adapter: Adapter, placed: PooledAdapter) -> None:
        self._coming.pop(adapter.key, None)
        self.loads += 1
        with _own_errors(adapter):
            parts = adapter.parts()
            if parts is None:
                place_vectors(self._sites, placed, _placeable(adapter.weights(), self._pool[0].dtype))
                return
            placing = Placing(self._sites, placed, parts.tensors, parts.dtype)
            for some, shift in parts.read:
                placing.place(some, shift)

    def _place_packed(self, packed: Sequence[Tensor], placement: Placement, pages: Sequence[int]) -> None:
        device = self._pool[0].device
        own = table(pages, device)
        left = iter(packed)
        for layer, pieces in zip(self._pool, placement.layers, strict=True):
            for piece in pieces:
                values = next(left).to(device, non_blocking=True)
                layer[own[piece.first : piece.first + piece.pages], : values.shape[1]] = values

    def _found(self, adapter: Adapter) -> list[Tensor]:
        found = self._kept.pop(adapter.key, None)
        if found is None:
            coming = self._coming.pop(adapter.key, None)
            found = self._loaded(adapter) if coming is None else coming.result()
            self.loads += 1
            if not self._most_bytes:
                return found
            for key in [key for key in self._kept if not self._known(key)]:
                self._forget(key)
            self.bytes += _bytes(found)
        self._kept[adapter.key] = found
        while self.bytes > self._most_bytes and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))
        return found

    def _forget(self, key: AdapterKey) -> None:
        self.bytes -= _bytes(self._kept.pop(key))


def _placeable(weights: Weights, dtype: torch.dtype) -> Weights:
    """Weights as ``place_vectors`` takes them: contiguous, and of one dtype, theirs or else this one."""
    dtypes = {side.dtype for own in weights.values() for side in own}
    if len(dtypes) == 1 and dtypes <= PLACED.keys():
        (dtype,) = dtypes
    return {name: tuple(side.to(dtype).contiguous() for side in own) for name, own in weights.items()}


@contextmanager
def _own_errors(adapter: Adapter) -> Iterator[None]:
    """Any error in here is this adapter's own, and no other request's.

    Raises:
        StorageError: instead of it.
    """
    try:
        yield
    except (PlaitError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise StorageError(
            f"adapter {adapter.key}: {type(error).__name__}: {error}", "Its weights must be readable."
        ) from error


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)
