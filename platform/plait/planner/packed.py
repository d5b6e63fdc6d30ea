"""Seconds of dispatched sequences after packing, in place of the search's bound for all packings.

A seam: only here does the search for a deployment use the engine's packer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch

import numpy as np

from plait.core.samples import Int64
from plait.cost.replica import ReplicaCost
from plait.planner.dispatch import Dispatch, ReplicaKind
from plait.planner.packing import first_fit_decreasing
from plait.planner.packing_exact import PackingLimits, solve_packing

LIMITS = PackingLimits(exact_samples=0, nodes=0)  # subset sums only


def as_packed(replicas: Sequence[ReplicaKind], chosen: Dispatch) -> Dispatch:
    """A dispatch over single replicas with the seconds of its packed sequences, at least those that it
    had."""
    known: dict[tuple[int, tuple[int, ...]], float] = {}
    seconds = []
    for replica, row in zip(replicas, chosen.assigned, strict=True):
        key = id(replica.cost), row
        if key not in known:
            known[key] = packed_seconds(replica.cost, row)
        seconds.append(known[key])
    return replace(chosen, seconds=tuple(seconds))


@singledispatch
def packed_seconds(cost: ReplicaCost, counts: Sequence[int]) -> float:
    """T for counts[j] sequences of bucket j (R,), packed; a pipeline's capacity is halved if that helps."""
    if not any(counts):
        return cost.seconds(counts)
    lengths = [int(n) for n, count in zip(cost.lengths, counts, strict=True) for _ in range(count)]
    place = [j for j, count in enumerate(counts) for _ in range(count)]
    least = int(cost.microbatches(np.array([counts]))[0])
    capacity, seconds = cost.configuration.max_tokens, list[float]()
    while True:
        rows = _packed(lengths, place, len(counts), capacity, least if not seconds else 0)
        seconds.append(_seconds(cost, rows))
        capacity //= 2
        if not cost.ramp or capacity < max(lengths) or len(rows) == len(lengths):
            return min(seconds)


def _packed(lengths: Sequence[int], place: Sequence[int], buckets: int, capacity: int, least: int) -> Int64:
    """Sequences of each bucket in each microbatch (n, R), for the first packing with ``least``
    microbatches."""
    bins = first_fit_decreasing([lengths], capacity=capacity)
    if least and len(bins) > least:
        bins = [list(items) for items in solve_packing([lengths], capacity=capacity, limits=LIMITS).bins]
    rows = np.zeros((len(bins), buckets), dtype=np.int64)
    for number, items in enumerate(bins):
        for _, position in items:
            rows[number, place[position]] += 1
    return rows


def _seconds(cost: ReplicaCost, rows: Int64) -> float:
    """T of these microbatches (n, R)."""
    each = cost.fixed + rows @ cost.each.T
    return float(each.sum(axis=0).max() + cost.ramp * each.max())
