"""Plans a search on a described cluster: devices, replicas and groups, all simulated.

A seam: the command only reads its arguments and prints; tests compare plans with brute force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from plait.core.errors import CapacityError
from plait.core.plans import Microbatch, Replica
from plait.core.settings import WHOLE, PlannerSettings, RunSettings
from plait.core.space import as_written
from plait.cost.clusters import Cluster
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import Configuration, even_split
from plait.planner.deployment import Deployment, best_equal_replicas
from plait.planner.deployment_patterns import Devices
from plait.planner.renting import rent
from plait.planner.weighing import MeanStep
from plait.planning.expected import expected_step, rates_of
from plait.planning.here import NOT_REPEATED, TRUNCATED, WAVES, fill_waves
from plait.planning.model_memory import ModelMemory, fitting, held_together
from plait.planning.outlook import (
    CandidateOutlook,
    DevicesOutlook,
    GroupOutlook,
    ObjectiveOutlook,
    Outlook,
    ReplicaOutlook,
    SimulatedOutlook,
    TrialOutlook,
)
from plait.planning.sharded import ShardedBase, sharded_bases
from plait.planning.waves import Planned, Wave, plan_waves
from plait.planning.workload import Workload
from plait.simulate.events import simulate
from plait.simulate.forecast import Forecast, PlanOptions, job_by_job
from plait.simulate.report import Bubble, Metrics

COMPUTED = "computed from the model's sizes"
RECOMPUTED = "With engine.checkpointing=true, each layer's forward pass is assumed to run twice."
SHAPES = "replicas"  # neither sharded nor of a given number
SHARDED = (
    "A sharded base gathers each layer, forward and backward, while the one before it runs, over the slowest "
    "link between its devices. These run in lockstep, and their microbatches are assumed to be equally long. "
    "Powers of two of the devices, and all, were weighed."
)
TIE = 1.005  # ratios below it are written 1.00
NO_ERROR = "no measured steps of this kind that were not used for fitting"


@dataclass(frozen=True, slots=True)
class _Weighed:
    """Replicas of which the first wave's mean step was expected.

    Attributes:
        cluster: the devices that they use.
        memory: of the model on these; None: unknown.
        value: the objective of the step.
        bound: proved lower bound of it.
    """

    deployment: Deployment
    cluster: Cluster
    memory: ModelMemory | None
    value: float
    bound: float


@dataclass(frozen=True, slots=True)
class _Search:
    """What is planned, independent of the devices.

    Attributes:
        shards: whether the base model may be sharded.
    """

    workload: Workload
    planner: PlannerSettings
    memory: ModelMemory | None
    together: int
    waves: Sequence[tuple[str, ...]]
    shards: bool = False

    def fitted(self, cluster: Cluster, memory: ModelMemory | None = None) -> Cluster:
        """The cluster with the configurations that fit."""
        share = self.planner.memory_share
        return fitting(cluster, memory or self.memory, self.workload, share=share, together=self.together)

    def first(self, cluster: Cluster) -> MeanStep:
        """The first wave's mean step."""
        return expected_step(self.workload, self.waves[0], cluster)

    def rate(self, cluster: Cluster) -> float:
        """The objective of a second on all of these devices."""
        rates = rates_of(self.planner.objective, cluster)
        return 1.0 if rates is None else sum(rates[kind] * each for kind, each in cluster.devices.items())

    def chosen(self, cluster: Cluster) -> tuple[Planned, ObjectiveOutlook, tuple[CandidateOutlook, ...]]:
        """The plan on as many devices as pay off in the first wave, and the replicas that were weighed.

        Raises:
            CapacityError: no replica fits, sharded or not.
        """
        found, refused = dict[str, _Weighed](), dict[str, CapacityError]()
        weighings: dict[str, Callable[[], _Weighed]] = {SHAPES: partial(self._rented, cluster)}
        for base in self._bases(cluster, every=True):
            weighings[str(base)] = partial(self._sharded, base)
        for name, weigh in weighings.items():
            try:
                found[name] = weigh()
            except CapacityError as error:
                refused[name] = error
        if not found:
            raise refused[SHAPES]
        by_time = self.planner.objective == "time"
        limit = (1.0 + self.planner.slack) * min(each.value for each in found.values())
        near = [each for each in found.values() if each.value <= limit]
        best = min(near, key=lambda each: _device_step(each) if by_time else each.deployment.makespan)
        bound = best.bound if best is found.get(SHAPES) else min(each.bound for each in found.values())
        gap = best.value / bound - 1.0 if best.value > bound else 0.0
        objective = ObjectiveOutlook(
            self.planner.objective, str(cluster), self.planner.slack, best.value, bound, gap
        )
        rows = tuple(self._row(name, found.get(name), refused.get(name), best) for name in weighings)
        planned = plan_waves(self.workload, self.waves, best.deployment, best.cluster, best.memory)
        return planned, objective, rows if len(rows) > 1 else ()

    def _bases(self, cluster: Cluster, *, every: bool) -> Iterator[ShardedBase]:
        if self.shards and self.memory is not None:
            yield from sharded_bases(cluster, self.memory, every=every)

    def _rented(self, cluster: Cluster) -> _Weighed:
        fitted = self.fitted(cluster)
        step = self.first(fitted)
        rented = rent(
            step.costs,
            step.counts,
            step.devices,
            rates=rates_of(self.planner.objective, cluster),
            slack=self.planner.slack,
            longest=max(self.workload.longest.values()),
        )
        deployment = rented.chosen.deployment
        used = fitted.with_devices(deployment.devices)
        return _Weighed(deployment, used, self.memory, rented.chosen.value, rented.bound)

    def _sharded(self, base: ShardedBase) -> _Weighed:
        fitted = self.fitted(base.cluster, base.memory)
        deployment, rate = self.first(fitted).deploy(), self.rate(fitted)
        return _Weighed(deployment, fitted, base.memory, rate * deployment.makespan, rate * deployment.bound)

    def _row(
        self, name: str, weighed: _Weighed | None, refused: CapacityError | None, best: _Weighed
    ) -> CandidateOutlook:
        if weighed is None:
            assert refused is not None
            return CandidateOutlook(name, 0, None, None, f"{refused.value}. {refused.rule}".rstrip("."))
        needed = None
        if weighed.memory is not None:
            held, layers = held_together(weighed.memory, self.workload, self.together), weighed.cluster.layers
            needed = max(weighed.memory.peak(each, layers, held) for each, _ in weighed.deployment.shape)
        pairs = {
            self.planner.objective.replace("_", "-"): (weighed.value, best.value),
            "seconds": (weighed.deployment.makespan, best.deployment.makespan),
        }
        worse = (
            f"{ours / least:.2f} times the {unit}" if least else f"more than the 0 {unit}"  # free devices
            for unit, (ours, least) in pairs.items()
            if ours > 0.0 and ours >= TIE * least
        )
        why = "" if weighed is best else f"{next(worse, 'no better than those')} of {best.deployment}"
        jobs = min(self.together, len(self.workload.jobs))
        return CandidateOutlook(str(weighed.deployment), jobs, needed, weighed.deployment.makespan, why)

    def on(self, cluster: Cluster) -> Planned:
        """The plan on all of these devices.

        Raises:
            CapacityError: a sample is too long for every replica, or no replica fits on one kind of device.
        """
        found, refused = list[_Weighed](), list[CapacityError]()
        weighings = [partial(self._deployed, cluster)]
        weighings += [partial(self._sharded, base) for base in self._bases(cluster, every=False)]
        for weigh in weighings:
            try:
                found.append(weigh())
            except CapacityError as error:
                refused.append(error)
        if not found:
            raise refused[0]
        best = min(found, key=lambda each: each.deployment.makespan)
        return plan_waves(self.workload, self.waves, best.deployment, best.cluster, best.memory)

    def _deployed(self, cluster: Cluster) -> _Weighed:
        fitted = self.fitted(cluster)
        idle = {kind: number for kind, number in cluster.devices.items() if kind not in fitted.devices}
        if idle:
            raise CapacityError(
                str(cluster.with_devices(idle)), "No replica fits on these devices.", "Leave them out."
            )
        deployment = self.first(fitted).deploy()
        return _Weighed(deployment, fitted, self.memory, deployment.makespan, deployment.bound)


