"""How LobRA's artifact deals a step's sequences to single replicas (PKU-DAIR/Hetu, lobra/trainer).

A dispatch says how many sequences of each bucket a kind of replica takes. The tasks fill these numbers in
their order, and what a kind has of one task is sorted by length and dealt to its replicas in turn, from the
first one on for every task. So replicas of a kind do not take the same, and the last gets longer sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plait.core.samples import Int64
from plait.planner.buckets import Buckets
from plait.planner.dispatch import ReplicaKind


def counts_by_task(buckets: Buckets, batch: Int64, sizes: Sequence[int]) -> Int64:
    """Sequences of each task and bucket (tasks, R); the first ``sizes[0]`` are the first task's."""
    places = np.searchsorted(buckets.lengths, batch)
    tasks = np.split(places, np.cumsum(sizes)[:-1])
    return np.array([np.bincount(each, minlength=len(buckets.lengths)) for each in tasks])


def dealt(kinds: Sequence[ReplicaKind], assigned: Sequence[Sequence[int]], tasks: Int64) -> list[Int64]:
    """Sequences of each bucket that each replica takes, (replicas of the kind, R) for each kind.

    Args:
        assigned: of each bucket, by kind, as a dispatch has it.
        tasks: of each bucket, by task; their sum is that of ``assigned``.
    """
    wanted = np.array(assigned, dtype=np.int64)
    shares = [np.zeros((kind.count, tasks.shape[1]), dtype=np.int64) for kind in kinds]
    for task in tasks:
        left = task.copy()
        for row, kind, share in zip(wanted, kinds, shares, strict=True):
            taken = np.minimum(row, left)
            row -= taken
            left -= taken
            ascending = np.repeat(np.arange(len(taken)), taken)
            for replica in range(kind.count):
                share[replica] += np.bincount(ascending[replica :: kind.count], minlength=len(taken))
    return shares


def dealt_seconds(kinds: Sequence[ReplicaKind], assigned: Sequence[Sequence[int]], tasks: Int64) -> float:
    """Seconds of the slowest replica."""
    shares = dealt(kinds, assigned, tasks)
    return max(float(kind.cost.seconds_many(share).max()) for kind, share in zip(kinds, shares, strict=True))
