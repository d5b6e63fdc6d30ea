"""The plan of a search on a cluster that is only described: deployment, groups, schedule, simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from plait.cost.profiles import ClusterProfile
from plait.planner.deployment import Deployment
from plait.planner.dispatch_step import Replicas, plan_step
from plait.planning.deployments import Expected, deploy_before
from plait.planning.fitting import fitting
from plait.planning.here import NOT_REPEATED, TRUNCATED, WAVES, fill_waves
from plait.planning.model_memory import ModelMemory
from plait.planning.outlook import ChangeOutlook, GroupOutlook, Outlook, ReplicaOutlook, SimulatedOutlook
from plait.planning.workload import Workload
from plait.plans import Microbatch, Replica
from plait.settings import RunSettings
from plait.simulate.forecast import Forecast, PlanOptions, forecast

COMPUTED = "computed from the model's sizes"
RECOMPUTED = "With engine.checkpointing=true: each layer's forward pass is taken to run twice."


@dataclass(frozen=True, slots=True)
class _Wave:
    names: tuple[str, ...]
    scale: float
    deployment: Deployment
    change: ChangeOutlook | None
    forecast: Forecast


def plan_described(
    workload: Workload,
    settings: RunSettings,
    profile: ClusterProfile,
    memory: ModelMemory | None,
    *,
    tokeniser: str,
    on_wave: Callable[[Forecast], None] | None = None,
) -> Outlook:
    """Deploy for the first wave's mean step, anew for a later one where that pays; plan and simulate all.

    Args:
        workload: of the search.
        settings: how many jobs train at once.
        profile: of the cluster.
        memory: of its model; None predicts no bytes.
        tokeniser: whose lengths the samples have.
        on_wave: is given each wave's forecast, for a timeline.

    Raises:
        CapacityError: a sample fits into no replica that the cluster has devices and memory for.
    """
    if settings.engine.checkpointing:
        profile = profile.recomputing()
    limit = min(settings.search.parallel, settings.planner.max_jobs or settings.search.parallel)
    waves = fill_waves([job.name for job in workload.jobs], lambda names: len(names) <= limit)
    published, share = profile, settings.planner.memory_share
    profile = fitting(profile, memory, workload, share=share, together=limit)
    first = Expected.of(workload, waves[0], profile)
    planned = _planned(workload, waves, first.deploy(), profile, memory)
    if on_wave is not None:
        for wave in planned:
            on_wave(wave.forecast)
    return replace(
        _outlook(workload, profile, planned, first.equal_replicas()),
        assumptions=_assumptions(workload, settings, published, planned, tokeniser),
    )


def _planned(
    workload: Workload,
    waves: Sequence[tuple[str, ...]],
    deployment: Deployment,
    profile: ClusterProfile,
    memory: ModelMemory | None,
) -> list[_Wave]:
    """Every wave on the first one's deployment, or on a new one from the wave on where the change pays."""
    planned, change = list[_Wave](), None
    for number, names in enumerate(waves, start=1):
        if number > 1:
            wave = Expected.of(workload, names, profile)
            deployment, change = deploy_before(number, deployment, wave, profile.restart_seconds)
        found = _forecast(workload, names, deployment, profile, memory)
        planned.append(_Wave(names, workload.scale(names), deployment, change, found))
    return planned


def _forecast(
    workload: Workload,
    names: tuple[str, ...],
    deployment: Deployment,
    profile: ClusterProfile,
    memory: ModelMemory | None,
) -> Forecast:
    kinds = deployment.shape
    single = [configuration for configuration, count in kinds for _ in range(count)]
    replicas = [Replica(i, c.tp, c.pp, (), ()) for i, c in enumerate(single)]
    to, jobs = Replicas(kinds, profile.time, workload.labelled_share), workload.named(names)
    options = PlanOptions(
        capacities={i: c.max_tokens for i, c in enumerate(single)},
        labelled_share=workload.labelled_share,
        hidden_size=0 if profile.shape is None else profile.shape["hidden_size"],
        bandwidths={i: profile.devices.link(c.devices) for i, c in enumerate(single)},
        dispatch=(lambda lengths: plan_step(lengths, to).replica_of) if len(kinds) > 1 else None,
        memory=None if memory is None else memory.of_jobs(jobs, workload.labelled_share),
    )
    return forecast({name: workload.batches[name] for name in names}, replicas, profile.time, options)


