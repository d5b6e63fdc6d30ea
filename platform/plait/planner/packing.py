"""Packing global batches into microbatches: first-fit decreasing.

It is greedy, quick and deterministic, and is the start and the fallback of the exact packer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.errors import CapacityError
from plait.core.plans import GlobalBatch, Microbatch, Segment
from plait.planner.solver import Limit

Item = tuple[int, int]  # (batch, position inside the batch)
Bin = list[Item]


@dataclass(frozen=True, slots=True)
class PackedBatches:
    """Global batches that were packed together on one replica, with the samples of each microbatch.

    Attributes:
        bins: (batch, position inside it) of the samples of each microbatch.
        gap: padded tokens by which the least full microbatch may exceed the optimum; a whole capacity if one
            microbatch fewer is not ruled out; None if no bound was computed.
        limit_hit: limit that stopped the solver ("time" makes a plan that may not repeat), else None.
    """

    batches: tuple[GlobalBatch, ...]
    bins: tuple[tuple[Item, ...], ...]
    gap: int | None = None
    limit_hit: Limit | None = None

    def microbatches(self, *, replica: int = 0) -> tuple[Microbatch, ...]:
        """The bins as microbatches with consecutive indices."""
        return tuple(microbatch(self.batches, items, replica, place) for place, items in enumerate(self.bins))


def padded(tokens: int, tile: int) -> int:
    """⌈tokens / tile⌉·tile: the padded size of a segment of ``tokens``."""
    return -(-tokens // tile) * tile


def pack(
    batches: Sequence[GlobalBatch],
    *,
    capacity: int,
    tile: int = 1,
    replica: int = 0,
) -> tuple[Microbatch, ...]:
    """Pack all samples of ``batches`` into microbatches, by first-fit decreasing.

    Args:
        capacity: most tokens of a microbatch, each segment rounded up to a multiple of ``tile``.

    Returns:
        Microbatches with consecutive indices. Segments are in the order of ``batches``, and samples within a
        segment in the order of their global batch.

    Raises:
        CapacityError: a sample alone is longer than the capacity.
    """
    check_fits(batches, capacity=capacity, tile=tile)
    bins = first_fit_decreasing([batch.lengths for batch in batches], capacity=capacity, tile=tile)
    packed = PackedBatches(tuple(batches), tuple(map(tuple, bins)))
    return packed.microbatches(replica=replica)


def check_fits(batches: Sequence[GlobalBatch], *, capacity: int, tile: int = 1) -> None:
    """Check that every sample fits alone; otherwise a CapacityError names job, sample and length."""
    for batch in batches:
        for sample, length in zip(batch.samples, batch.lengths, strict=True):
            if padded(length, tile) > capacity:
                raise CapacityError(
                    f"sample {sample} of job {batch.job} ({batch.split}) has {length} tokens",
                    f"A microbatch holds at most {capacity} tokens, counted in multiples of {tile}.",
                    "Raise engine.capacity, or shorten the samples with model.max_length.",
                )


def first_fit_decreasing(lengths: Sequence[Sequence[int]], *, capacity: int, tile: int = 1) -> list[Bin]:
    """Bins of (batch, position): samples are placed longest first, each into the first bin with room."""
    items = [(a, position) for a, batch in enumerate(lengths) for position in range(len(batch))]
    items.sort(key=lambda item: (-lengths[item[0]][item[1]], item))
    bins: list[Bin] = [[] for _ in items]
    tokens: list[dict[int, int]] = [{} for _ in items]  # of each batch in each bin
    free = _Free(len(items), capacity)
    for batch, position in items:
        length, place, more = lengths[batch][position], -1, 0
        while place < 0 or more > free[place]:
            # a segment's last tile may have room for up to tile − 1 tokens of the sample
            place = free.first(place + 1, length - tile + 1)
            before = tokens[place].get(batch, 0)
            more = padded(before + length, tile) - padded(before, tile)
        bins[place].append((batch, position))
        tokens[place][batch] = tokens[place].get(batch, 0) + length
        free[place] -= more
    return [own for own in bins if own]


class _Free:
    """Tokens left in each bin, in a tree of maxima that finds the first bin with enough in log time."""

    def __init__(self, bins: int, capacity: int) -> None:
        self.leaves = 1 << max(0, bins - 1).bit_length()
        self.most = [capacity] * (2 * self.leaves)

    def __getitem__(self, place: int) -> int:
        return self.most[self.leaves + place]

    def __setitem__(self, place: int, tokens: int) -> None:
        node = self.leaves + place
        self.most[node] = tokens
        while node > 1:
            node //= 2
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])

    def first(self, start: int, least: int) -> int:
        """The first bin from ``start`` on with at least ``least`` tokens left; an empty bin always does."""
        node = self.leaves + start
        while self.most[node] < least:
            while node % 2:  # a right child: nothing more under its parent
                node //= 2
            node += 1
        while node < self.leaves:
            node *= 2
            if self.most[node] < least:
                node += 1
        return node - self.leaves


def microbatch(batches: Sequence[GlobalBatch], items: Sequence[Item], replica: int, index: int) -> Microbatch:
    """The microbatch of ``items``: one segment for each global batch with samples in it."""
    chosen: dict[int, list[int]] = {}
    for batch, position in sorted(items):
        chosen.setdefault(batch, []).append(position)
    return Microbatch(replica, index, tuple(_segment(batches[key], where) for key, where in chosen.items()))


def _segment(batch: GlobalBatch, positions: Sequence[int]) -> Segment:
    return Segment(
        job=batch.job,
        step=batch.step,
        samples=tuple(batch.samples[position] for position in positions),
        draws=tuple(batch.draws[position] for position in positions),
        lengths=tuple(batch.lengths[position] for position in positions),
        loss_weight=batch.loss_weight,
        split=batch.split,
    )
