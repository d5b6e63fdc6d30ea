"""A frozen linear layer with adapters whose vectors lie in a pool of pages, for generation.

A vector is one rank's row of A or column of B at one site. Each adapter has a table of where its vectors
begin, so adapters of any rank share a batch, without padding and without a copy of what a layer needs.
Single rows go through one kernel, Triton with that backend and else, on a CPU, compiled C. Prompts go through
compiled C if they are short, else through torch's products, which are also the reference.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from plait_kernels import reference
from plait_kernels.bank import Site
from plait_kernels.compiled import load_library
from plait_kernels.errors import KernelError
from plait_kernels.launching import GIVEN, Launch
from plait_kernels.layer import layer_call
from plait_kernels.quantised import Weight, dense
from plait_kernels.routing import Routing
from plait_kernels.triton_backend import TRITON
from plait_kernels.uploads import distance, table, together

_BLOCK_RANKS, _BLOCK_FEATURES = 16, 256  # of a Triton program
PLACED = {torch.float32: "f32", torch.bfloat16: "bf16"}  # dtypes of compiled code, as it names them
_TILE_ROWS = 8  # MOST_ROWS of pooled.c
# Rows of one adapter for which gathering its vectors pays, so that torch multiplies on a CPU.
_LONG_ROWS = 128


@dataclass(frozen=True)
class PooledAdapter:
    """An adapter in the pool.

    Args:
        scale: alpha / rank, or alpha / sqrt(rank) for rsLoRA.
        sites: names of the sites that it targets.
        offsets: (sites of the pool, 2, rank) int64: where each vector of A and of B begins in its layer's
            storage; negative at sites that it does not target.
    """

    rank: int
    scale: float
    sites: frozenset[str]
    offsets: Tensor

    @functools.cached_property
    def by_site(self) -> Sequence[Tensor]:
        """The offsets of A at the first site, of B there, of A at the second, and so on."""
        return self.offsets.flatten(0, 1).unbind()

    @functools.cached_property
    def joined(self) -> dict[tuple[int, ...], Tensor]:
        """Offsets of A at several sites, one after the other; made once for each layer."""
        return {}

    def inputs(self, numbers: tuple[int, ...]) -> Tensor:
        """The offsets of A at these sites."""
        if numbers not in self.joined:
            self.joined[numbers] = torch.cat([self.by_site[2 * number] for number in numbers])
        return self.joined[numbers]


@dataclass(frozen=True)
class AdapterPool:
    """The sites of a model and, for each, the storage of its layer's pages: a flat tensor.

    Args:
        align: divides where vectors begin and their sizes; a power of two, with which several elements are
            loaded at once.
    """

    sites: tuple[Site, ...]
    storage: tuple[Tensor, ...]
    align: int = 1
    tables: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    windows: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def vectors(self, number: int, offsets: Tensor, size: int) -> Tensor:
        """(offsets, size): a copy of the vectors that begin at these offsets of a site's storage."""
        storage = self.storage[number]
        key = storage.data_ptr(), size
        if key not in self.windows:
            self.windows[key] = storage.as_strided((len(storage) - size + 1, size), (1, 1))
        return self.windows[key].index_select(0, offsets)

    @functools.cached_property
    def ends(self) -> Tensor:
        """(2 · sites, 2) int64: of A at the first site, of B there, and so on, where the site's storage
        begins in memory, and in or out."""
        placed = zip(self.storage, self.sites, strict=True)
        ends = [
            (storage.data_ptr(), size)
            for storage, site in placed
            for size in (site.in_features, site.out_features)
        ]
        return torch.tensor(ends, dtype=torch.int64)

    @functools.cached_property
    def origin(self) -> Tensor:
        """A tensor from whose address adapters' tables are counted; it stays where it is."""
        return torch.zeros(1, dtype=torch.int64, device=self.storage[0].device)

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """The number of each site."""
        return {site.name: number for number, site in enumerate(self.sites)}

    def columns(self, names: tuple[str, ...]) -> Tensor:
        """(sites of a layer, 3) int64: number, first column, columns. Made once for each layer."""
        if names not in self.tables:
            rows, start = [], 0
            for name in names:
                site = self.sites[self.index[name]]
                rows.append((self.index[name], start, site.out_features))
                start += site.out_features
            self.tables[names] = table(rows, self.storage[0].device)
        return self.tables[names]


