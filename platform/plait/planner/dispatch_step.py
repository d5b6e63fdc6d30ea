"""Assigns one step's samples to single replicas (LobRA Eq. 3), in training, in plans and in simulations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from plait.core.errors import CapacityError
from plait.core.plans import GlobalBatch
from plait.cost.replica import Configuration, ReplicaCost
from plait.cost.time import TimeModel
from plait.planner.buckets import fine_buckets
from plait.planner.dispatch import Dispatch, ReplicaKind, dispatch, spread
from plait.planner.packing import check_fits

Batches = tuple[GlobalBatch, ...]


def by_dispatch(
    batches: Sequence[GlobalBatch], replica_of: Sequence[int], replicas: Sequence[int]
) -> dict[int, tuple[GlobalBatch, ...]]:
    """Assign each sample to the replica that a dispatch such as :func:`plan_step` chose; samples of a global
    batch keep their order.

    Args:
        replica_of: the number of each sample's replica, batch by batch in their order.
        replicas: ids of the replicas, by that number.

    Raises:
        ValueError: there are not as many entries as samples.
    """
    chosen: dict[int, dict[int, list[int]]] = {replica: {} for replica in replicas}
    places = [(a, p) for a, batch in enumerate(batches) for p in range(len(batch.lengths))]
    for (batch, position), number in zip(places, replica_of, strict=True):
        chosen[replicas[number]].setdefault(batch, []).append(position)
    return {
        replica: tuple(_part(batches[batch], positions) for batch, positions in own.items())
        for replica, own in chosen.items()
    }


def _part(batch: GlobalBatch, positions: Sequence[int]) -> GlobalBatch:
    return replace(
        batch,
        samples=tuple(batch.samples[position] for position in positions),
        draws=tuple(batch.draws[position] for position in positions),
        lengths=tuple(batch.lengths[position] for position in positions),
    )


@dataclass(frozen=True, slots=True)
class Replicas:
    """The deployment to which steps are dispatched, as plain data, so that another process can plan for it.

    Attributes:
        drained: as of :class:`~plait.cost.replica.ReplicaCost`.
    """

    kinds: tuple[tuple[Configuration, TimeModel, int], ...]
    labelled_share: float = 1.0
    drained: bool = True

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
        ReplicaKind(
            replace(
                ReplicaCost.of(configuration, buckets.means, time, labelled_share=share),
                drained=replicas.drained,
            ),
            count,
        )
        for configuration, time, count in replicas.kinds
    ]
    found = spread(kinds, buckets.counts, dispatch(kinds, buckets.counts))
    place = np.searchsorted(buckets.lengths, lengths, side="left")
    replica_of = np.empty(len(lengths), dtype=np.int64)
    for bucket in range(len(buckets.lengths)):
        shares = [row[bucket] for row in found.assigned]
        replica_of[place == bucket] = np.repeat(np.arange(len(shares)), shares)
    return StepPlan(tuple(int(replica) for replica in replica_of), found)


class Dispatcher:
    """Shares the samples of global batches out to replicas; those that are alike are of one kind.

    Args:
        replicas: id, configuration and seconds of each.
        drained: whether pipelines drain after what is shared out at once.
    """

    def __init__(
        self, replicas: Sequence[tuple[int, Configuration, TimeModel]], *, drained: bool = True
    ) -> None:
        self._drained = drained
        alike: list[tuple[Configuration, TimeModel, list[int]]] = []
        for number, configuration, time in replicas:
            kind = next((each for each in alike if each[:2] == (configuration, time)), None)
            if kind is None:
                alike.append((configuration, time, [number]))
            else:
                kind[2].append(number)
        self._ids = [number for *_, numbers in alike for number in numbers]
        self._kinds = tuple((configuration, time, len(numbers)) for configuration, time, numbers in alike)
        self._capacity = max(configuration.max_tokens for configuration, *_ in alike)

    def parts(self, batches: Sequence[GlobalBatch], labelled_share: float) -> dict[int, Batches]:
        """Each replica's part of the global batches, by the replica's id in ascending order.

        Args:
            labelled_share: share of their tokens that reach head and loss.

        Raises:
            CapacityError: a sample fits into no replica.
        """
        check_fits(batches, capacity=self._capacity)
        if len(self._ids) == 1:
            return {self._ids[0]: tuple(batches)}
        lengths = [length for batch in batches for length in batch.lengths]
        plan = plan_step(lengths, Replicas(self._kinds, labelled_share, self._drained))
        parts = by_dispatch(batches, plan.replica_of, self._ids)
        return {number: parts[number] for number in sorted(parts)}
