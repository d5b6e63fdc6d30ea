"""LobRA's sequences dealt to single replicas: by hand, and as sorting the sequences themselves gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plait.cost.replica import Configuration
from plait.cost.time import LayerTime, TimeModel
from plait.planner.buckets import fixed_buckets
from plait.planner.dispatch import ReplicaKind
from plait_bench.bucketed import BucketedCost
from plait_bench.lobra_dealing import counts_by_task, dealt, dealt_seconds

LENGTHS = (64, 128, 256)
MODEL = TimeModel(1, {1: LayerTime(1.0, 0.01, 0.0)})


def kind(count: int) -> ReplicaKind:
    return ReplicaKind(BucketedCost.of(Configuration(1, 1, 256), LENGTHS, MODEL), count)


def test_each_task_is_dealt_from_the_first_replica_on_shortest_first() -> None:
    tasks = np.array([[3, 0, 0], [1, 0, 2]])
    (two,) = dealt([kind(2)], [[4, 0, 2]], tasks)
    # First task: 64 | 64, then 64 to the first again. Second: 64 | 256, then 256.
    assert two.tolist() == [[3, 0, 1], [1, 0, 1]]


def test_tasks_fill_the_kinds_in_their_order() -> None:
    first, second = dealt([kind(1), kind(2)], [[2, 0, 0], [2, 0, 1]], np.array([[3, 0, 0], [1, 0, 1]]))
    assert first.tolist() == [[2, 0, 0]]
    assert second.tolist() == [[2, 0, 0], [0, 0, 1]]


def test_seconds_are_those_of_the_slowest_replica() -> None:
    tasks = np.array([[1, 0, 1], [1, 0, 1]])
    each = kind(2).cost
    assert dealt_seconds([kind(2)], [[2, 0, 2]], tasks) == each.seconds([0, 0, 2])  # not of [1, 0, 1]
    assert each.seconds([0, 0, 2]) > each.seconds([1, 0, 1])


@given(st.lists(st.lists(st.integers(1, 256), min_size=1, max_size=9), min_size=1, max_size=4), st.data())
def test_as_the_artifact_deals_the_sequences_themselves(tasks: list[list[int]], data: st.DataObject) -> None:
    batch = np.array([length for task in tasks for length in task])
    buckets = fixed_buckets(batch, LENGTHS)
    counts = counts_by_task(buckets, batch, [len(task) for task in tasks])
    assert counts.sum(axis=0).tolist() == list(buckets.counts)
    first = [data.draw(st.integers(0, count)) for count in buckets.counts]
    assigned = [first, [count - one for count, one in zip(buckets.counts, first, strict=True)]]
    replicas = [data.draw(st.integers(1, 3)) for _ in assigned]
    found = dealt([kind(each) for each in replicas], assigned, counts)
    left = [list(each) for each in assigned]
    held: list[list[list[int]]] = [[[] for _ in range(each)] for each in replicas]
    for task in tasks:
        own: list[list[int]] = [[] for _ in replicas]
        for length in sorted(task):
            place = int(np.searchsorted(buckets.lengths, length))
            takes = next(k for k, row in enumerate(left) if row[place])
            left[takes][place] -= 1
            own[takes].append(length)
        for mine, there in zip(own, held, strict=True):
            for number, length in enumerate(mine):
                there[number % len(there)].append(length)
    for shares, there in zip(found, held, strict=True):
        for share, lengths in zip(shares, there, strict=True):
            places = np.searchsorted(buckets.lengths, np.array(lengths, dtype=np.int64))
            assert share.tolist() == np.bincount(places, minlength=len(buckets.lengths)).tolist()
