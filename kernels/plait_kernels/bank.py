"""The bank: the tensors of every adapter (A and B), their gradients and moments, packed, with offsets.

Each adapter owns one block: a float32 buffer of four rows (weights, gradient, first and second moment) and,
if the compute dtype is not float32, a compute-dtype copy of the weights. Inside a block all A come first
and then all B, in the bank's site order, so that an optimiser step is one pass over two contiguous ranges
and the A of neighbouring sites (q, k, v) form one matrix. Untrained tensors of a variant are in a separate
buffer, without gradient and moments. Attaching or detaching an adapter touches no other adapter's block.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from plait_kernels.errors import KernelError
from plait_kernels.lora import LORA
from plait_kernels.variant import TensorSpec, Variant

_ALIGNMENT = 16  # elements: 32 bytes in bfloat16, 64 in float32
ABSENT = -(2**62)
COMPUTE, WEIGHTS, GRADIENTS, FIRST_MOMENT, SECOND_MOMENT = range(-1, 4)  # the compute copy, then the rows

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Site:
    """One linear layer that adapters may target.

    Args:
        name: the layer's name, unique in the bank.
        module: the layer's dropout key; q, k and v of one attention have their own.
        in_features: columns of A.
        out_features: rows of B.
        first_feature: of the whole layer's inputs, where others have those before; a multiple of 8.
    """

    name: str
    module: int
    in_features: int
    out_features: int
    first_feature: int = 0


@dataclass(frozen=True)
class Layout:
    """The layout of one adapter's tensors: offsets in elements, for trained and for untrained ones.

    `offsets` maps a site to the offset of each of its tensors, in the variant's order; `specs` maps it to
    their specifications. `ranges` are the trained parts, with the learning rate of each.
    """

    specs: dict[str, tuple[TensorSpec, ...]]
    offsets: dict[str, tuple[int, ...]]
    ranges: tuple[tuple[slice, Literal["a", "b"]], ...]
    trained: int
    frozen: int

    @classmethod
    def of(cls, variant: Variant, sites: Sequence[Site], rank: int) -> Layout:
        """Lay out all sites' first tensors, then all their second ones, each aligned."""
        specs = {site.name: variant.tensors(site.in_features, site.out_features, rank) for site in sites}
        offsets: dict[str, list[int]] = {name: [] for name in specs}
        ranges: list[tuple[slice, Literal["a", "b"]]] = []
        ends = {True: 0, False: 0}
        for kinds in zip(*specs.values(), strict=True):
            trains, start = kinds[0].trains, ends[kinds[0].trains]
            for name, spec in zip(specs, kinds, strict=True):
                offsets[name].append(ends[trains])
                ends[trains] += _aligned(math.prod(spec.shape))
            if trains:
                ranges.append((slice(start, ends[trains]), kinds[0].rate))
        found = {name: tuple(each) for name, each in offsets.items()}
        return cls(specs, found, tuple(ranges), ends[True], ends[False])