@dataclass(frozen=True)
class PooledRows:
    """Which rows of one iteration belong to which adapter.

    Args:
        single: rows that have an adapter, each with it.
        spans: rows [start, stop) of one adapter.
        others: rows of adapters that are not in the pool; their bank has them.
    """

    pool: AdapterPool
    single: tuple[tuple[int, PooledAdapter], ...]
    spans: tuple[tuple[int, int, PooledAdapter], ...]
    others: Routing | None = None

    @functools.cached_property
    def targeted(self) -> frozenset[str]:
        """The sites that any of these adapters has."""
        every = {each.sites for _, each in self.single} | {each.sites for _, _, each in self.spans}
        return frozenset().union(*every)

    @functools.cached_property
    def launched(self) -> _Launched:
        """The single rows as Triton's kernels read them; made once for all layers."""
        origin = self.pool.origin
        own = [(row, distance(each.offsets, origin), each.rank) for row, each in self.single]
        factors = torch.tensor([each.scale for _, each in self.single], dtype=torch.float32)
        rows, scales = together([torch.tensor(own), factors], origin.device)
        return _Launched(rows, scales, origin, max(each.rank for _, each in self.single))

    @functools.cached_property
    def tiles(self) -> _Launched:
        """Single rows and short spans as the compiled kernel reads them, up to eight rows of one adapter
        together; rows (n, 4): first row, rows, distance of the table, rank."""
        origin = torch.zeros(1, dtype=torch.int64)
        short = [each for each in self.spans if not _long(each)]
        spans = [*((row, row + 1, each) for row, each in self.single), *short]
        cut = [
            (row, min(_TILE_ROWS, stop - row), each)
            for first, stop, each in spans
            for row in range(first, stop, _TILE_ROWS)
        ]
        tiles = [(row, rows, distance(each.offsets, origin), each.rank) for row, rows, each in cut]
        scales = torch.tensor([each.scale for _, _, each in cut], dtype=torch.float32)
        return _Launched(torch.tensor(tiles), scales, origin, 0)

    @functools.cached_property
    def long(self) -> list[tuple[int, int, PooledAdapter]]:
        """The spans that are not short."""
        return [each for each in self.spans if _long(each)]


def _long(span: tuple[int, int, PooledAdapter]) -> bool:
    first, stop, _ = span
    return stop - first >= _LONG_ROWS


@dataclass(frozen=True)
class _Launched:
    """Rows (n, 3) int64: row, distance of its table from `origin`, rank. Or tiles (n, 4), which have a number
    of rows, too. Scales (n,); the largest rank of single rows, 0 for tiles; Triton's launches by the sizes of
    layers."""

    rows: Tensor
    scales: Tensor
    origin: Tensor
    most: int
    launches: dict[object, tuple[Launch, Launch]] = field(default_factory=dict)


def pooled_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    names: Sequence[str],
    rows: PooledRows,
    *,
    backend: str = "",
) -> Tensor:
    """x Wᵀ + b, plus each row's own adapter: h = x Wᵀ + b + s x Aᵀ Bᵀ. Without gradients.

    Args:
        x: (tokens, in).
        weight: (sum of out, in): the sites' rows one after the other.
        names: the sites, all of one layer, side by side.
        backend: the backend of the model's kernels.

    Raises:
        KernelError: a site is not in the pool.
    """
    named = tuple(names)
    unknown = [name for name in named if name not in rows.pool.index]
    if unknown:
        raise KernelError(f"sites {unknown}", "a layer's sites are in its pool")
    whole = dense(weight)
    out = linear(x, whole, bias)
    if not rows.targeted.isdisjoint(named):
        _add_pooled(out, x, named, rows, backend)
    if rows.others is not None:
        call = layer_call(rows.others.bank, rows.others, named, len(whole))
        reference.add_forward(out, x, whole, bias, call, (*call.owners, *call.others))
    return out


