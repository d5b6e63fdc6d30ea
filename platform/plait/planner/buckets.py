"""Dynamic bucketing (LobRA Eq. 4): bucket boundaries that pad least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plait.core.errors import ConfigError, DataError
from plait.core.samples import Int64

BUCKETS = 16
INTERVAL = 256


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sequences sorted into length ranges.

    Attributes:
        lengths: upper boundary of each bucket, ascending: the length that its sequences are padded to.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: int


def dynamic_buckets(
    lengths: Sequence[int] | Int64,
    *,
    buckets: int = BUCKETS,
    interval: int = INTERVAL,
    required: Iterable[int] = (),
) -> Buckets:
    """At most ``buckets`` boundaries on multiples of ``interval`` with the least padding.

    Args:
        required: boundaries that are always kept, such as the most tokens that a configuration takes:
            a bucket across one would keep sequences from replicas that they fit into.

    Raises:
        DataError: no sequences, or one without tokens.
        ConfigError: more required boundaries than buckets.
    """
    s = np.asarray(lengths, dtype=np.int64)
    if len(s) == 0 or s.min() < 1:
        raise DataError(f"{len(s)} sequences", "Buckets need sequences of at least one token.")
    upper = -(-s // interval) * interval
    cuts = {int(cut) for cut in required if cut >= s.min()}
    for cut in sorted(cuts, reverse=True):
        upper = np.where((s <= cut) & (upper > cut), cut, upper)
    edges, counts = np.unique(upper, return_counts=True)
    keep = {int(edges[np.searchsorted(edges, cut, side="right") - 1]) for cut in cuts if cut < edges[-1]}
    if len(keep) + 1 > buckets:
        raise ConfigError(f"buckets={buckets}", f"{len(keep)} boundaries are required, and one for the rest.")
    chosen = _least_padding(edges, counts, buckets, keep)
    return fixed_buckets(s, [int(edges[index]) for index in chosen])


def fixed_buckets(lengths: Sequence[int] | Int64, boundaries: Sequence[int]) -> Buckets:
    """Sequences sorted into the given ascending boundaries; empty buckets are left out.

    Raises:
        DataError: a sequence above the last boundary.
    """
    s = np.asarray(lengths, dtype=np.int64)
    if s.max() > boundaries[-1]:
        raise DataError(f"a sequence of {s.max()} tokens", f"The last bucket ends at {boundaries[-1]}.")
    place = np.searchsorted(np.asarray(boundaries), s, side="left")
    counts = np.bincount(place, minlength=len(boundaries))
    kept = [(int(edge), int(count)) for edge, count in zip(boundaries, counts, strict=True) if count]
    return Buckets(tuple(edge for edge, _ in kept), tuple(count for _, count in kept), int(s.sum()))


def _least_padding(
    edges: Int64, counts: npt.NDArray[np.int64], buckets: int, keep: set[int]
) -> tuple[int, ...]:
    """Indices of the chosen edges, by dynamic programming over (edges covered, buckets used).

    cost[i, k]: padding when one bucket ends at edge k and takes edges i..k.
    """
    total = len(edges)
    number = np.concatenate([[0], np.cumsum(counts)])
    volume = np.concatenate([[0], np.cumsum(counts * edges)])
    start, stop = np.meshgrid(np.arange(total), np.arange(total), indexing="ij")
    cost = edges[stop] * (number[stop + 1] - number[start]) - (volume[stop + 1] - volume[start])
    cost = np.where(start <= stop, cost, np.iinfo(np.int64).max // 4).astype(np.float64)
    for index, edge in enumerate(edges):
        if int(edge) in keep:  # no bucket may cross a required boundary
            cost[: index + 1, index + 1 :] = np.inf
    best = np.full(total + 1, np.inf)
    best[0] = 0.0
    choices: list[npt.NDArray[np.int64]] = []
    for _ in range(min(buckets, total)):
        through = best[:total, None] + cost
        choices.append(through.argmin(axis=0))
        best = np.concatenate([[0.0], np.minimum(through.min(axis=0), np.inf)])
    chosen, end = [], total
    for choice in reversed(choices):
        chosen.append(end - 1)
        end = int(choice[end - 1])
        if end == 0:
            break
    return tuple(reversed(chosen))