def _device_step(weighed: _Weighed) -> float:
    """Device-seconds of a step."""
    return sum(weighed.cluster.devices.values()) * weighed.deployment.makespan


def plan_described(
    workload: Workload,
    settings: RunSettings,
    cluster: Cluster,
    memory: ModelMemory | None,
    *,
    tokeniser: str,
    numbers: Sequence[Devices] = (),
    on_wave: Callable[[Forecast], None] | None = None,
) -> Outlook:
    """Choose devices, deploy for the first wave's mean step, and again for a later wave if that pays off;
    then plan and simulate all waves.

    Args:
        numbers: numbers of devices to plan for; the best one by the objective is shown in full. If empty,
            devices are chosen by the first wave's mean step.

    Raises:
        CapacityError: a sample fits into no replica that the cluster has devices and memory for.
        ConfigError: the objective is money, and a price is not known.
    """
    planner = settings.planner
    if settings.engine.checkpointing:
        cluster = cluster.recomputing()
    together = settings.most_jobs
    waves = fill_waves([job.name for job in workload.jobs], lambda names: len(names) <= together)
    from plait.adapters.variants import VARIANTS  # imports torch

    fused = all(VARIANTS.get(job.adapter.variant).fused for job in workload.jobs)
    shards = fused and settings.model.quantise == WHOLE  # others cannot be sharded
    search = _Search(workload, planner, memory, together, waves, shards)
    objective, every, why = None, tuple[DevicesOutlook, ...](), ""
    candidates = tuple[CandidateOutlook, ...]()
    if numbers:
        planned, every, why = _of_numbers(search, [cluster.with_devices(each) for each in numbers])
    else:
        planned, objective, candidates = search.chosen(cluster)
    if on_wave is not None:
        for wave in planned.waves:
            on_wave(wave.parts[0].forecast)
    return replace(
        _outlook(planned, search),
        objective=objective,
        candidates=candidates,
        every=every,
        why=why,
        trials=_trials(planned, workload),
        device_seconds_side_by_side=side_by_side(workload, planned.cluster),
        assumptions=(*_beyond(numbers, cluster), *_assumptions(settings, cluster, planned, tokeniser)),
    )


