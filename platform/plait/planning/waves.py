"""Plans and simulates a search on given devices of a described cluster: its waves with their deployments.

A seam: one function here makes the plans that `plait plan` compares and shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.plans import Replica
from plait.cost.clusters import Cluster
from plait.planner.deployment import Deployment
from plait.planning.expected import deploy_before, expected_step
from plait.planning.model_memory import ModelMemory
from plait.planning.outlook import ChangeOutlook
from plait.planning.workload import Phase, Workload
from plait.simulate.forecast import Forecast, PlanOptions, forecast


@dataclass(frozen=True, slots=True)
class Part:
    """A phase of a wave, with the forecast of its planned steps."""

    phase: Phase
    forecast: Forecast

    @property
    def seconds(self) -> float:
        """Seconds of all its steps."""
        return self.phase.scale * self.forecast.metrics.makespan


@dataclass(frozen=True, slots=True)
class Wave:
    """Jobs that train together, on their deployment."""

    deployment: Deployment
    change: ChangeOutlook | None
    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all its phases."""
        return sum(part.seconds for part in self.parts)


@dataclass(frozen=True, slots=True)
class Planned:
    """A search on the devices of a cluster.

    Attributes:
        cluster: these devices, with the configurations that fit.
    """

    cluster: Cluster
    waves: tuple[Wave, ...]

    @property
    def parts(self) -> list[Part]:
        """The phases of all waves."""
        return [part for wave in self.waves for part in wave.parts]

    @property
    def seconds(self) -> float:
        """Seconds of all waves, and of the changes of deployment between them."""
        changes = [wave.change for wave in self.waves if wave.change is not None]
        restarts = self.cluster.restart_seconds * sum(change.changed for change in changes)
        return restarts + sum(wave.seconds for wave in self.waves)

    @property
    def device_seconds(self) -> float:
        """Device-seconds of all devices, including idle ones."""
        return self.seconds * sum(self.cluster.devices.values())


def plan_waves(
    workload: Workload,
    waves: Sequence[tuple[str, ...]],
    deployment: Deployment,
    cluster: Cluster,
    memory: ModelMemory | None,
) -> Planned:
    """Plan every wave on the first one's deployment, or on a new one from the wave on at which a change pays
    off.

    Raises:
        CapacityError: a sample fits into no replica that the cluster has devices for.
    """
    planned, change = list[Wave](), None
    for number, names in enumerate(waves, start=1):
        if number > 1:
            wave = expected_step(workload, names, cluster)
            deployment, change = deploy_before(number, deployment, wave, cluster.restart_seconds)
        parts = tuple(
            Part(phase, _forecast(workload, phase, deployment, cluster, memory))
            for phase in workload.phases(names)
        )
        planned.append(Wave(deployment, change, parts))
    return Planned(cluster, tuple(planned))


def _forecast(
    workload: Workload,
    phase: Phase,
    deployment: Deployment,
    cluster: Cluster,
    memory: ModelMemory | None,
) -> Forecast:
    single = [(configuration, cluster.of(configuration.kind)) for configuration in deployment.single]
    replicas = [Replica(i, c.tp, c.pp, c.layer_split, ()) for i, (c, _) in enumerate(single)]
    jobs = workload.named(tuple(phase.batches))
    options = PlanOptions(
        capacities={i: c.max_tokens for i, (c, _) in enumerate(single)},
        labelled_share=workload.labelled_share,
        hidden_size=cluster.kinds[0].hidden_size,
        bandwidths={i: profile.devices.link(c.devices) for i, (c, profile) in enumerate(single)},
        memory=None if memory is None else memory.of_jobs(jobs, workload.labelled_share),
        adapting=True,
        times={i: profile.time for i, (_, profile) in enumerate(single)},
    )
    return forecast(phase.batches, replicas, single[0][1].time, options)
