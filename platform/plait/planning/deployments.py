"""What each wave of a search runs on: a deployment for the first, a new one where the change pays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.core.errors import CapacityError
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import ReplicaCost
from plait.planner.buckets import dynamic_buckets
from plait.planner.deployment import Deployment, deploy
from plait.planner.deployment_bounds import relaxation_bound
from plait.planner.deployment_change import Change, best_equal_replicas, weigh_change
from plait.planner.dispatch import dispatch, spread
from plait.planner.dispatch_search import ReplicaKind
from plait.planning.outlook import ChangeOutlook
from plait.planning.workload import Workload


@dataclass(frozen=True, slots=True)
class Expected:
    """The mean step of a wave on a cluster.

    Attributes:
        costs: of every configuration that the cluster holds, by bucket.
        counts: sequences of each bucket.
        steps: of the wave, until its longest job ends.
        devices: of the cluster.
    """

    costs: tuple[ReplicaCost, ...]
    counts: tuple[int, ...]
    steps: int
    devices: int

    @classmethod
    def of(cls, workload: Workload, names: Sequence[str], profile: ClusterProfile) -> Expected:
        """Of the jobs ``names``, which train together."""
        allowed = profile.allowed
        planned = max(len(workload.batches[name]) for name in names)
        buckets = dynamic_buckets(
            workload.step_lengths(names), required={each.max_tokens for each in allowed}
        )
        costs = tuple(
            ReplicaCost.of(each, buckets.lengths, profile.time, labelled_share=workload.labelled_share)
            for each in allowed
        )
        counts = tuple(math.ceil(count / planned) for count in buckets.counts)
        steps = max(workload.steps[name] for name in names)
        return cls(costs, counts, steps, profile.devices.count)

    def deploy(self) -> Deployment:
        """The deployment with the least expected makespan."""
        return deploy(self.costs, self.counts, self.devices)

    def equal_replicas(self) -> Deployment:
        """The best one of equal replicas."""
        return best_equal_replicas(self.costs, self.counts, self.devices)

    def on(self, deployment: Deployment) -> Deployment | None:
        """The same replicas with this wave's step; None where one of its sequences fits into none of them."""
        by_configuration = {cost.configuration: cost for cost in self.costs}
        kinds = tuple(ReplicaKind(by_configuration[each], count) for each, count in deployment.shape)
        try:
            expected = spread(kinds, self.counts, dispatch(kinds, self.counts))
        except CapacityError:
            return None
        least = relaxation_bound(self.costs, self.counts, self.devices)
        return replace(deployment, kinds=kinds, expected=expected, bound=least, relaxation=least)


def deploy_before(
    number: int, current: Deployment, wave: Expected, restart_seconds: float
) -> tuple[Deployment, ChangeOutlook]:
    """What wave ``number`` runs on: ``current``, or a new deployment where changing to it pays or must be.

    Nothing is planned anew where even the bound of all deployments would not pay for the restart.
    """
    kept = wave.on(current)
    if kept is None:
        new = wave.deploy()
        return new, ChangeOutlook(number, wave.steps, None, str(new), new.makespan, None, None, changed=True)
    change = _weigh(kept, kept.bound, wave, restart_seconds)
    planned, seconds = None, kept.bound
    if change.pays:
        planned = wave.deploy()
        seconds = kept.makespan if planned.shape == kept.shape else planned.makespan
        change = _weigh(kept, seconds, wave, restart_seconds)
    outlook = ChangeOutlook(
        wave=number,
        steps=wave.steps,
        step_seconds=kept.makespan,
        replicas=None if planned is None else str(planned),
        new_step_seconds=seconds,
        saved=change.saved,
        break_even=change.break_even,
        changed=change.pays,
    )
    return planned if planned is not None and change.pays else kept, outlook


def _weigh(kept: Deployment, new_seconds: float, wave: Expected, restart_seconds: float) -> Change:
    return weigh_change(
        current_seconds=kept.makespan,
        new_seconds=new_seconds,
        steps_left=wave.steps,
        restart_seconds=restart_seconds,
    )
