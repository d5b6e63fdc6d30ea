"""The plan of a search on a cluster that is only described: deployment, groups, schedule, simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from plait.core.errors import CapacityError
from plait.core.plans import Microbatch, Replica
from plait.core.settings import RunSettings
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import Configuration, ReplicaCost, even_split
from plait.planner.buckets import dynamic_buckets
from plait.planner.deployment import Deployment, best_equal_replicas, deploy, relaxation_bound
from plait.planner.dispatch import ReplicaKind, dispatch, spread
from plait.planner.dispatch_step import Replicas, plan_step
from plait.planning.here import NOT_REPEATED, TRUNCATED, WAVES, fill_waves
from plait.planning.model_memory import ModelMemory, fitting
from plait.planning.outlook import ChangeOutlook, GroupOutlook, Outlook, ReplicaOutlook, SimulatedOutlook
from plait.planning.workload import Phase, Workload
from plait.simulate.events import simulate
from plait.simulate.forecast import Forecast, PlanOptions, forecast, job_by_job
from plait.simulate.report import Bubble, Metrics

COMPUTED = "computed from the model's sizes"
RECOMPUTED = "With engine.checkpointing=true, each layer's forward pass is assumed to run twice."


@dataclass(frozen=True, slots=True)
class Expected:
    """The mean step of a wave on a cluster.

    Attributes:
        steps: of the wave, until its longest job ends.
    """

    costs: tuple[ReplicaCost, ...]
    counts: tuple[int, ...]
    steps: int
    devices: int

    @classmethod
    def of(cls, workload: Workload, names: Sequence[str], profile: ClusterProfile) -> Expected:
        """The mean step of the jobs ``names``, which train together."""
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
        return replace(deployment, kinds=kinds, expected=expected, bound=least)


def deploy_before(
    number: int, current: Deployment, wave: Expected, restart_seconds: float
) -> tuple[Deployment, ChangeOutlook]:
    """The deployment of wave ``number``: ``current``, or a new one where the change pays or is required.

    No new one is planned where even the bound of all deployments is not worth a restart for the restart.
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
    """Seconds that a new deployment saves over the wave's steps, the restart taken off."""
    return (kept.makespan - new_seconds) * wave.steps - restart_seconds


def side_by_side(workload: Workload, profile: ClusterProfile) -> float:
    """Device-seconds of all jobs without Plait: each alone on the kind of replica that is cheapest for it.

    Each step is waited for. Idle devices are not counted.
    """
    return sum(
        min(
            _device_seconds(workload, job.name, profile, each)
            for each in profile.configurations
            if each.max_tokens >= workload.longest[job.name]
        )
        for job in workload.jobs
    )


def _device_seconds(
    workload: Workload, name: str, profile: ClusterProfile, configuration: Configuration
) -> float:
    split = even_split(profile.time.layers, configuration.pp)
    replica = Replica(0, configuration.tp, configuration.pp, split, ())
    options = PlanOptions(
        capacities={0: configuration.max_tokens},
        labelled_share=workload.labelled_share,
        hidden_size=profile.hidden_size,
        bandwidths={0: profile.devices.link(configuration.devices)},
    )
    (phase,) = workload.phases([name])
    run = simulate(job_by_job(phase.batches, [replica], profile.time, options))
    return configuration.devices * phase.scale * run.makespan


@dataclass(frozen=True, slots=True)
class _Part:
    """A phase of a wave, with the forecast of its planned steps."""

    phase: Phase
    forecast: Forecast

    @property
    def seconds(self) -> float:
        """Seconds of all its steps."""
        return self.phase.scale * self.forecast.metrics.makespan


