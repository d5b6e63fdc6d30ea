"""Packing by filling one bin after another as full as subset sums allow.

Each bin takes the longest sample left and then the subset of the others that wastes the fewest tokens,
so that what cannot be placed well gathers in the last bin: few bins and an empty last one at once. The
choice among equally good subsets is varied over a fixed number of rounds, the same in every run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from plait.planner.packing import Bin, Item, padded
from plait.planner.packing_bounds import Reach, combine, most_tokens

MOST_COMPANIONS = 96  # from so many samples, a bin can be filled as well as from more


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
    """Bins filled one after another; ``turn`` varies which of the equally good subsets is taken."""
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
        items: (batch, position) of the samples to choose from.
        lengths: tokens of each sample, by batch.
        starts: tokens of each batch that are in the bin already; they count against ``units``.
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


def _steps(lengths: Sequence[int], start: int, most: int) -> list[int]:
    """Reachable sums after none, one, two, ... of ``lengths``."""
    mask, sums = (1 << (most + 1)) - 1, 1 << start
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
    """Samples whose tokens add up to ``target``, earlier ones where there is a choice."""
    chosen = []
    for place in range(len(members) - 1, -1, -1):
        if not history[place] >> target & 1:
            batch, position = members[place]
            chosen.append(members[place])
            target -= lengths[batch][position]
    return chosen
