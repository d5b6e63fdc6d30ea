"""Packing global batches into microbatches: first-fit decreasing (DESIGN §5.6).

Greedy, quick and deterministic: the start and the fallback of the exact packer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import CapacityError
from plait.planner.solver import Limit
from plait.plans import GlobalBatch, Microbatch, Segment

Item = tuple[int, int]  # (batch, position inside the batch)
Bin = list[Item]


@dataclass(frozen=True, slots=True)
class PackedBatches:
    """Global batches that were packed together on one replica, with the samples of each microbatch.

    Attributes:
        batches: one for each job of the group.
        bins: (batch, position inside it) of the samples of each microbatch.
        gap: padded tokens by which the packing may lie above the optimum's least full microbatch; a whole
            capacity where one microbatch less is not excluded; None where no bound was computed.
        limit_hit: limit that stopped the solver ("time" makes a plan that may not repeat), else None.
    """

    batches: tuple[GlobalBatch, ...]
    bins: tuple[tuple[Item, ...], ...]
    gap: int | None = None
    limit_hit: Limit | None = None

    def microbatches(self, *, replica: int = 0, first_index: int = 0) -> tuple[Microbatch, ...]:
        """The bins as microbatches with consecutive indices."""
        return tuple(
            microbatch(self.batches, items, replica, first_index + place)
            for place, items in enumerate(self.bins)
        )


def padded(tokens: int, tile: int) -> int:
    """⌈tokens / tile⌉·tile: what a segment of ``tokens`` counts for."""
    return -(-tokens // tile) * tile


def pack(
    batches: Sequence[GlobalBatch],
    *,
    capacity: int,
    tile: int = 1,
    replica: int = 0,
    first_index: int = 0,
) -> tuple[Microbatch, ...]:
    """Microbatches that hold all samples of ``batches``, by first-fit decreasing.

    Args:
        batches: one or more global batches; each becomes at most one segment of a microbatch.
        capacity: most tokens of a microbatch, each segment rounded up to a multiple of ``tile``.
        tile: padding multiple P.
        replica: replica of the microbatches.
        first_index: index of the first microbatch.

    Returns:
        Microbatches with consecutive indices. Segments lie in the order of ``batches``, and samples
        inside a segment in the order of their global batch.

    Raises:
        CapacityError: a sample alone is longer than the capacity.
    """
    check_fits(batches, capacity=capacity, tile=tile)
    bins = first_fit_decreasing([batch.lengths for batch in batches], capacity=capacity, tile=tile)
    packed = PackedBatches(tuple(batches), tuple(map(tuple, bins)))
    return packed.microbatches(replica=replica, first_index=first_index)


def check_fits(batches: Sequence[GlobalBatch], *, capacity: int, tile: int = 1) -> None:
    """Raise CapacityError, naming job, sample and length, where a sample alone exceeds the capacity."""
    for batch in batches:
        for sample, length in zip(batch.samples, batch.lengths, strict=True):
            if padded(length, tile) > capacity:
                raise CapacityError(
                    f"sample {sample} of job {batch.job} ({batch.split}) has {length} tokens",
                    f"A microbatch holds at most {capacity} tokens, counted in multiples of {tile}.",
                    "Raise engine.capacity, or shorten the samples with model.max_length.",
                )


def first_fit_decreasing(lengths: Sequence[Sequence[int]], *, capacity: int, tile: int = 1) -> list[Bin]:
    """Bins of (batch, position), the longest sample first, each into the first bin that takes it.

    Args:
        lengths: tokens of each sample, by batch.
    """
    items = [(a, position) for a, batch in enumerate(lengths) for position in range(len(batch))]
    items.sort(key=lambda item: (-lengths[item[0]][item[1]], item))
    bins: list[Bin] = []
    tokens: list[list[int]] = []  # of each batch in each bin
    free: list[int] = []  # capacity left of each bin
    for item in items:
        batch, length = item[0], lengths[item[0]][item[1]]
        for place, room in enumerate(free):
            more = _growth(tokens[place][batch], length, tile)
            if more <= room:
                break
        else:
            place, more = len(bins), padded(length, tile)
            bins.append([])
            tokens.append([0] * len(lengths))
            free.append(capacity)
        bins[place].append(item)
        tokens[place][batch] += length
        free[place] -= more
    return bins


def _growth(tokens: int, length: int, tile: int) -> int:
    return padded(tokens + length, tile) - padded(tokens, tile)


def microbatch(batches: Sequence[GlobalBatch], items: Sequence[Item], replica: int, index: int) -> Microbatch:
    """The microbatch that holds ``items``: one segment for each global batch that has samples in it."""
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
