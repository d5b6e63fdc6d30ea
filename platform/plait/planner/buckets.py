"""Dynamic bucketing (LobRA Eq. 4): bucket boundaries with the least padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from plait.core.errors import ConfigError, DataError
from plait.core.samples import Int64

BUCKETS = 16
STEP_BUCKETS = 8  # buckets of a mean step, for which deployments are searched
INTERVAL = 256
FINE = 256  # intervals up to the longest sequence, if lengths are taken as they are


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sequences sorted into length ranges.

    Attributes:
        lengths: upper boundary of each bucket, ascending: the length that its sequences are padded to.
        means: mean length of each bucket's sequences, in whole tokens.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: int
    means: tuple[int, ...]


def dynamic_buckets(
    lengths: Sequence[int] | Int64,
    *,
    buckets: int = BUCKETS,
    interval: int = INTERVAL,
    required: Iterable[int] = (),
) -> Buckets:
    """At most ``buckets`` boundaries on multiples of ``interval`` with the least padding.

    Args:
        required: boundaries that are always kept, such as the most tokens of a configuration: a bucket
            across one would keep sequences from replicas that they fit into.

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
        raise ConfigError(
            f"buckets={buckets}", f"{len(keep)} boundaries are required, plus one for the rest."
        )
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
    kept = np.flatnonzero(counts)
    means = np.bincount(place, weights=s, minlength=len(boundaries))[kept] / counts[kept]
    return Buckets(
        tuple(boundaries[int(index)] for index in kept),
        tuple(int(counts[index]) for index in kept),
        int(s.sum()),
        tuple(round(float(mean)) for mean in means),
    )


def fine_buckets(
    lengths: Sequence[int] | Int64, *, buckets: int = BUCKETS, required: Iterable[int] = ()
) -> Buckets:
    """Buckets represented by their mean lengths, for sequences that are packed and not padded.

    Args:
        required: as in :func:`dynamic_buckets`, so that a bucket's mean fits if its sequences do.
    """
    cuts = sorted(set(required))
    interval = max(1, int(max(lengths, default=1)) // FINE)
    return dynamic_buckets(lengths, buckets=max(buckets, len(cuts) + 1), interval=interval, required=cuts)


def mean_step(lengths: Sequence[int], steps: int, *, required: Iterable[int] = ()) -> Buckets:
    """The sequences of one mean step of ``steps``: their mean number, with the same distribution of lengths.

    Its longest sequence fits only if the longest of all does.

    Args:
        required: the most tokens of each configuration.
    """
    ordered, cuts = np.sort(np.asarray(lengths, dtype=np.int64)), sorted(set(required))
    parts = np.array_split(ordered, max(1, round(len(ordered) / steps)))
    step = [round(float(part.mean())) for part in parts]
    least = max((cut + 1 for cut in cuts if cut < ordered[-1]), default=1)
    step[-1] = max(step[-1], least)
    return fine_buckets(step, buckets=STEP_BUCKETS, required=cuts)


def _least_padding(edges: Int64, counts: Int64, buckets: int, keep: set[int]) -> tuple[int, ...]:
    """Indices of the chosen edges, by dynamic programming over (edges covered, buckets used).

    cost[i, k] is the padding of a bucket that ends at edge k and covers edges i..k.
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
    choices: list[Int64] = []
    for _ in range(min(buckets, total)):
        through = best[:total, None] + cost
        choices.append(through.argmin(axis=0))
        best = np.concatenate([[0.0], through.min(axis=0)])
    chosen, end = [], total
    for choice in reversed(choices):
        chosen.append(end - 1)
        end = int(choice[end - 1])
        if end == 0:
            break
    return tuple(reversed(chosen))