def _of_numbers(
    search: _Search, clusters: Sequence[Cluster]
) -> tuple[Planned, tuple[DevicesOutlook, ...], str]:
    """The best plan by the objective, slack included, the outlook for each number of devices, and why that
    plan is the best."""
    plans, refused = dict[int, Planned](), dict[int, CapacityError]()
    for place, cluster in enumerate(clusters):
        try:
            plans[place] = search.on(cluster)
        except CapacityError as error:
            refused[place] = error
    if not plans:
        raise refused[0]
    by_time = search.planner.objective == "time"
    values = {place: planned.seconds * search.rate(planned.cluster) for place, planned in plans.items()}
    least = min(values, key=values.__getitem__)
    limit = (1.0 + search.planner.slack) * values[least]
    near = [place for place, value in values.items() if value <= limit]
    best = min(near, key=lambda place: plans[place].device_seconds if by_time else plans[place].seconds)
    rows = tuple(
        _of_devices(cluster, plans[place], place == best)
        if place in plans
        else DevicesOutlook(str(cluster), refused=f"{refused[place].value}: {refused[place].rule}")
        for place, cluster in enumerate(clusters)
    )
    return plans[best], rows, _why_best(search.planner, str(clusters[best]), str(clusters[least]))


def _why_best(planner: PlannerSettings, best: str, least: str) -> str:
    """Why a number of devices is the best although another one may have the least of the objective."""
    wanted = planner.objective.replace("_", "-")
    if best == least:
        return f"best: {best}, which takes the least {wanted} (planner.objective)"
    other = "device-seconds" if planner.objective == "time" else "time"
    return (
        f"best: {best}, which takes the least {other} of all within {100 * planner.slack:g} % "
        f"(planner.slack) of the least {wanted} (planner.objective), which {least} has; planner.slack=0 "
        "chooses the latter"
    )