def _add_pooled(out: Tensor, x: Tensor, names: tuple[str, ...], rows: PooledRows, backend: str) -> None:
    """Add the adapters of the pool in the way that is the fastest here."""
    if backend == TRITON.name and TRITON.runs(x.device, x.dtype):
        if rows.single:
            add_by_triton(out, x, rows.pool.storage[rows.pool.index[names[0]]], names, rows)
        add_by_products(out, x, names, rows.pool, rows.spans)
    elif _by_compiled(out, x, names, rows):
        add_by_products(out, x, names, rows.pool, rows.long)
    else:
        single = [(row, row + 1, each) for row, each in rows.single]
        add_by_products(out, x, names, rows.pool, (*single, *rows.spans))


def add_by_products(
    out: Tensor,
    x: Tensor,
    names: Sequence[str],
    pool: AdapterPool,
    spans: Sequence[tuple[int, int, PooledAdapter]],
) -> None:
    """Add the spans' adapters to `out` by torch's products: the reference of the kernel."""
    if not spans:
        return
    every = [pool.index[name] for name in names]
    ends = itertools.accumulate(pool.sites[number].out_features for number in every)
    placed = list(zip(names, every, ends, strict=True))
    for first, stop, adapter in spans:
        own = [(number, end) for name, number, end in placed if name in adapter.sites]
        if not own:
            continue
        numbers = tuple(number for number, _ in own)
        a = pool.vectors(numbers[0], adapter.inputs(numbers), x.shape[1])
        parts = (x[first:stop] @ a.T).chunk(len(own), dim=1)
        for (number, end), s in zip(own, parts, strict=True):
            size = pool.sites[number].out_features
            b = pool.vectors(number, adapter.by_site[2 * number + 1], size)
            out[first:stop, end - size : end].addmm_(s, b, alpha=adapter.scale)


def place_vectors(pool: AdapterPool, adapter: PooledAdapter, weights: Mapping[str, Sequence[Tensor]]) -> None:
    """Write an adapter's A (rank, in) and B (out, rank) to where its table says, by compiled code on a CPU.

    Args:
        weights: by site, contiguous and all of one dtype of ``PLACED``; they are rounded to the storage's.
    """
    dtype = next((a.dtype for a, _ in weights.values()), torch.float32)
    tensors = []
    for name, (a, b) in weights.items():
        number, site = pool.index[name], pool.sites[pool.index[name]]
        alike = dtype == a.dtype == b.dtype and a.is_contiguous() and b.is_contiguous()
        shapes = (adapter.rank, site.in_features), (site.out_features, adapter.rank)
        if not alike or (a.shape, b.shape) != shapes:
            raise KernelError(
                f"weights of {name}",
                f"A is {shapes[0]}, B {shapes[1]}; both are contiguous, of one dtype",
            )
        tensors += [(2 * number, a.data_ptr()), (2 * number + 1, b.data_ptr())]
    every = Placing(pool, adapter, torch.tensor(tensors, dtype=torch.int64).view(-1, 2), dtype)
    every.place(slice(0, len(tensors)))


class Placing:
    """:func:`place_vectors` of tensors by their addresses, which are read as they are, some at a time.

    Args:
        tensors: (tensors, 2) int64: twice the number of its site, plus 1 for B; where A (rank, in) or
            B (out, rank) begins in memory, contiguous, or in anything whose distance from memory is known
            later.
    """

    def __init__(
        self, pool: AdapterPool, adapter: PooledAdapter, tensors: Tensor, dtype: torch.dtype
    ) -> None:
        library, storage = pooled_library(), pool.storage[0]
        if library is None or not places(storage) or dtype not in PLACED:
            raise KernelError("place_vectors", "it needs compiled code, a CPU, and float32 or bfloat16")
        self._rows = torch.cat((tensors, pool.ends.index_select(0, tensors[:, 0])), dim=1)
        self._first, self._size = self._rows.data_ptr(), self._rows.stride(0) * self._rows.element_size()
        self._adapter = adapter
        self._function = getattr(library, f"place_{PLACED[dtype]}_{PLACED[storage.dtype]}")

    def place(self, some: slice, shift: int = 0) -> None:
        """Write some of the tensors; ``shift`` is added to where they begin."""
        count, offsets = some.stop - some.start, self._adapter.offsets
        first = self._first + some.start * self._size
        self._function(first, count, shift, offsets.data_ptr(), self._adapter.rank)


