"""The bank: A and B of every adapter, their gradients and moments, packed, with offsets.

Each adapter owns one block: a float32 buffer of four rows (weights, gradient, first and second moment)
and, where the compute dtype is not float32, a compute-dtype copy of the weights. Inside a block all A come
first and then all B, in the bank's site order, so that an optimiser step is one pass over two contiguous
ranges and the A of neighbouring sites (q, k, v) form one matrix. Attaching or detaching an adapter touches
no other adapter's block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait_kernels.errors import KernelError

_ALIGNMENT = 16  # elements: 32 bytes in bfloat16, 64 in float32
ABSENT = -(2**62)
WEIGHTS, GRADIENTS, FIRST_MOMENT, SECOND_MOMENT = range(4)

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Site:
    """One linear layer where adapters may sit.

    Args:
        name: the layer's name, unique in the bank.
        module: the layer's dropout key; q, k and v of one attention have their own.
        in_features: columns of A.
        out_features: rows of B.
    """

    name: str
    module: int
    in_features: int
    out_features: int


@dataclass
class Block:
    """One adapter's memory and constants. `offsets` maps a site to the element offsets of its A and B, `rows`
    to its output features; `local` holds the offsets of all the bank's sites, (sites, 2) int64, ABSENT where
    the adapter does not sit.
    """

    adapter: str
    rank: int
    scale: float
    dropout: float
    seed: int
    offsets: dict[str, tuple[int, int]]
    rows: dict[str, int]
    a_size: int
    state: Tensor
    copy: Tensor
    local: Tensor
    generation: int = 0  # counts refreshes: a graph of one generation has no backward in the next
    _views: dict[tuple[str, int], Pair] = field(default_factory=dict)
    _diagonals: dict[tuple[tuple[str, int], ...], Tensor] = field(default_factory=dict)

    def tensors(self) -> Iterator[Tensor]:
        """All that it holds: the state, its compute copy, and what was made from them and is kept."""
        yield from (self.state, self.copy, self.local, *self._diagonals.values())

    @property
    def aliased(self) -> bool:
        """Whether the compute copy is the float32 master itself."""
        return self.copy.dtype == self.state.dtype

    def pair(self, site: Site, row: int) -> Pair:
        """A (rank, in) and B (out, rank) of a site as views of one row of the state (-1: compute copy)."""
        key = (site.name, row)
        found = self._views.get(key)
        if found is None:
            flat = self.copy if row < 0 else self.state[row]
            a, b = self.offsets[site.name]
            r = self.rank
            found = (
                flat[a : a + r * site.in_features].view(r, site.in_features),
                flat[b : b + r * site.out_features].view(site.out_features, r),
            )
            self._views[key] = found
        return found

    def refresh(self) -> None:
        """Make everything derived from the masters follow them."""
        self.generation += 1
        if not self.aliased:
            self.copy.copy_(self.state[WEIGHTS])
        for key, diagonal in self._diagonals.items():
            self._fill(diagonal, key)

    def diagonal_b(self, placed: Sequence[tuple[Site, slice]]) -> Tensor:
        """B of neighbouring sites on the diagonal of one matrix, (columns, sites·rank), compute dtype.

        It spans the columns from the first site's first to the last site's last. Kept until detached.
        """
        origin = placed[0][1].start
        key = tuple((site.name, columns.start - origin) for site, columns in placed)
        found = self._diagonals.get(key)
        if found is None:
            found = self.copy.new_zeros(placed[-1][1].stop - origin, len(placed) * self.rank)
            self._fill(found, key)
            self._diagonals[key] = found
        return found

    def _fill(self, diagonal: Tensor, key: tuple[tuple[str, int], ...]) -> None:
        for index, (name, start) in enumerate(key):
            _, offset = self.offsets[name]
            rows = self.rows[name]
            b = self.copy[offset : offset + rows * self.rank].view(rows, self.rank)
            diagonal[start : start + rows, index * self.rank : (index + 1) * self.rank] = b

    def stacked_a(self, sites: Sequence[Site], row: int) -> Tensor | None:
        """A of several sites as one (len(sites)·rank, in) view where they lie end to end, else None."""
        first = self.offsets[sites[0].name][0]
        length = self.rank * sites[0].in_features
        for index, site in enumerate(sites):
            start = self.offsets[site.name][0]
            if site.in_features != sites[0].in_features or start != first + index * length:
                return None
        flat = self.copy if row < 0 else self.state[row]
        rows = len(sites) * self.rank
        return flat[first : first + rows * sites[0].in_features].view(rows, sites[0].in_features)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Bank:
    """All adapters that share one frozen base on one device.

    Args:
        sites: every place where an adapter may sit, in the order of the layers' execution; sites that
            read the same input (q, k, v) next to each other.
        device: where the buffers live.
        compute_dtype: dtype of the activations; masters, gradients and moments are float32 always.

    Raises:
        KernelError: two sites with one name, or a size below 1.
    """

    def __init__(
        self, sites: Sequence[Site], *, device: torch.device | str, compute_dtype: torch.dtype
    ) -> None:
        self.sites = tuple(sites)
        self.device = torch.device(device)
        self.compute_dtype = compute_dtype
        self.site_index = {site.name: index for index, site in enumerate(self.sites)}
        self.blocks: dict[str, Block] = {}
        # Autograd records an operation only where an input needs a gradient; the input of the first layer
        # does not, so the anchor stands for the adapters' own weights.
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        self.tables: dict[object, Tensor] = {}  # layouts of layers on the device, made by a backend
        if len(self.site_index) != len(self.sites):
            names = [site.name for site in self.sites]
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise KernelError(f"sites named twice: {repeated}", "a site's name is unique in its bank")
        for site in self.sites:
            if min(site.in_features, site.out_features) < 1:
                raise KernelError(f"{site}", "a site has at least one input and one output feature")

    def attach(
        self,
        adapter: str,
        *,
        rank: int,
        scale: float,
        dropout: float,
        seed: int,
        sites: Collection[str],
    ) -> None:
        """Add an adapter with all weights, gradients and moments zero.

        Fill its A through `weights` and call `refresh` before the first forward.

        Args:
            adapter: a name that the bank does not hold yet.
            rank: columns of B.
            scale: alpha / rank, or alpha / sqrt(rank) for rsLoRA.
            dropout: probability of dropping an input feature, rounded to 1/65536 where it is applied.
            seed: first word of the dropout key, taken modulo 2**32.
            sites: names of the sites where the adapter sits.

        Raises:
            KernelError: the name is taken, a site is unknown, or a number is out of range.
        """
        self._check(adapter, rank, dropout, sites)
        chosen = [site for site in self.sites if site.name in set(sites)]
        a_offset, starts = 0, {}
        for site in chosen:
            starts[site.name] = a_offset
            a_offset += _aligned(rank * site.in_features)
        offsets, b_offset = {}, a_offset
        for site in chosen:
            offsets[site.name] = (starts[site.name], b_offset)
            b_offset += _aligned(rank * site.out_features)
        state = torch.zeros(4, b_offset, dtype=torch.float32, device=self.device)
        copy = state[WEIGHTS]
        if self.compute_dtype != torch.float32:
            copy = torch.zeros(b_offset, dtype=self.compute_dtype, device=self.device)
        rows = {site.name: site.out_features for site in chosen}
        self.blocks[adapter] = Block(
            adapter=adapter,
            rank=rank,
            scale=float(scale),
            dropout=float(dropout),
            seed=seed % 2**32,
            offsets=offsets,
            rows=rows,
            a_size=a_offset,
            state=state,
            copy=copy,
            local=self._local(offsets),
        )

    def _local(self, offsets: dict[str, tuple[int, int]]) -> Tensor:
        absent = (ABSENT, ABSENT)
        return torch.tensor([offsets.get(site.name, absent) for site in self.sites], dtype=torch.int64)

    def _check(self, adapter: str, rank: int, dropout: float, sites: Collection[str]) -> None:
        if adapter in self.blocks:
            raise KernelError(f"adapter {adapter!r} is attached already", "detach it first")
        unknown = sorted(set(sites) - set(self.site_index))
        if unknown or not sites:
            raise KernelError(
                f"sites {unknown or 'none'} of adapter {adapter!r}",
                "an adapter sits at one or more of the bank's sites",
                f"the bank has {', '.join(self.site_index)}",
            )
        if rank < 1:
            raise KernelError(f"rank {rank} of adapter {adapter!r}", "a rank is at least 1")
        if not 0.0 <= dropout < 1.0:
            raise KernelError(f"dropout {dropout} of adapter {adapter!r}", "0 <= dropout < 1")

    def detach(self, adapter: str) -> None:
        """Remove an adapter and free its memory; the others are not touched."""
        del self.blocks[self.block(adapter).adapter]

    def block(self, adapter: str) -> Block:
        """The block of an attached adapter; KernelError names those there are."""
        found = self.blocks.get(adapter)
        if found is None:
            raise KernelError(
                f"adapter {adapter!r}",
                "an adapter is attached before it is used",
                f"attached are {', '.join(self.blocks) or 'none'}",
            )
        return found

    def _pairs(self, adapter: str, row: int) -> dict[str, Pair]:
        block = self.block(adapter)
        return {name: block.pair(self.sites[self.site_index[name]], row) for name in block.offsets}

    def weights(self, adapter: str) -> dict[str, Pair]:
        """Site name → (A (rank, in), B (out, rank)), float32 views of the masters."""
        return self._pairs(adapter, WEIGHTS)

    def gradients(self, adapter: str) -> dict[str, Pair]:
        """Site name → gradients of (A, B), float32 accumulators that backward adds to."""
        return self._pairs(adapter, GRADIENTS)

    def moments(self, adapter: str) -> dict[str, tuple[Pair, Pair]]:
        """Site name → ((first moment of A, of B), (second moment of A, of B)), float32 views."""
        first, second = self._pairs(adapter, FIRST_MOMENT), self._pairs(adapter, SECOND_MOMENT)
        return {name: (first[name], second[name]) for name in first}

    def refresh(self, adapters: Iterable[str] | None = None) -> None:
        """Make the compute-dtype copies follow the masters, after a load or a change by hand."""
        for adapter in self.blocks if adapters is None else adapters:
            self.block(adapter).refresh()

    def zero_gradients(self, adapters: Iterable[str] | None = None) -> None:
        """Set gradients to zero, of all adapters or of those named."""
        for adapter in self.blocks if adapters is None else adapters:
            self.block(adapter).state[GRADIENTS].zero_()
