"""Subset sums of sample lengths, for lower bounds of packing and for filling bins as full as possible.

Sets of reachable token sums are Python integers used as bit sets: bit t is set if some subset of the samples
has exactly t tokens. With them, subset sums of tens of samples take microseconds.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from plait.planner.packing import Bin, Item, padded

MOST_UNITS = 4096  # with more tiles per bin, combining batches costs more than it saves
Reach = npt.NDArray[np.int64]  # (units + 1,): most tokens that fit into 0, 1, ... units tiles
MOST_COMPANIONS = 96  # this many samples fill a bin as well as more would


def reachable_sums(lengths: Iterable[int], most: int) -> int:
    """Bit set of the sums of subsets of ``lengths`` that are at most ``most``."""
    return _steps(lengths, 0, most)[-1]


def most_tokens(sums: int, units: int, tile: int) -> Reach:
    """For k = 0..units, the largest sum in the bit set that fits into k tiles; far below 0 if none."""
    best = np.full(units + 1, -(1 << 40), dtype=np.int64)
    for k in range(units + 1):
        inside = sums & ((1 << (k * tile + 1)) - 1)
        if inside:
            best[k] = inside.bit_length() - 1
    return best


def combine(left: Reach, right: Reach) -> Reach:
    """Most tokens of two batches together in k tiles: the maximum over j of left[j] + right[k − j]."""
    best: Reach = left[0] + right
    for j in range(1, len(left)):
        if left[j] > left[j - 1]:
            np.maximum(best[j:], left[j] + right[: len(right) - j], out=best[j:])
    return best


def bins_bound(lengths: Sequence[Sequence[int]], *, capacity: int, tile: int = 1) -> int:
    """A lower bound of the number of bins, from padded volume and Martello and Toth's L2 bound."""
    units = capacity // tile
    volume = sum(padded(sum(batch), tile) // tile for batch in lengths)
    items = [length for batch in lengths for length in batch]
    return max(-(-volume // units), _long_items_bound(items, units * tile))


def _long_items_bound(items: Sequence[int], capacity: int) -> int:
    """L2 (Martello and Toth, 1990): samples above half the capacity never share a bin with each other.

    For each threshold a, samples above capacity − a are alone; those from there down to half the capacity
    have a bin each; samples from a up to half the capacity go into the room that these leave, or into more
    bins.
    """
    ordered = sorted(items)
    sums = [0, *accumulate(ordered)]
    half = bisect_right(ordered, capacity // 2)
    best = 0
    for least in {0, *ordered[:half]}:
        shared = bisect_right(ordered, capacity - least)
        free = (shared - half) * capacity - (sums[shared] - sums[half])
        over = sums[half] - sums[bisect_left(ordered, least)] - free
        best = max(best, len(ordered) - half + max(0, -(-over // capacity)))
    return best


def fill_bound(lengths: Sequence[Sequence[int]], bins: int, *, capacity: int, tile: int = 1) -> int:
    """A lower bound of the padded tokens in the least full of ``bins`` bins, with every sample placed.

    Each of the other bins − 1 holds at most the fullest subset of the samples; the rest is left over, and is
    itself the sum of some subset.
    """
    volume = sum(padded(sum(batch), tile) for batch in lengths)
    if bins == 1:
        return volume
    if tile == 1:
        lengths = [[length for batch in lengths for length in batch]]
    units = capacity // tile
    sums = [reachable_sums(batch, units * tile) for batch in lengths]
    rest = sum(map(sum, lengths)) - (bins - 1) * _fullest(sums, units, tile)
    least = max(volume - (bins - 1) * units * tile, padded(max(rest, 1), tile)) // tile
    above = _reachable_tiles(sums, units, tile) >> least
    return (least + (above & -above).bit_length() - 1) * tile


def _fullest(sums: Sequence[int], units: int, tile: int) -> int:
    """Most real tokens in one bin."""
    if len(sums) == 1:
        return sums[0].bit_length() - 1
    if units > MOST_UNITS:
        return units * tile
    reach = most_tokens(sums[0], units, tile)
    for other in sums[1:]:
        reach = combine(reach, most_tokens(other, units, tile))
    return int(reach[-1])


def _reachable_tiles(sums: Sequence[int], units: int, tile: int) -> int:
    """Bit set of the numbers of tiles that some subset of the samples takes, each batch rounded up."""
    if tile == 1:
        return sums[0]
    window, fills = (1 << tile) - 1, 1
    for batch in sums:
        taken = [0] + [k for k in range(1, units + 1) if batch >> ((k - 1) * tile + 1) & window]
        fills = _union(fills << k for k in taken)
    return fills


def _union(sets: Iterable[int]) -> int:
    result = 0
    for item in sets:
        result |= item
    return result


def least_fill(bins: Sequence[Bin], lengths: Sequence[Sequence[int]], tile: int) -> int:
    """Padded tokens of the least full bin."""
    return min(bin_fill(items, lengths, tile) for items in bins)


def bin_fill(items: Bin, lengths: Sequence[Sequence[int]], tile: int) -> int:
    """Padded tokens of one bin: each batch in it rounded up to the tile."""
    tokens: dict[int, int] = {}
    for batch, position in items:
        tokens[batch] = tokens.get(batch, 0) + lengths[batch][position]
    return sum(padded(amount, tile) for amount in tokens.values())


def fill_bins(lengths: Sequence[Sequence[int]], *, capacity: int, tile: int, turn: int = 0) -> list[Bin]:
    """Fill bins one after another; ``turn`` varies which of equally good subsets is taken."""
    left = [(a, position) for a, batch in enumerate(lengths) for position in range(len(batch))]
    left.sort(key=lambda item: (-lengths[item[0]][item[1]], item))
    shuffler = random.Random(turn)
    bins: list[Bin] = []
    while left:
        first, others = left[0], left[1:]
        if turn:
            shuffler.shuffle(others)
        others = others[:: -(-len(others) // MOST_COMPANIONS) or 1]  # of all lengths
        starts = [lengths[a][first[1]] if a == first[0] else 0 for a in range(len(lengths))]
        chosen = [first, *fullest_subset(others, lengths, starts, units=capacity // tile, tile=tile)]
        taken = set(chosen)
        left = [item for item in left if item not in taken]
        bins.append(chosen)
    return bins


def fullest_subset(
    items: Sequence[Item], lengths: Sequence[Sequence[int]], starts: Sequence[int], *, units: int, tile: int
) -> list[Item]:
    """The samples among ``items`` that put the most tokens into a bin of ``units`` tiles.

    Args:
        starts: tokens of each batch that are already in the bin; they count against ``units``.
    """
    batches = range(len(lengths)) if tile > 1 else range(1)
    members = [[item for item in items if tile == 1 or item[0] == batch] for batch in batches]
    begin = starts if tile > 1 else [sum(starts)]
    steps = [
        _steps([lengths[a][p] for a, p in members[batch]], begin[batch], units * tile) for batch in batches
    ]
    targets = _targets([history[-1] for history in steps], units, tile)
    return [
        item for batch in batches for item in _trace(members[batch], steps[batch], targets[batch], lengths)
    ]


def _steps(lengths: Iterable[int], start: int, most: int) -> list[int]:
    """Reachable sums after none, one, two, ... of ``lengths``."""
    mask = (1 << (most + 1)) - 1
    sums = (1 << start) & mask
    history = [sums]
    for length in lengths:
        sums |= (sums << length) & mask
        history.append(sums)
    return history


def _targets(sums: Sequence[int], units: int, tile: int) -> list[int]:
    """Tokens of each batch in the fullest bin."""
    if len(sums) == 1:
        return [sums[0].bit_length() - 1]
    reach = [most_tokens(item, units, tile) for item in sums]
    joined: list[Reach] = [reach[0]]
    for other in reach[1:]:
        joined.append(combine(joined[-1], other))
    targets, room = [0] * len(sums), units
    for batch in range(len(sums) - 1, 0, -1):
        wanted = joined[batch][room]
        tiles = next(k for k in range(room + 1) if joined[batch - 1][room - k] + reach[batch][k] == wanted)
        targets[batch] = int(reach[batch][tiles])
        room -= tiles
    targets[0] = int(reach[0][room])
    return targets


def _trace(
    members: Sequence[Item], history: Sequence[int], target: int, lengths: Sequence[Sequence[int]]
) -> list[Item]:
    """Samples whose tokens add up to ``target``, earlier ones if there is a choice."""
    chosen = []
    for place in range(len(members) - 1, -1, -1):
        if not history[place] >> target & 1:
            batch, position = members[place]
            chosen.append(members[place])
            target -= lengths[batch][position]
    return chosen
