"""Lower bounds for packing: on the number of bins, and on the least full bin at a fixed number.

Sets of reachable token sums are Python integers used as bit sets: bit t is set where some subset of the
samples has exactly t tokens. They make subset sums of some tens of samples a matter of microseconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from plait.planner.packing import padded

MOST_UNITS = 4096  # above so many tiles a bin, combining batches costs more than it saves
Reach = npt.NDArray[np.int64]  # (units + 1,): most tokens that fit into 0, 1, ... units tiles


def reachable_sums(lengths: Iterable[int], most: int, start: int = 0) -> int:
    """Bit set of the sums ``start`` + (a subset of ``lengths``) that are at most ``most``."""
    mask, sums = (1 << (most + 1)) - 1, 1 << start
    for length in lengths:
        sums |= (sums << length) & mask
    return sums & mask


def most_tokens(sums: int, units: int, tile: int) -> Reach:
    """For k = 0..units, the largest sum in the bit set that fits into k tiles; far below 0 where none."""
    best = np.full(units + 1, -(1 << 40), dtype=np.int64)
    for k in range(units + 1):
        inside = sums & ((1 << (k * tile + 1)) - 1)
        if inside:
            best[k] = inside.bit_length() - 1
    return best


def combine(left: Reach, right: Reach) -> Reach:
    """Most tokens of two batches in k tiles together: the maximum over j of left[j] + right[k − j]."""
    best: Reach = left[0] + right
    for j in range(1, len(left)):
        if left[j] > left[j - 1]:
            np.maximum(best[j:], left[j] + right[: len(right) - j], out=best[j:])
    return best


def bins_bound(lengths: Sequence[Sequence[int]], *, capacity: int, tile: int = 1) -> int:
    """Fewest bins that could hold the samples: padded volume, and Martello and Toth's L2 bound."""
    units = capacity // tile
    volume = sum(padded(sum(batch), tile) // tile for batch in lengths)
    items = [length for batch in lengths for length in batch]
    return max(-(-volume // units), _long_items_bound(items, units * tile))


def _long_items_bound(items: Sequence[int], capacity: int) -> int:
    """L2 (Martello and Toth, 1990): samples above half the capacity never share a bin with each other.

    For each threshold a: samples above capacity − a are alone; those from there down to half the capacity
    have a bin each; what those leave free takes the samples from a up to half the capacity, or more bins do.
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
    """Least padded tokens that the least full of ``bins`` bins could have, with every sample placed.

    The other bins − 1 hold at most what some subset of the samples fills; the rest is left over, and
    what is left is itself a sum that some subset reaches.
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