@dataclass(frozen=True, slots=True)
class _Wave:
    deployment: Deployment
    change: ChangeOutlook | None
    parts: tuple[_Part, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all its phases."""
        return sum(part.seconds for part in self.parts)


def plan_described(
    workload: Workload,
    settings: RunSettings,
    profile: ClusterProfile,
    memory: ModelMemory | None,
    *,
    tokeniser: str,
    on_wave: Callable[[Forecast], None] | None = None,
) -> Outlook:
    """Deploy for the first wave's mean step, again for a later one where that pays; plan and simulate all.

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
            on_wave(wave.parts[0].forecast)
    return replace(
        _outlook(profile, planned, first.equal_replicas()),
        device_seconds_side_by_side=side_by_side(workload, profile),
        assumptions=_assumptions(settings, published, planned, tokeniser),
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
        parts = tuple(
            _Part(phase, _forecast(workload, phase, deployment, profile, memory))
            for phase in workload.phases(names)
        )
        planned.append(_Wave(deployment, change, parts))
    return planned


def _forecast(
    workload: Workload,
    phase: Phase,
    deployment: Deployment,
    profile: ClusterProfile,
    memory: ModelMemory | None,
) -> Forecast:
    kinds = deployment.shape
    single = [configuration for configuration, count in kinds for _ in range(count)]
    replicas = [Replica(i, c.tp, c.pp, (), ()) for i, c in enumerate(single)]
    to, jobs = Replicas(kinds, profile.time, workload.labelled_share), workload.named(tuple(phase.batches))
    options = PlanOptions(
        capacities={i: c.max_tokens for i, c in enumerate(single)},
        labelled_share=workload.labelled_share,
        hidden_size=profile.hidden_size,
        bandwidths={i: profile.devices.link(c.devices) for i, c in enumerate(single)},
        dispatch=(lambda lengths: plan_step(lengths, to).replica_of) if len(kinds) > 1 else None,
        memory=None if memory is None else memory.of_jobs(jobs, workload.labelled_share),
        adapting=True,
    )
    return forecast(phase.batches, replicas, profile.time, options)


def _outlook(
    profile: ClusterProfile,
    waves: Sequence[_Wave],
    equal: Deployment,
) -> Outlook:
    devices, deployment = profile.devices, waves[0].deployment
    changes = tuple(wave.change for wave in waves if wave.change is not None)
    parts = [part for wave in waves for part in wave.parts]
    restarts = profile.restart_seconds * sum(change.changed for change in changes)
    return Outlook(
        cluster=profile.name,
        devices=f"{devices.count} × {devices.kind}",
        profile=f"{profile.model}, {profile.dtype}: {profile.source}",
        replicas=_replicas(waves),
        groups=tuple(group for number, wave in enumerate(waves, start=1) for group in _groups(wave, number)),
        microbatches=round(sum(each.phase.scale * each.forecast.metrics.microbatches for each in parts)),
        microbatches_alone=round(sum(each.phase.scale * each.forecast.alone.microbatches for each in parts)),
        assumptions=(),
        gap=deployment.gap,
        step_seconds=deployment.makespan,
        equal_replicas=str(equal),
        equal_step_seconds=equal.makespan,
        changes=changes,
        simulated=tuple(_simulated(wave, number) for number, wave in enumerate(waves, start=1)),
        predicted_seconds=restarts + sum(wave.seconds for wave in waves),
        device_seconds=restarts * devices.count
        + sum(each.phase.scale * each.forecast.metrics.device_seconds for each in parts),
        device_seconds_alone=sum(each.phase.scale * each.forecast.alone.device_seconds for each in parts),
    )


def _simulated(wave: _Wave, number: int) -> SimulatedOutlook:
    """A wave's figures: sums over its phases, shares weighted by their seconds."""
    every = [(part.phase.scale, part.forecast.metrics, part.seconds) for part in wave.parts]
    whole = sum(seconds for *_, seconds in every)

    def mean(of: Callable[[Metrics], float]) -> float:
        return sum(seconds * of(metrics) for _, metrics, seconds in every) / whole

    return SimulatedOutlook(
        wave=number,
        tokens_per_second=mean(lambda metrics: metrics.tokens_per_second),
        mean_completion=_mean_completion(wave),
        bubble=Bubble(
            total=mean(lambda metrics: metrics.bubble.total),
            fill_and_drain=mean(lambda metrics: metrics.bubble.fill_and_drain),
            imbalance=mean(lambda metrics: metrics.bubble.imbalance),
            raggedness=mean(lambda metrics: metrics.bubble.raggedness),
        ),
        padding_share=mean(lambda metrics: metrics.padding_share),
        communication_bytes=round(sum(scale * metrics.communication_bytes for scale, metrics, _ in every)),
        noops=round(sum(scale * metrics.noops for scale, metrics, _ in every)),
    )


def _mean_completion(wave: _Wave) -> float:
    """Mean over the jobs of the seconds until their last step."""
    ends: dict[str, float] = {}
    start = 0.0
    for part in wave.parts:
        own: dict[str, float] = {}
        for (job, _), seconds in part.forecast.run.steps.items():
            own[job] = max(seconds, own.get(job, 0.0))
        ends |= {job: start + part.phase.scale * seconds for job, seconds in own.items()}
        start += part.seconds
    return sum(ends.values()) / len(ends)


def _replicas(waves: Sequence[_Wave]) -> tuple[ReplicaOutlook, ...]:
    """The first deployment's replicas, with the most bytes of all waves that it serves."""
    first = waves[0]
    served = [
        part.forecast
        for wave in waves
        if wave.deployment.shape == first.deployment.shape
        for part in wave.parts
    ]
    plan = first.parts[0].forecast.plan
    found = []
    for configuration, count in first.deployment.shape:
        own = [each for each in plan.replicas if (each.tp, each.pp) == (configuration.tp, configuration.pp)]
        sizes = [each.replica_bytes.get(replica.id) for each in served for replica in own]
        known = [size for size in sizes if size is not None]
        found.append(
            ReplicaOutlook(
                configuration.tp,
                configuration.pp,
                count,
                int(plan.choices[f"capacity.{own[0].id}"] or 0),
                own[0].layer_split,
                max(known, default=None),
                COMPUTED if known else "",
            )
        )
    return tuple(found)


def _assumptions(
    settings: RunSettings, profile: ClusterProfile, waves: Sequence[_Wave], tokeniser: str
) -> tuple[str, ...]:
    parts = [part for wave in waves for part in wave.parts]
    lines = [
        f"Seconds are simulated for {profile.model}; sample lengths come from the tokeniser of {tokeniser}.",
        f"Capacities are those of the published system (table {profile.table!r}), or smaller if "
        "engine.capacity or memory requires it or a pipeline is faster with less.",
        "Side by side: each job trains alone on the kind of replica that is cheapest for it; idle devices "
        "are not counted. Job by job: one job at a time on the plan's replicas; all their devices are "
        "counted. Both wait for each step.",
        WAVES,
    ]
    if settings.engine.checkpointing:
        lines.append(RECOMPUTED)
    if any(part.phase.scale > 1 for part in parts):
        lines.append(TRUNCATED)
    limits = dict.fromkeys(wave.deployment.limit_hit for wave in waves)
    lines += [
        f"The search for a deployment reached its limit ({limit}); the best deployment found is used."
        for limit in limits
        if limit is not None
    ]
    if not all(part.forecast.plan.choices["packing repeats"] for part in parts):
        lines.append(NOT_REPEATED)
    if not any(part.forecast.replica_bytes for part in parts):
        return (*lines, "Memory is unknown, because the cluster does not define its model's sizes.")
    lines.append(f"Memory is computed from {profile.model}'s sizes for Plait's own engine.")
    reduced = dict.fromkeys(
        f"{configuration} takes {configuration.max_tokens:,} tokens"
        for wave in waves
        for configuration, _ in wave.deployment.shape
        if configuration not in profile.configurations
    )
    if reduced:
        available = settings.planner.memory_share * profile.devices.memory_bytes / 2**30
        lines.append(
            f"Capacity reduced, because {available:.1f} GiB of a device may be used "
            f"(planner.memory_share={settings.planner.memory_share}): {', '.join(reduced)}."
            + ("" if settings.engine.checkpointing else " engine.checkpointing=true needs less memory.")
        )
    return tuple(lines)


def _groups(wave: _Wave, number: int) -> list[GroupOutlook]:
    """The groups of every phase."""
    found, start = [], 0.0
    for part in wave.parts:
        plan, scale = part.forecast.plan, part.phase.scale
        items = [item for item in plan.schedule if isinstance(item, Microbatch)]
        for group in plan.groups:
            predicted = group.predicted
            assert predicted.seconds is not None
            assert predicted.device_seconds is not None
            own = [item for item in items if any(each.job in group.jobs for each in item.segments)]
            found.append(
                GroupOutlook(
                    wave=number,
                    jobs=group.jobs,
                    steps=part.phase.steps * len(group.jobs),
                    microbatches=round(scale * len(own)),
                    predicted_seconds=start + scale * predicted.seconds,
                    device_seconds=scale * predicted.device_seconds,
                    predicted_bytes=predicted.bytes,
                )
            )
        start += part.seconds
    return found
