"""The plan of a search on a cluster that is only described: deployment, groups, schedule, simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from plait.cost.profiles import ClusterProfile
from plait.cost.replica import ReplicaCost
from plait.planner.buckets import dynamic_buckets
from plait.planner.deployment import Deployment, deploy
from plait.planner.dispatch_step import Replicas, plan_step
from plait.planning.here import TRUNCATED, WAVES, fill_waves
from plait.planning.outlook import GroupOutlook, Outlook, ReplicaOutlook
from plait.planning.workload import Workload
from plait.plans import Microbatch, Replica
from plait.settings import RunSettings
from plait.simulate.forecast import Forecast, PlanOptions, forecast


@dataclass(frozen=True, slots=True)
class _Wave:
    names: tuple[str, ...]
    scale: float
    forecast: Forecast


def plan_described(
    workload: Workload,
    settings: RunSettings,
    profile: ClusterProfile,
    *,
    tokeniser: str,
    on_wave: Callable[[Forecast], None] | None = None,
) -> Outlook:
    """Deploy for the mean step of the first wave; plan and simulate every wave on that deployment.

    Args:
        workload: of the search.
        settings: how many jobs train at once.
        profile: of the cluster.
        tokeniser: whose lengths the samples have.
        on_wave: is given each wave's forecast, for a timeline.

    Raises:
        CapacityError: a sample fits into no replica that the cluster allows.
    """
    allowed = [c for c in profile.configurations if c.devices <= profile.devices.count]
    most = max((c.max_tokens for c in allowed), default=0)
    gib = profile.devices.memory_bytes / 2**30
    workload.check_fits(most, f"{profile.devices.count} × {profile.devices.kind} of {gib:.0f} GiB")
    limit = min(settings.search.parallel, settings.planner.max_jobs or settings.search.parallel)
    waves = fill_waves([job.name for job in workload.jobs], lambda names: len(names) <= limit)
    deployment = _deploy(workload, waves[0], profile)
    planned = [
        _Wave(names, workload.scale(names), _forecast(workload, names, deployment, profile))
        for names in waves
    ]
    if on_wave is not None:
        for wave in planned:
            on_wave(wave.forecast)
    return _outlook(workload, profile, deployment, planned, tokeniser)


def _deploy(workload: Workload, names: tuple[str, ...], profile: ClusterProfile) -> Deployment:
    allowed = [c for c in profile.configurations if c.devices <= profile.devices.count]
    lengths = workload.step_lengths(names)
    steps = max(len(workload.batches[name]) for name in names)
    buckets = dynamic_buckets(lengths, required={c.max_tokens for c in allowed})
    costs = [
        ReplicaCost.of(c, buckets.lengths, profile.time, labelled_share=workload.labelled_share)
        for c in allowed
    ]
    return deploy(costs, [math.ceil(count / steps) for count in buckets.counts], profile.devices.count)


def _forecast(
    workload: Workload, names: tuple[str, ...], deployment: Deployment, profile: ClusterProfile
) -> Forecast:
    kinds = tuple((kind.cost.configuration, kind.count) for kind in deployment.kinds)
    single = [configuration for configuration, count in kinds for _ in range(count)]
    replicas = [Replica(i, c.tp, c.pp, (), ()) for i, c in enumerate(single)]
    to = Replicas(kinds, profile.time, workload.labelled_share)
    options = PlanOptions(
        capacities={i: c.max_tokens for i, c in enumerate(single)},
        labelled_share=workload.labelled_share,
        dispatch=(lambda lengths: plan_step(lengths, to).replica_of) if len(kinds) > 1 else None,
    )
    return forecast({name: workload.batches[name] for name in names}, replicas, profile.time, options)


def _outlook(
    workload: Workload,
    profile: ClusterProfile,
    deployment: Deployment,
    waves: list[_Wave],
    tokeniser: str,
) -> Outlook:
    devices = profile.devices
    first = waves[0].forecast.plan
    splits = {(replica.tp, replica.pp): replica.layer_split for replica in first.replicas}
    configurations = [(kind.cost.configuration, kind.count) for kind in deployment.kinds]
    return Outlook(
        cluster=profile.name,
        devices=f"{devices.count} × {devices.kind}",
        profile=f"{profile.model}, {profile.dtype}: {profile.source}",
        replicas=tuple(
            ReplicaOutlook(c.tp, c.pp, count, c.max_tokens, splits[c.tp, c.pp]) for c, count in configurations
        ),
        groups=tuple(
            group for number, wave in enumerate(waves, start=1) for group in _groups(workload, wave, number)
        ),
        microbatches_alone=round(sum(wave.scale * wave.forecast.alone.microbatches for wave in waves)),
        assumptions=(
            f"Seconds are simulated for {profile.model}; samples have the lengths that the tokeniser of "
            f"{tokeniser} gives them.",
            f"Most tokens of a microbatch are those of table {profile.table!r}; bytes were not published.",
            WAVES,
            *((TRUNCATED,) if workload.truncated else ()),
        ),
        gap=deployment.gap,
        predicted_seconds=sum(wave.scale * wave.forecast.metrics.makespan for wave in waves),
        device_seconds=sum(wave.scale * wave.forecast.metrics.device_seconds for wave in waves),
        device_seconds_alone=sum(wave.scale * wave.forecast.alone.device_seconds for wave in waves),
    )


def _groups(workload: Workload, wave: _Wave, number: int) -> list[GroupOutlook]:
    found = []
    items = [item for item in wave.forecast.plan.schedule if isinstance(item, Microbatch) and item.segments]
    for group in wave.forecast.plan.groups:
        scale, predicted = workload.scale(group.jobs), group.predicted
        assert predicted.seconds is not None
        assert predicted.device_seconds is not None
        own = [item for item in items if item.segments[0].job in group.jobs]
        found.append(
            GroupOutlook(
                wave=number,
                jobs=group.jobs,
                steps=sum(workload.steps[name] for name in group.jobs),
                microbatches=round(scale * len(own)),
                predicted_seconds=wave.scale * predicted.seconds,
                device_seconds=wave.scale * predicted.device_seconds,
            )
        )
    return found