def _of_devices(cluster: Cluster, planned: Planned, chosen: bool) -> DevicesOutlook:
    shapes = dict.fromkeys(str(wave.deployment) for wave in planned.waves)
    return DevicesOutlook(
        str(cluster),
        chosen,
        "; then ".join(shapes),
        planned.seconds,
        planned.device_seconds,
        planned.cluster.money(planned.seconds),
        error=planned.cluster.error,
    )


def side_by_side(workload: Workload, cluster: Cluster) -> float:
    """Device-seconds of all jobs without Plait, each alone on the kind of replica that is cheapest for it.

    Steps do not overlap. Idle devices are not counted.
    """
    return sum(
        min(
            _device_seconds(workload, job.name, profile, each)
            for profile in cluster.kinds
            for each in profile.configurations
            if each.max_tokens >= workload.longest[job.name]
        )
        for job in workload.jobs
    )


def _device_seconds(
    workload: Workload, name: str, profile: ClusterProfile, configuration: Configuration
) -> float:
    split = configuration.layer_split or even_split(profile.time.layers, configuration.pp)
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


def _outlook(planned: Planned, search: _Search) -> Outlook:
    cluster, waves, parts = planned.cluster, planned.waves, planned.parts
    deployment, step = waves[0].deployment, search.first(cluster)
    equal = best_equal_replicas(step.costs, step.counts, step.devices)
    profile = cluster.kinds[0]
    sources = dict.fromkeys(each.source for each in cluster.kinds)
    return Outlook(
        cluster=cluster.name,
        devices=str(cluster),
        profile=f"{profile.model}, {profile.dtype}: {' '.join(sources)}",
        replicas=_replicas(waves),
        groups=tuple(group for number, wave in enumerate(waves, start=1) for group in _groups(wave, number)),
        microbatches=round(sum(each.phase.scale * each.forecast.metrics.microbatches for each in parts)),
        microbatches_alone=round(sum(each.phase.scale * each.forecast.alone.microbatches for each in parts)),
        assumptions=(),
        gap=deployment.gap,
        step_seconds=deployment.makespan,
        equal_replicas=str(equal),
        equal_step_seconds=equal.makespan,
        changes=tuple(wave.change for wave in waves if wave.change is not None),
        simulated=tuple(_simulated(wave, number) for number, wave in enumerate(waves, start=1)),
        predicted_seconds=planned.seconds,
        device_seconds=planned.device_seconds,
        device_seconds_alone=sum(each.phase.scale * each.forecast.alone.device_seconds for each in parts),
        money=cluster.money(planned.seconds),
        error=cluster.error,
        error_source=_error_source(cluster),
    )


def _error_source(cluster: Cluster) -> str:
    """What the error of the predicted seconds was measured on, or why there is none."""
    if cluster.error is None:
        unknown = [each for each in cluster.kinds if each.error is None]
        return f"the profile of {', '.join(each.devices.kind for each in unknown)} has {NO_ERROR}"
    worst = max(cluster.kinds, key=lambda each: each.error or 0.0)
    return worst.error_source


