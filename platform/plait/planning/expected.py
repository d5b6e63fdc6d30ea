"""The mean step of a wave's jobs on a described cluster, what a second of its devices costs, and whether a
later wave changes its replicas.

A seam: these decisions precede any simulation, and are tested without one.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.core.errors import ConfigError
from plait.cost.clusters import HOUR, Cluster
from plait.cost.replica import ReplicaCost
from plait.planner.buckets import mean_step
from plait.planner.deployment import Deployment
from plait.planner.weighing import MeanStep, weigh_change
from plait.planning.outlook import ChangeOutlook
from plait.planning.workload import Workload


def expected_step(workload: Workload, names: Sequence[str], cluster: Cluster) -> MeanStep:
    """The mean step of the jobs ``names`` training together on a cluster."""
    allowed = [(each, profile.time) for profile in cluster.kinds for each in profile.allowed]
    planned = max(len(workload.batches[name]) for name in names)
    lengths = [length for name in names for batch in workload.batches[name] for length in batch.lengths]
    step = mean_step(lengths, planned, required={each.max_tokens for each, _ in allowed})
    share = workload.labelled_share
    costs = tuple(ReplicaCost.of(each, step.means, time, labelled_share=share) for each, time in allowed)
    return MeanStep(costs, step.counts, max(workload.steps[name] for name in names), cluster.devices)


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
    number: int, current: Deployment, wave: MeanStep, restart_seconds: float
) -> tuple[Deployment, ChangeOutlook]:
    """The deployment of wave ``number``: ``current``, or a new one if the change pays off or is required.

    No new one is planned if even the bound of all deployments does not justify a restart.
    """
    change = weigh_change(current.shape, wave, restart_seconds)
    kept, planned = change.kept, change.planned
    gained = kept.makespan - change.seconds if kept is not None else 0.0
    outlook = ChangeOutlook(
        wave=number,
        steps=wave.steps,
        step_seconds=None if kept is None else kept.makespan,
        replicas=None if planned is None else str(planned),
        new_step_seconds=change.seconds,
        saved=change.saved,
        break_even=int(-(-restart_seconds // gained)) if gained > 0 else None,
        changed=change.pays,
    )
    chosen = planned if change.pays else kept
    assert chosen is not None  # without one that is kept, another was planned
    return chosen, outlook
