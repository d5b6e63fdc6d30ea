"""Assigns one step's samples to single replicas, by load or by a dispatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from plait.core.errors import CapacityError
from plait.core.plans import GlobalBatch
from plait.cost.replica import Configuration, ReplicaCost
from plait.cost.time import TimeModel
from plait.planner.buckets import fine_buckets
from plait.planner.dispatch import Dispatch, ReplicaKind, dispatch, spread

Place = tuple[int, int]  # batch and position inside it


def by_load(
    batches: Sequence[GlobalBatch], speeds: Mapping[int, float], *, capacities: Mapping[int, int]
) -> dict[int, tuple[GlobalBatch, ...]]:
    """Assign samples, longest first, each to the replica that would finish it first.

    Returns:
        By replica, its part of each global batch that has samples there.

    Raises:
        CapacityError: a sample is too long for every replica.
    """
    places = _places(batches)
    places.sort(key=lambda place: (-_length(batches, place), place))
    load = dict.fromkeys(speeds, 0.0)
    chosen: dict[int, list[Place]] = {replica: [] for replica in speeds}
    for place in places:
        length = _length(batches, place)
        able = [replica for replica in speeds if length <= capacities[replica]]
        if not able:
            raise _nowhere(batches, place, max(capacities.values(), default=0))
        best = min(able, key=lambda replica: ((load[replica] + length) / speeds[replica], replica))
        load[best] += length
        chosen[best].append(place)
    return _parts(batches, chosen)


def by_dispatch(
    batches: Sequence[GlobalBatch], replica_of: Sequence[int], replicas: Sequence[int]
) -> dict[int, tuple[GlobalBatch, ...]]:
    """Assign each sample to the replica that a dispatch such as :func:`plan_step` chose.

    Args:
        replica_of: the number of each sample's replica, batch by batch in their order.
        replicas: ids of the replicas, by that number.

    Raises:
        ValueError: there are not as many entries as samples.
    """
    chosen: dict[int, list[Place]] = {replica: [] for replica in replicas}
    for place, number in zip(_places(batches), replica_of, strict=True):
        chosen[replicas[number]].append(place)
    return _parts(batches, chosen)


def _places(batches: Sequence[GlobalBatch]) -> list[Place]:
    return [(a, p) for a, batch in enumerate(batches) for p in range(len(batch.lengths))]


def _length(batches: Sequence[GlobalBatch], place: Place) -> int:
    return batches[place[0]].lengths[place[1]]


def _nowhere(batches: Sequence[GlobalBatch], place: Place, longest: int) -> CapacityError:
    batch = batches[place[0]]
    return CapacityError(
        f"sample {batch.samples[place[1]]} of job {batch.job} ({batch.split}) has "
        f"{batch.lengths[place[1]]} tokens",
        f"No replica takes more than {longest}.",
        "Use replicas with more devices, or shorten the samples with model.max_length.",
    )


def _parts(
    batches: Sequence[GlobalBatch], chosen: Mapping[int, Sequence[Place]]
) -> dict[int, tuple[GlobalBatch, ...]]:
    """Each replica's part of each global batch, samples in the global batch's order."""
    parts = {}
    for replica, places in chosen.items():
        own: dict[int, list[int]] = {}
        for batch, position in sorted(places):
            own.setdefault(batch, []).append(position)
        parts[replica] = tuple(_part(batches[batch], positions) for batch, positions in own.items())
    return parts


def _part(batch: GlobalBatch, positions: Sequence[int]) -> GlobalBatch:
    return replace(
        batch,
        samples=tuple(batch.samples[position] for position in positions),
        draws=tuple(batch.draws[position] for position in positions),
        lengths=tuple(batch.lengths[position] for position in positions),
    )


@dataclass(frozen=True, slots=True)
class Replicas:
    """The deployment to which steps are dispatched, as plain data, so that another process can plan for
    it."""

    kinds: tuple[tuple[Configuration, TimeModel, int], ...]
    labelled_share: float = 1.0

    @property
    def limits(self) -> tuple[int, ...]:
        """Most tokens of a microbatch, by configuration, ascending."""
        return tuple(sorted({configuration.max_tokens for configuration, *_ in self.kinds}))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The replica of each sample of a step.

    Attributes:
        replica_of: the number of each sample's replica.
    """

    replica_of: tuple[int, ...]
    expected: Dispatch


def plan_step(lengths: Sequence[int], replicas: Replicas) -> StepPlan:
    """Assign the samples of one step to the replicas.

    Raises:
        CapacityError: a sample fits into no replica.
    """
    longest = max(lengths)
    if longest > replicas.limits[-1]:
        raise CapacityError(
            f"a sample of {longest} tokens",
            f"The largest microbatch of this deployment has {replicas.limits[-1]} tokens.",
            "Shorten the samples (model.max_length), or allow a configuration with more memory.",
        )
    buckets = fine_buckets(lengths, required=replicas.limits)
    share = replicas.labelled_share
    kinds = [
        ReplicaKind(ReplicaCost.of(configuration, buckets.means, time, labelled_share=share), count)
        for configuration, time, count in replicas.kinds
    ]
    found = spread(kinds, buckets.counts, dispatch(kinds, buckets.counts))
    place = np.searchsorted(buckets.lengths, lengths, side="left")
    replica_of = np.empty(len(lengths), dtype=np.int64)
    for bucket in range(len(buckets.lengths)):
        shares = [row[bucket] for row in found.assigned]
        replica_of[place == bucket] = np.repeat(np.arange(len(shares)), shares)
    return StepPlan(tuple(int(replica) for replica in replica_of), found)