def _trials(planned: Planned, workload: Workload) -> tuple[TrialOutlook, ...]:
    """Each trial with the values that distinguish it, and the replicas that train it."""
    found = {}
    differing = workload.differing()
    for number, wave in enumerate(planned.waves, start=1):
        tokens: dict[str, dict[str, int]] = {}
        for part in wave.parts:
            of_replica = dict(enumerate(map(str, wave.deployment.single)))
            for item in part.forecast.plan.schedule:
                if isinstance(item, Microbatch):
                    for segment in item.segments:
                        own = tokens.setdefault(segment.job, dict.fromkeys(of_replica.values(), 0))
                        own[of_replica[item.replica]] += segment.tokens
        for job, own in tokens.items():
            shares = {name: count / sum(own.values()) for name, count in own.items() if count}
            found[job] = TrialOutlook(job, number, differing[job], shares)
    return tuple(found[name] for name in sorted(found))


def _simulated(wave: Wave, number: int) -> SimulatedOutlook:
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


def _mean_completion(wave: Wave) -> float:
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


def _replicas(waves: Sequence[Wave]) -> tuple[ReplicaOutlook, ...]:
    """The first deployment's replicas, with the most bytes of all waves that it serves."""
    first = waves[0]
    served = [
        part.forecast
        for wave in waves
        if wave.deployment.shape == first.deployment.shape
        for part in wave.parts
    ]
    plan, single = first.parts[0].forecast.plan, first.deployment.single
    found = []
    for configuration, count in first.deployment.shape:
        own = [plan.replicas[i] for i, each in enumerate(single) if each == configuration]
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
                configuration.kind,
                configuration.shards > 1,
            )
        )
    return tuple(found)


def _beyond(numbers: Sequence[Mapping[str, int]], cluster: Cluster) -> list[str]:
    """What is said of numbers of devices that the cluster does not have."""
    have = cluster.devices
    if all(number <= have[kind] for each in numbers for kind, number in each.items()):
        return []
    return [f"The cluster has {sum(have.values())} devices; more are taken to be linked as its own are."]


def _assumptions(
    settings: RunSettings, cluster: Cluster, planned: Planned, tokeniser: str
) -> tuple[str, ...]:
    parts, waves, profile = planned.parts, planned.waves, cluster.kinds[0]
    tables = ", ".join(dict.fromkeys(repr(each.table) for each in cluster.kinds))
    lines = [
        f"Seconds are simulated for {profile.model}; sample lengths come from the tokeniser of {tokeniser}.",
        f"Capacities are those of the published system (table {tables}), or less if "
        "engine.capacity or memory requires it, or if a pipeline is faster with less.",
        "Side by side: each job trains alone on the kind of replica that is cheapest for it; idle devices "
        "are not counted. Job by job: one job at a time on the plan's replicas; all their devices are "
        "counted. Both wait for each step to finish.",
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
    if any(each.shards > 1 for wave in waves for each, _ in wave.deployment.shape):
        lines.append(SHARDED)
    lines += _by_memory(settings, cluster, planned)
    return tuple(lines)


def _by_memory(settings: RunSettings, cluster: Cluster, planned: Planned) -> list[str]:
    """What memory has changed of the replicas' tables, in words."""
    share = settings.planner.memory_share
    used = dict.fromkeys(each for wave in planned.waves for each, _ in wave.deployment.shape)
    known = {each for kind in cluster.kinds for each in kind.configurations}
    smaller = [each for each in used if each.shards == 1 and replace(each, layer_split=()) not in known]
    uneven = [each for each in used if each.layer_split]
    available = " or ".join(
        f"{share * each.devices.memory_bytes / 2**30:.1f} GiB" for each in planned.cluster.kinds
    )
    because = f"because only {available} of a device may be used (planner.memory_share={share})"
    lines = []
    if smaller:
        takes = ", ".join(f"{each} takes {each.max_tokens:,} tokens" for each in smaller)
        lines.append(f"Capacity reduced, {because}: {takes}.")
    if uneven:
        has = ", ".join(f"{each} has layers {as_written(each.layer_split)}" for each in uneven)
        lines.append(f"Stages are not balanced by time, {because}: {has}.")
    if lines and not settings.engine.checkpointing:
        lines[-1] += " engine.checkpointing=true needs less memory."
    return lines


def _groups(wave: Wave, number: int) -> list[GroupOutlook]:
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
