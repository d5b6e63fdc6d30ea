"""Chooses devices and replicas of a described cluster for the mean step of a wave's jobs.

A seam: these decisions precede any simulation, and are tested without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.core.errors import CapacityError, ConfigError
from plait.cost.clusters import HOUR, Cluster
from plait.cost.replica import ReplicaCost
from plait.planner.buckets import mean_step
from plait.planner.deployment import Deployment, best_equal_replicas, deploy, relaxation_bound
from plait.planner.deployment_patterns import Devices
from plait.planner.dispatch import ReplicaKind, dispatch, single, spread
from plait.planner.packed import as_packed
from plait.planner.renting import ENUMERATED, Rented, rent
from plait.planning.outlook import ChangeOutlook
from plait.planning.workload import Workload


@dataclass(frozen=True, slots=True)
class Expected:
    """The mean step of a wave on a cluster.

    Attributes:
        steps: number of steps of the wave, until its longest job ends.
    """

    costs: tuple[ReplicaCost, ...]
    counts: tuple[int, ...]
    steps: int
    devices: Devices

    @classmethod
    def of(cls, workload: Workload, names: Sequence[str], cluster: Cluster) -> Expected:
        """The mean step of the jobs ``names`` training together."""
        allowed = [(each, profile.time) for profile in cluster.kinds for each in profile.allowed]
        planned = max(len(workload.batches[name]) for name in names)
        step = mean_step(
            workload.step_lengths(names), planned, required={each.max_tokens for each, _ in allowed}
        )
        share = workload.labelled_share
        costs = tuple(ReplicaCost.of(each, step.means, time, labelled_share=share) for each, time in allowed)
        return cls(costs, step.counts, max(workload.steps[name] for name in names), cluster.devices)

    def rent(self, rates: Mapping[str, float] | None, *, slack: float, longest: int) -> Rented:
        """As many devices as pay off, with a deployment on them; arguments as in :func:`rent`."""
        return rent(self.costs, self.counts, self.devices, rates=rates, slack=slack, longest=longest)

    def deploy(self) -> Deployment:
        """The deployment with the least expected makespan."""
        return deploy(self.costs, self.counts, self.devices, most_enumerated=ENUMERATED)

    def equal_replicas(self) -> Deployment:
        """The best deployment of equal replicas."""
        return best_equal_replicas(self.costs, self.counts, self.devices)

    def on(self, deployment: Deployment) -> Deployment | None:
        """The same replicas for this wave's step; None if one of its sequences fits into none of them."""
        by_configuration = {cost.configuration: cost for cost in self.costs}
        kinds = tuple(ReplicaKind(by_configuration[each], count) for each, count in deployment.shape)
        try:
            expected = spread(kinds, self.counts, dispatch(kinds, self.counts))
        except CapacityError:
            return None
        least = relaxation_bound(self.costs, self.counts, self.devices)
        return replace(deployment, kinds=kinds, expected=as_packed(single(kinds), expected), bound=least)


def rates_of(objective: str, cluster: Cluster) -> dict[str, float] | None:
    """Price of a device-second of each kind under the objective; None if that is time.

    Raises:
        ConfigError: the objective is money, and a price is not known.
    """
    if objective == "time":
        return None
    if objective == "device_seconds":
        return dict.fromkeys(cluster.devices, 1.0)
    if cluster.prices is None:
        raise ConfigError(
            "planner.objective=money",
            "The price of each kind of device must be known.",
            "Set cluster.price_per_device_hour, and for each of cluster.kinds if their prices differ.",
        )
    return {kind: price / HOUR for kind, price in cluster.prices.items()}


def deploy_before(
    number: int, current: Deployment, wave: Expected, restart_seconds: float
) -> tuple[Deployment, ChangeOutlook]:
    """The deployment of wave ``number``: ``current``, or a new one if the change pays off or is required.

    No new one is planned if even the bound of all deployments does not justify a restart.
    """
    kept = wave.on(current)
    if kept is None:
        new = wave.deploy()
        return new, ChangeOutlook(number, wave.steps, None, str(new), new.makespan, None, None, changed=True)
    planned, seconds = None, kept.bound
    if _saved(kept, seconds, wave, restart_seconds) > 0:
        planned = wave.deploy()
        seconds = kept.makespan if planned.shape == kept.shape else planned.makespan
    saved, gained = _saved(kept, seconds, wave, restart_seconds), kept.makespan - seconds
    outlook = ChangeOutlook(
        wave=number,
        steps=wave.steps,
        step_seconds=kept.makespan,
        replicas=None if planned is None else str(planned),
        new_step_seconds=seconds,
        saved=saved,
        break_even=int(-(-restart_seconds // gained)) if gained > 0 else None,
        changed=saved > 0,
    )
    return planned if planned is not None and saved > 0 else kept, outlook


def _saved(kept: Deployment, new_seconds: float, wave: Expected, restart_seconds: float) -> float:
    """Seconds that a new deployment saves over the wave's steps, minus the restart."""
    return (kept.makespan - new_seconds) * wave.steps - restart_seconds