def parts_of(size: int, count: int) -> tuple[slice, ...]:
    """A vector cut into parts of equal length, aligned; the last ones may be shorter, or empty."""
    length = _aligned(-(-size // count))
    return tuple(
        slice(min(number * length, size), min((number + 1) * length, size)) for number in range(count)
    )


@dataclass
class Block:
    """One adapter's memory and constants.

    `state` has rows of the trained tensors, `frozen` the weights of the others; `copy` and `frozen_copy` are
    both in the compute dtype. `moments` has two rows of the part `parts[own]` of the trained tensors. If that
    is all of it, they are the last two of the four rows of `state`; else `state` has two, weights and
    gradients, and `whole` holds all moments while they are needed. `local` has the offsets of A and B at all
    the bank's sites, (sites, 2) int64, ABSENT if the adapter does not target the site or is not plain LoRA.
    """

    adapter: str
    variant: Variant
    rank: int
    scale: float
    dropout: float
    seed: int
    layout: Layout
    state: Tensor
    copy: Tensor
    frozen: Tensor
    frozen_copy: Tensor
    local: Tensor
    moments: Tensor
    parts: tuple[slice, ...]
    own: int = 0
    whole: Tensor | None = None
    targets: frozenset[str] = frozenset()  # names of its sites; one object for all adapters of the same
    generation: int = 0  # counts refreshes: a graph of one generation has no backward in the next
    refreshes: ClassVar[int] = 0  # of all blocks, so that one look tells that none has changed
    _views: dict[tuple[str, int], Tensors] = field(default_factory=dict)
    _diagonals: dict[tuple[tuple[str, int], ...], Tensor] = field(default_factory=dict)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the block: the state, its compute copy, and cached ones derived from them."""
        yield from (self.state, self.copy, self.local, *self._diagonals.values())
        if len(self.parts) > 1:
            yield self.moments
        if self.layout.frozen:
            yield from (self.frozen, self.frozen_copy)

    def spread(self) -> None:
        """Make room for all moments, with those of its own part in it."""
        if len(self.parts) > 1:
            self.whole = torch.zeros(2, self.layout.trained, device=self.state.device)
            self.whole[:, self.parts[self.own]] = self.moments

    def keep_own(self) -> None:
        """Keep of all moments those of its own part."""
        if self.whole is not None:
            self.moments.copy_(self.whole[:, self.parts[self.own]])
            self.whole = None

    @property
    def aliased(self) -> bool:
        """Whether the compute copy is the float32 master itself."""
        return self.copy.dtype == self.state.dtype

    def at(self, site: Site, row: int) -> Tensors:
        """The tensors of a site (for plain LoRA, A (rank, in) and B (out, rank)) as views of one row.

        Untrained tensors have only a weight and a compute copy, and are left out of other rows.
        """
        key = (site.name, row)
        found = self._views.get(key)
        if found is None:
            placed = zip(self.layout.specs[site.name], self.layout.offsets[site.name], strict=True)
            found = tuple(
                self._row(spec, row)[offset : offset + math.prod(spec.shape)].view(spec.shape)
                for spec, offset in placed
                if spec.trains or row in (COMPUTE, WEIGHTS)
            )
            if self.whole is None:
                self._views[key] = found
        return found

    def _row(self, spec: TensorSpec, row: int) -> Tensor:
        if spec.trains and self.whole is not None and row >= FIRST_MOMENT:
            return self.whole[row - FIRST_MOMENT]
        if spec.trains:
            return self.copy if row == COMPUTE else self.state[row]
        return self.frozen_copy if row == COMPUTE else self.frozen

    def refresh(self, *, copied: bool = False) -> None:
        """Update everything derived from the master weights; ``copied``: their compute copy is up to date."""
        self.generation += 1
        Block.refreshes += 1
        if not self.aliased and not copied:
            self.copy.copy_(self.state[WEIGHTS])
            self.frozen_copy.copy_(self.frozen)
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
            _, offset = self.layout.offsets[name]
            rows, rank = self.layout.specs[name][1].shape
            b = self.copy[offset : offset + rows * rank].view(rows, rank)
            diagonal[start : start + rows, index * rank : (index + 1) * rank] = b

    def stacked_a(self, sites: Sequence[Site], row: int) -> Tensor | None:
        """A of several sites as one (len(sites)·rank, in) view if they lie end to end, else None."""
        offsets = self.layout.offsets
        first = offsets[sites[0].name][0]
        length = self.rank * sites[0].in_features
        for index, site in enumerate(sites):
            start = offsets[site.name][0]
            if site.in_features != sites[0].in_features or start != first + index * length:
                return None
        flat = self.copy if row == COMPUTE else self.state[row]
        rows = len(sites) * self.rank
        return flat[first : first + rows * sites[0].in_features].view(rows, sites[0].in_features)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _check_variant(variant: Variant, layout: Layout, sites: Sequence[Site], rank: int) -> None:
    if sites and not layout.ranges:
        raise KernelError(f"variant {variant.name!r}", "at least one of a variant's tensors trains")
    if variant.fused and layout != Layout.of(LORA, sites, rank):
        raise KernelError(
            f"variant {variant.name!r} with other tensors than plain LoRA",
            "the backends have kernels for plain LoRA alone: A and B, both trained",
            "set `fused` to False: reference computes its rows",
        )


class Bank:
    """All adapters that share one frozen base on one device.

    Args:
        sites: every layer that an adapter may target, in the order of the layers' execution; sites that read
            the same input (q, k, v) are next to each other.
        device: device of the buffers.
        compute_dtype: dtype of the activations; master weights, gradients and moments are always float32.
        part: number of this bank and count of those that keep the same adapters, each the moments of a part.

    Attributes:
        loss_scale: what losses are multiplied by before their backward; a step divides gradients by it.

    Raises:
        KernelError: two sites with one name, or a size below 1.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        device: torch.device | str,
        compute_dtype: torch.dtype,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.sites = tuple(sites)
        self.device = torch.device(device)
        self.compute_dtype = compute_dtype
        self.loss_scale = 1.0
        self._part = part
        self.site_index = {site.name: index for index, site in enumerate(self.sites)}
        self.blocks: dict[str, Block] = {}
        # Autograd records an operation only if an input needs a gradient; the input of the first layer
        # does not, so the anchor represents the adapters' own weights.
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._targets: dict[frozenset[str], frozenset[str]] = {}
        self.layers: dict[object, Any] = {}  # `Layer` by its sites, made by their first call
        self.wanted: dict[tuple[Any, ...], None] = {}  # tables that a backend needs for a microbatch
        self.tables: dict[object, Tensor] = {}  # what a backend keeps for all layers
        if len(self.site_index) != len(self.sites):
            names = [site.name for site in self.sites]
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise KernelError(f"sites named twice: {repeated}", "a site's name is unique in its bank")
        for site in self.sites:
            if min(site.in_features, site.out_features) < 1:
                raise KernelError(f"{site}", "a site has at least one input and one output feature")
            if site.first_feature % 8:
                raise KernelError(
                    f"{site}", "a mask is made for 8 features at a time, beginning at a multiple"
                )

    def attach(
        self,
        adapter: str,
        *,
        rank: int,
        scale: float,
        dropout: float,
        seed: int,
        sites: Collection[str],
        variant: Variant = LORA,
        partly: bool = False,
    ) -> None:
        """Add an adapter with all weights, gradients and moments zero.

        Fill its weights through `weights` and call `refresh` before the first forward.

        Args:
            adapter: a name that is new to the bank.
            rank: columns of B.
            scale: alpha / rank, or alpha / sqrt(rank) for rsLoRA.
            dropout: probability of dropping an input feature, rounded to 1/65536 where it is applied.
            seed: first word of the dropout key, taken modulo 2**32.
            sites: names of the sites that the adapter targets.
            variant: defines its tensors and their use.
            partly: other banks have the rest of its sites, perhaps all of them.

        Raises:
            KernelError: the name is taken, a site is unknown, a number is out of range, no tensor of the
                variant is trained, or it claims to be plain LoRA and is not.
        """
        chosen = self._chosen(adapter, rank, dropout, sites, partly=partly)
        targets = frozenset(site.name for site in chosen)
        layout = Layout.of(variant, chosen, rank)
        _check_variant(variant, layout, chosen, rank)
        own, count = self._part
        parts = parts_of(layout.trained, count)
        state = torch.zeros(4 if count == 1 else 2, layout.trained, dtype=torch.float32, device=self.device)
        size = parts[own].stop - parts[own].start
        moments = state[FIRST_MOMENT:] if count == 1 else torch.zeros(2, size, device=self.device)
        frozen = torch.zeros(layout.frozen, dtype=torch.float32, device=self.device)
        copy, frozen_copy = state[WEIGHTS], frozen
        if self.compute_dtype != torch.float32:
            copy = torch.zeros(layout.trained, dtype=self.compute_dtype, device=self.device)
            frozen_copy = torch.zeros(layout.frozen, dtype=self.compute_dtype, device=self.device)
        self.blocks[adapter] = Block(
            *(adapter, variant, rank, float(scale), float(dropout), seed % 2**32, layout),
            state=state,
            copy=copy,
            frozen=frozen,
            frozen_copy=frozen_copy,
            local=self._local(layout.offsets if variant.fused else {}),
            moments=moments,
            parts=parts,
            own=own,
            targets=self._targets.setdefault(targets, targets),
        )

    def _local(self, offsets: dict[str, tuple[int, ...]]) -> Tensor:
        absent = (ABSENT, ABSENT)
        return torch.tensor([offsets.get(site.name, absent) for site in self.sites], dtype=torch.int64)

    def _chosen(
        self, adapter: str, rank: int, dropout: float, sites: Collection[str], *, partly: bool
    ) -> list[Site]:
        """The sites of a new adapter, in the bank's order; KernelError if anything of it is wrong."""
        if adapter in self.blocks:
            raise KernelError(f"adapter {adapter!r} is attached already", "detach it first")
        unknown = sorted(set(sites) - set(self.site_index))
        if unknown or not (sites or partly):
            raise KernelError(
                f"sites {unknown or 'none'} of adapter {adapter!r}",
                "an adapter sits at one or more of the bank's sites",
                f"the bank has {', '.join(self.site_index)}",
            )
        if rank < 1:
            raise KernelError(f"rank {rank} of adapter {adapter!r}", "a rank is at least 1")
        if not 0.0 <= dropout < 1.0:
            raise KernelError(f"dropout {dropout} of adapter {adapter!r}", "0 <= dropout < 1")
        return [site for site in self.sites if site.name in set(sites)]

    def detach(self, adapter: str) -> None:
        """Remove an adapter and free its memory; the others are not touched."""
        del self.blocks[self.block(adapter).adapter]

    def block(self, adapter: str) -> Block:
        """The block of an attached adapter; KernelError lists the attached ones."""
        found = self.blocks.get(adapter)
        if found is None:
            raise KernelError(
                f"adapter {adapter!r}",
                "an adapter is attached before it is used",
                f"attached are {', '.join(self.blocks) or 'none'}",
            )
        return found

    def _row(self, adapter: str, row: int) -> dict[str, Tensors]:
        block = self.block(adapter)
        return {name: block.at(self.sites[self.site_index[name]], row) for name in block.layout.specs}

    def weights(self, adapter: str) -> dict[str, Tensors]:
        """Site name → its tensors in the variant's order (plain LoRA: A, B), float32 views of the masters."""
        return self._row(adapter, WEIGHTS)

    def gradients(self, adapter: str) -> dict[str, Tensors]:
        """Site name → gradients of the tensors that train, float32 accumulators that backward adds to."""
        return self._row(adapter, GRADIENTS)

    def moments(self, adapter: str) -> dict[str, tuple[Tensors, Tensors]]:
        """Site name → (first, second moments) of the tensors that train, float32 views."""
        first, second = self._row(adapter, FIRST_MOMENT), self._row(adapter, SECOND_MOMENT)
        return {name: (first[name], second[name]) for name in first}

    def refresh(self, adapters: Iterable[str] | None = None) -> None:
        """Update the compute-dtype copies from the master weights, after a load or a manual change."""
        for adapter in self.blocks if adapters is None else adapters:
            self.block(adapter).refresh()

    def zero_gradients(self, adapters: Iterable[str] | None = None) -> None:
        """Set gradients to zero, of all adapters or of those named."""
        for adapter in self.blocks if adapters is None else adapters:
            self.block(adapter).state[GRADIENTS].zero_()