def places(storage: Tensor) -> bool:
    """Whether :func:`place_vectors` runs for such a storage here."""
    return storage.device.type == "cpu" and storage.dtype in PLACED and pooled_library() is not None


def _by_compiled(out: Tensor, x: Tensor, names: tuple[str, ...], rows: PooledRows) -> bool:
    """Add the adapters of single rows and short spans by compiled code; whether it runs here."""
    known = x.device.type == "cpu" and x.stride(1) == 1 and x.dtype in PLACED
    library = pooled_library() if known else None
    if library is None:
        return False
    if not len(rows.tiles.rows):
        return True
    function = library.rows_f32 if x.dtype == torch.float32 else library.rows_bf16
    storage = rows.pool.storage[rows.pool.index[names[0]]]
    made, sites = rows.tiles, rows.pool.columns(names)
    failed = function(
        *(out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0), x.shape[1], storage.data_ptr()),
        *(made.origin.data_ptr(), made.rows.data_ptr(), made.scales.data_ptr(), len(made.rows)),
        *(sites.data_ptr(), len(sites), torch.get_num_threads()),
    )
    if failed:
        raise MemoryError("no memory for the rows of adapters")
    return True


def add_by_triton(out: Tensor, x: Tensor, storage: Tensor, names: tuple[str, ...], rows: PooledRows) -> None:
    """Add the single rows' adapters by Triton: first s = scale · A x, then B s."""
    made, sites = rows.launched, rows.pool.columns(names)
    widest = max(rows.pool.sites[rows.pool.index[name]].out_features for name in names)
    key = (len(sites), widest, x.shape[1], x.stride(0), out.stride(0), x.dtype)
    if key not in made.launches:
        made.launches[key] = _launches(made, len(sites), widest, x, out.stride(0), rows.pool.align)
    down, up = made.launches[key]
    down(x, storage, sites)
    up(out, storage, sites)


def _launches(
    made: _Launched, sites: int, widest: int, x: Tensor, out_stride: int, align: int
) -> tuple[Launch, Launch]:
    """The launches of layers of the same sizes, which follow each other and so share s."""
    kernels, most = _triton(), made.most
    s = torch.empty(len(made.rows), sites, most, dtype=torch.float32, device=x.device)
    blocks = {"ALIGN": align, "BK": _BLOCK_RANKS, "BF": _BLOCK_FEATURES}
    down = Launch(
        kernels.down,
        (len(made.rows), sites),
        *(GIVEN, GIVEN, made.origin, made.rows, made.scales, GIVEN, s, x.stride(0), x.shape[1], most),
        **blocks,
    )
    up = Launch(
        kernels.up,
        (len(made.rows), sites, -(-widest // _BLOCK_FEATURES)),
        *(GIVEN, GIVEN, made.origin, made.rows, GIVEN, s, out_stride, most),
        **blocks,
    )
    return down, up


def _triton() -> Any:
    from plait_kernels import triton_pooled

    return triton_pooled


@functools.cache
def pooled_library() -> ctypes.CDLL | None:
    """The functions of pooled.c; None if they cannot be built."""
    source = Path(__file__).with_suffix(".c")
    library = load_library(source, "adapters' rows run in plain torch, several times slower")
    if library is None:
        return None
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    for function in (library.rows_f32, library.rows_bf16):
        function.argtypes = [
            *(pointer, long, pointer, long, long, pointer),
            *(pointer, pointer, pointer, long, pointer, long, ctypes.c_int),
        ]
        function.restype = ctypes.c_int
    for given, stored in itertools.product(PLACED.values(), repeat=2):
        function = getattr(library, f"place_{given}_{stored}")
        function.argtypes = [pointer, long, long, pointer, long]
        function.restype = None
    return library