def _outlook(
    workload: Workload,
    profile: ClusterProfile,
    waves: Sequence[_Wave],
    equal: Deployment,
) -> Outlook:
    devices, deployment = profile.devices, waves[0].deployment
    changes = tuple(wave.change for wave in waves if wave.change is not None)
    restarts = profile.restart_seconds * sum(change.changed for change in changes)
    return Outlook(
        cluster=profile.name,
        devices=f"{devices.count} × {devices.kind}",
        profile=f"{profile.model}, {profile.dtype}: {profile.source}",
        replicas=_replicas(waves),
        groups=tuple(
            group for number, wave in enumerate(waves, start=1) for group in _groups(workload, wave, number)
        ),
        microbatches=round(sum(wave.scale * wave.forecast.metrics.microbatches for wave in waves)),
        microbatches_alone=round(sum(wave.scale * wave.forecast.alone.microbatches for wave in waves)),
        assumptions=(),
        gap=deployment.gap,
        step_seconds=deployment.makespan,
        equal_replicas=str(equal),
        equal_step_seconds=equal.makespan,
        changes=changes,
        simulated=tuple(_simulated(wave, number) for number, wave in enumerate(waves, start=1)),
        predicted_seconds=restarts + sum(wave.scale * wave.forecast.metrics.makespan for wave in waves),
        device_seconds=restarts * devices.count
        + sum(wave.scale * wave.forecast.metrics.device_seconds for wave in waves),
        device_seconds_alone=sum(wave.scale * wave.forecast.alone.device_seconds for wave in waves),
    )


def _simulated(wave: _Wave, number: int) -> SimulatedOutlook:
    metrics = wave.forecast.metrics
    return SimulatedOutlook(
        wave=number,
        tokens_per_second=metrics.tokens_per_second,
        mean_completion=wave.scale * metrics.mean_completion,
        bubble=metrics.bubble,
        padding_share=metrics.padding_share,
        communication_bytes=round(wave.scale * metrics.communication_bytes),
        peak_tokens=max(metrics.peak_tokens.values(), default=0),
        noops=round(wave.scale * metrics.noops),
    )


def _replicas(waves: Sequence[_Wave]) -> tuple[ReplicaOutlook, ...]:
    """Those of the first deployment, with the most bytes of all waves that it serves."""
    first = waves[0]
    served = [wave.forecast for wave in waves if wave.deployment.shape == first.deployment.shape]
    found = []
    for configuration, count in first.deployment.shape:
        own = [
            each
            for each in first.forecast.plan.replicas
            if (each.tp, each.pp) == (configuration.tp, configuration.pp)
        ]
        sizes = [each.replica_bytes.get(replica.id) for each in served for replica in own]
        known = [size for size in sizes if size is not None]
        found.append(
            ReplicaOutlook(
                configuration.tp,
                configuration.pp,
                count,
                configuration.max_tokens,
                own[0].layer_split,
                max(known, default=None),
                COMPUTED if known else "",
            )
        )
    return tuple(found)


def _assumptions(
    workload: Workload,
    settings: RunSettings,
    profile: ClusterProfile,
    waves: Sequence[_Wave],
    tokeniser: str,
) -> tuple[str, ...]:
    lines = [
        f"Seconds are simulated for {profile.model}; samples have the lengths that the tokeniser of "
        f"{tokeniser} gives them.",
        f"Most tokens of a microbatch are those of table {profile.table!r}, which the published system ran, "
        "or fewer where memory does not take them.",
        WAVES,
    ]
    if settings.engine.checkpointing:
        lines.append(RECOMPUTED)
    if workload.truncated:
        lines.append(TRUNCATED)
    limits = dict.fromkeys(wave.deployment.limit_hit for wave in waves)
    lines += [
        f"The search for a deployment met its limit ({limit}): the best that was found by then is taken."
        for limit in limits
        if limit is not None
    ]
    if not all(wave.forecast.plan.choices["packing repeats"] for wave in waves):
        lines.append(NOT_REPEATED)
    if not any(wave.forecast.replica_bytes for wave in waves):
        return (*lines, "Bytes are unknown: the cluster does not give the sizes of its model.")
    lines.append(f"Bytes are computed from {profile.model}'s sizes for Plait's own engine.")
    reduced = dict.fromkeys(
        f"{configuration} takes {configuration.max_tokens:,} tokens"
        for wave in waves
        for configuration, _ in wave.deployment.shape
        if configuration not in profile.configurations
    )
    if reduced:
        available = settings.planner.memory_share * profile.devices.memory_bytes / 2**30
        lines.append(
            f"Reduced, since {available:.1f} GiB of a device may be used "
            f"(planner.memory_share={settings.planner.memory_share}): {', '.join(reduced)}."
            + ("" if settings.engine.checkpointing else " engine.checkpointing=true takes less memory.")
        )
    return tuple(lines)


def _groups(workload: Workload, wave: _Wave, number: int) -> list[GroupOutlook]:
    found = []
    items = [item for item in wave.forecast.plan.schedule if isinstance(item, Microbatch) and item.segments]
    for group in wave.forecast.plan.groups:
        scale, predicted = workload.scale(group.jobs), group.predicted
        assert predicted.seconds is not None
        assert predicted.device_seconds is not None
        own = [item for item in items if any(each.job in group.jobs for each in item.segments)]
        found.append(
            GroupOutlook(
                wave=number,
                jobs=group.jobs,
                steps=sum(workload.steps[name] for name in group.jobs),
                microbatches=round(scale * len(own)),
                predicted_seconds=wave.scale * predicted.seconds,
                device_seconds=wave.scale * predicted.device_seconds,
                predicted_bytes=predicted.bytes,
            )
        )
    return found
