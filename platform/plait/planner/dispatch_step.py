"""One step's samples to single replicas: buckets, dispatch, shares evened out; ahead of time if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np

from plait.core.errors import CapacityError
from plait.cost.replica import Configuration, ReplicaCost
from plait.cost.time import TimeModel
from plait.planner.buckets import BUCKETS, dynamic_buckets
from plait.planner.dispatch import Dispatch, dispatch, spread
from plait.planner.dispatch_search import ReplicaKind
from plait.planner.solver import Limits


@dataclass(frozen=True, slots=True)
class Replicas:
    """The deployment that steps are dispatched to; plain data, so that another process can plan for it.

    Attributes:
        kinds: configurations with their number of replicas, in the order of the replicas.
        time: seconds of microbatches.
        labelled_share: share of a sample's tokens that reach head and loss.
        buckets: most length ranges of a step.
    """

    kinds: tuple[tuple[Configuration, int], ...]
    time: TimeModel
    labelled_share: float = 1.0
    buckets: int = BUCKETS

    @property
    def limits(self) -> tuple[int, ...]:
        """Most tokens of a microbatch, by configuration, ascending."""
        return tuple(sorted({configuration.max_tokens for configuration, _ in self.kinds}))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Where each sample of a step goes.

    Attributes:
        replica_of: for each sample, the number of its replica.
        expected: what each replica is expected to take, and the bound.
        padding_share: of the bucketed lengths, for comparison with padded systems; packing stores none.
    """

    replica_of: tuple[int, ...]
    expected: Dispatch
    padding_share: float


def plan_step(lengths: Sequence[int], replicas: Replicas, limits: Limits | None = None) -> StepPlan:
    """Share the samples of one step out to the replicas.

    Args:
        lengths: tokens of each sample.
        limits: of the integer program; None takes the search of a few milliseconds alone.

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
    buckets = dynamic_buckets(lengths, buckets=replicas.buckets, required=replicas.limits)
    kinds = [
        ReplicaKind(
            ReplicaCost.of(
                configuration, buckets.lengths, replicas.time, labelled_share=replicas.labelled_share
            ),
            count,
        )
        for configuration, count in replicas.kinds
    ]
    found = spread(kinds, buckets.counts, dispatch(kinds, buckets.counts, limits))
    place = np.searchsorted(buckets.lengths, lengths, side="left")
    replica_of = np.empty(len(lengths), dtype=np.int64)
    for bucket in range(len(buckets.lengths)):
        shares = [row[bucket] for row in found.assigned]
        replica_of[place == bucket] = np.repeat(np.arange(len(shares)), shares)
    return StepPlan(tuple(int(replica) for replica in replica_of), found, buckets.padding_share)


class StepPlanner:
    """Plans the next step in another process while this one trains.

    Args:
        replicas: the deployment.
        executor: where plans are made; the caller shuts it down.
        limits: as in :func:`plan_step`.
    """

    def __init__(self, replicas: Replicas, executor: Executor, limits: Limits | None = None) -> None:
        self._replicas = replicas
        self._executor = executor
        self._limits = limits
        self._ahead: tuple[tuple[int, ...], Future[StepPlan]] | None = None

    def prepare(self, lengths: Sequence[int]) -> None:
        """Start on the next step's samples."""
        key = tuple(lengths)
        self._ahead = key, self._executor.submit(plan_step, key, self._replicas, self._limits)

    def take(self, lengths: Sequence[int]) -> StepPlan:
        """The plan of these samples: the prepared one where they are the same, else made now.

        Raises:
            CapacityError: a sample fits into no replica.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == tuple(lengths):
            return ahead[1].result()
        return plan_step(lengths, self._replicas, self._limits)
