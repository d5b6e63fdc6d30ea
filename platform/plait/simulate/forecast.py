"""Forecasts the cost of a set of jobs on a deployment: a plan with predictions, and training job by job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from plait.core.errors import ConfigError, choices
from plait.core.plans import GlobalBatch, Group, Microbatch, OptimiserStep, Plan, Prediction, Replica
from plait.cost.replica import Configuration, balanced_split, even_split
from plait.cost.time import MicrobatchShape, StageTime, TimeModel
from plait.planner.dispatch_step import Dispatcher
from plait.planner.grouping import group_jobs, head_tail, job_load
from plait.planner.packing import PackedBatches, pack
from plait.planner.packing_exact import pack_all
from plait.planner.schedule import build_schedule, turns
from plait.planner.verify import verify
from plait.simulate.events import OneFOneB, Order, Pipeline, Run, Work, simulate
from plait.simulate.report import VALUE_BYTES, Held, Metrics, RunMemory, measure, most_bytes

NEAR = 0.02  # a smaller relative gain in seconds does not justify smaller microbatches
TRIED_STEPS = 16  # steps of each job with which groups and capacities are compared


@dataclass(frozen=True, slots=True)
class Machine:
    """One replica to simulate on.

    Attributes:
        bandwidth: bytes per second between stages; None ignores transfers.
        token_bytes: bytes of one token's activations between stages.
    """

    time: TimeModel
    layer_split: tuple[int, ...]
    tp: int = 1
    bandwidth: float | None = None
    token_bytes: int = 0

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.layer_split)

    def pipeline(self, works: Sequence[Work], order: Order) -> Pipeline:
        """A pipeline that runs these microbatches on this machine."""
        seconds = [
            [self._seconds(work, layers, stage == self.stages - 1) for work in works]
            for stage, layers in enumerate(self.layer_split)
        ]
        return Pipeline(works, seconds, order, self._transfer(works))

    def in_order(self, works: Sequence[Work]) -> Pipeline:
        """A pipeline that runs these microbatches in 1F1B order, never drained in between."""
        return self.pipeline(works, OneFOneB([len(works)]))

    def _seconds(self, work: Work, layers: int, last: bool) -> StageTime:
        return self.time.stage(work.shape, tp=self.tp, layers=layers, last=last)

    def _transfer(self, works: Sequence[Work]) -> list[float]:
        if self.bandwidth is None:
            return []
        return [work.shape.tokens * self.token_bytes / self.bandwidth for work in works]


def schedule_work(
    microbatch: Microbatch, tile: int, *, computed_tile: int = 1, labelled_share: float = 1.0
) -> Work:
    """A planned microbatch in the simulator's form.

    Args:
        tile: padding multiple of the capacity.
        computed_tile: multiple to which segments are padded in the computation.
    """
    lengths = [length for segment in microbatch.segments for length in segment.lengths]
    computed = microbatch.padded(computed_tile)
    shape = MicrobatchShape(computed, sum(length**2 for length in lengths), round(labelled_share * computed))
    parts = tuple((segment.job, segment.step) for segment in microbatch.segments)
    return Work(parts, shape, microbatch.tokens, microbatch.padded(tile))


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How a forecast plans.

    Attributes:
        capacities: most tokens of a microbatch of each replica.
        labelled_share: share of the tokens that reach head and loss.
        bandwidths: bytes per second between the stages of each replica; without one, transfers take no time.
        adapting: whether, for pipelines, groups and smaller capacities are tried (:func:`adapted`).
        times: time models of replicas on another kind of device than the others.
        drained: whether pipelines drain after each step. None: as in training, where several replicas do,
            and a single one does not.
    """

    capacities: Mapping[int, int]
    labelled_share: float = 1.0
    hidden_size: int = 0
    bandwidths: Mapping[int, float] = field(default_factory=dict)
    memory: RunMemory | None = None
    groups: int | None = None
    adapting: bool = False
    times: Mapping[int, TimeModel] = field(default_factory=dict)
    drained: bool | None = None

    def drains(self, replicas: Sequence[Replica]) -> bool:
        """Whether the pipelines of these replicas drain after each step."""
        return len(replicas) > 1 if self.drained is None else self.drained

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's activations between stages."""
        return VALUE_BYTES * self.hidden_size


@dataclass(frozen=True, slots=True)
class Forecast:
    """A plan of the given global batches, and what they cost with and without Plait.

    Attributes:
        plan: replicas with their layers, groups with predictions, the verified schedule.
        alone: metrics of the same global batches trained job by job on the same devices, with equal numbers
            of layers in the stages and the pipeline drained after every step.
        replica_bytes: peak bytes on any device of each replica; empty if memory is not known.
    """

    plan: Plan
    metrics: Metrics
    alone: Metrics
    run: Run
    pipelines: Mapping[int, Pipeline]
    replica_bytes: Mapping[int, int] = field(default_factory=dict)


def forecast(
    batches: Mapping[str, Sequence[GlobalBatch]],
    replicas: Sequence[Replica],
    time: TimeModel,
    options: PlanOptions,
) -> Forecast:
    """Plan the global batches of jobs, and simulate the plan and training job by job.

    Args:
        replicas: the deployment; one without a layer split gets the balanced one.

    Raises:
        CapacityError: a sample fits into no replica.
        ConfigError: no jobs, or more stages than layers.
        InputError: the time model lacks a replica's tensor-parallel degree.
    """
    if options.adapting:
        options = adapted(batches, replicas, time, options)
    plan = make_plan(batches, replicas, time, options)
    pipelines = plan_pipelines(plan, time, options)
    hidden, tp = options.hidden_size, {replica.id: replica.tp for replica in plan.replicas}
    metrics, run = measure(pipelines, hidden_size=hidden, tp=tp)
    alone, _ = measure(job_by_job(batches, plan.replicas, time, options), hidden_size=hidden, tp=tp)
    held = most_bytes(run, plan, options.memory) if options.memory is not None else {}
    largest: dict[int, int] = {}
    for (replica, _), size in held.items():
        largest[replica] = max(size, largest.get(replica, 0))
    predicted = _predicted(plan, batches, metrics, run, _by_job(held, pipelines))
    return Forecast(predicted, metrics, alone, run, pipelines, largest)


def adapted(
    batches: Mapping[str, Sequence[GlobalBatch]],
    replicas: Sequence[Replica],
    time: TimeModel,
    options: PlanOptions,
) -> PlanOptions:
    """The options with those groups and largest capacities whose first steps end earliest in a simulation.

    Jobs that are packed together wait for each other's steps, and with few large microbatches the stages of a
    pipeline are idle. So a separate group for each job is tried, and smaller capacities of pipelines. Several
    replicas train one group.
    """
    if max(each.pp for each in replicas) == 1:
        return options
    first = {job: own[:TRIED_STEPS] for job, own in batches.items()}
    longest = max(length for own in batches.values() for batch in own for length in batch.lengths)

    def seconds(tried: PlanOptions) -> float:
        plan = make_plan(first, replicas, time, tried)
        return simulate(plan_pipelines(plan, time, tried)).makespan

    grouped = [options] if options.drains(replicas) else [options, replace(options, groups=len(batches))]
    tried = [
        replace(min(grouped, key=seconds), capacities=each) for each in _halved(options, replicas, longest)
    ]
    taken = [seconds(each) for each in tried]
    return next(each for each, own in zip(tried, taken, strict=True) if own <= (1.0 + NEAR) * min(taken))


def _halved(options: PlanOptions, replicas: Sequence[Replica], longest: int) -> list[Mapping[int, int]]:
    """The capacities, then those of pipelines halved repeatedly, down to the longest sample."""
    found = [options.capacities]
    while True:
        smaller = dict(found[-1])
        for replica in replicas:
            if replica.pp > 1:
                smaller[replica.id] = max(smaller[replica.id] // 2, min(smaller[replica.id], longest))
        if smaller == dict(found[-1]):
            return found
        found.append(smaller)


def plan_pipelines(plan: Plan, time: TimeModel, options: PlanOptions) -> dict[int, Pipeline]:
    """The replicas of a plan with their microbatches, in 1F1B order, drained where training drains them; see
    :func:`.report.measure`.

    Raises:
        InputError: the time model has no figures for a replica's tensor-parallel degree.
    """
    pipelines, first = {}, dict[str, int]()
    for item in plan.schedule:
        for job, step in [(item.job, item.step)] if isinstance(item, OptimiserStep) else ():
            first.setdefault(job, step)
    for replica in plan.replicas:
        works = [
            schedule_work(item, 1, labelled_share=options.labelled_share)
            for item in plan.schedule
            if isinstance(item, Microbatch) and item.replica == replica.id
        ]
        machine = _machine(replica, replica.layer_split, time, options)
        counts = _counts(works, first) if options.drains(plan.replicas) else [len(works)]
        pipelines[replica.id] = machine.pipeline(works, OneFOneB(counts))
    return pipelines


def _counts(works: Sequence[Work], first: Mapping[str, int]) -> list[int]:
    """How many microbatches of a replica each turn has.

    Args:
        first: step of each job.
    """
    turns = (max((step - first[job] for job, step in work.parts), default=0) for work in works)
    return list(Counter(accumulate(turns, max)).values())


def _machine(replica: Replica, split: tuple[int, ...], time: TimeModel, options: PlanOptions) -> Machine:
    own = options.times.get(replica.id, time)
    return Machine(own, split, replica.tp, options.bandwidths.get(replica.id), options.token_bytes)


def make_plan(
    batches: Mapping[str, Sequence[GlobalBatch]],
    replicas: Sequence[Replica],
    time: TimeModel,
    options: PlanOptions,
) -> Plan:
    """Group, dispatch, pack, order and verify; arguments and errors as in :func:`forecast`."""
    if not batches or not replicas:
        raise ConfigError(
            f"{len(batches)} jobs on {len(replicas)} replicas", "A plan needs at least one of each."
        )
    ids = [each.id for each in replicas]
    if sorted(options.capacities) != sorted(ids):
        raise ConfigError(
            f"capacities of replicas {choices(list(options.capacities))}",
            f"Each of the replicas {choices(ids)} needs one capacity.",
        )
    deployed = tuple(_with_split(each, time, options) for each in replicas)
    capacities, drained = options.capacities, options.drains(deployed)
    # Where they drain, the order of steps is that of single stages.
    stages = {each.id: 1 if drained else each.pp for each in deployed}
    grouping = (tuple(batches),) if drained else _grouping(batches, stages, options)
    dispatcher = _dispatcher(deployed, time, options, drained=drained)
    order = [dispatcher.parts(turn, options.labelled_share) for turn in turns(batches, grouping)]
    packed = _packed(order, options)
    items = build_schedule(packed, stages, capacity=capacities, merging=not drained)
    every = [batch for own in batches.values() for batch in own]
    verify(items, every, stages=stages, capacity=capacities)
    groups = tuple(Group(jobs, min(capacities.values()), 1) for jobs in grouping)
    chosen: dict[str, str | int | float | bool | None] = {
        f"capacity.{replica}": capacity for replica, capacity in capacities.items()
    }
    chosen["packing repeats"] = all(part.limit_hit != "time" for turn in packed for part in turn.values())
    return Plan(deployed, groups, items, chosen)


def _grouping(
    batches: Mapping[str, Sequence[GlobalBatch]], stages: Mapping[int, int], options: PlanOptions
) -> tuple[tuple[str, ...], ...]:
    loads = [job_load(job, own) for job, own in batches.items()]
    if options.groups:
        return head_tail(loads, options.groups)
    largest = sum(options.capacities[each] for each in stages)
    return group_jobs(loads, stages=max(stages.values()), capacity=largest)


def _with_split(replica: Replica, time: TimeModel, options: PlanOptions) -> Replica:
    if replica.layer_split:
        return replica
    capacity = options.capacities[replica.id]
    full = MicrobatchShape.of([capacity], labelled=round(options.labelled_share * capacity))
    split = balanced_split(options.times.get(replica.id, time), replica.pp, full, tp=replica.tp)
    return replace(replica, layer_split=split)


def _dispatcher(
    replicas: Sequence[Replica], time: TimeModel, options: PlanOptions, *, drained: bool
) -> Dispatcher:
    room, times = options.capacities, options.times
    kinds = [
        (
            each.id,
            Configuration(each.tp, each.pp, room[each.id], layer_split=each.layer_split),
            times.get(each.id, time),
        )
        for each in replicas
    ]
    return Dispatcher(kinds, drained=drained)


def _packed(
    order: Sequence[Mapping[int, Sequence[GlobalBatch]]], options: PlanOptions
) -> list[dict[int, PackedBatches]]:
    """Every turn's parts, packed replica by replica."""
    packed: list[dict[int, PackedBatches]] = [{} for _ in order]
    for replica, capacity in options.capacities.items():
        places = [place for place, turn in enumerate(order) if turn.get(replica)]
        parts = [order[place][replica] for place in places]
        done = pack_all(parts, capacity=capacity)
        for place, own in zip(places, done, strict=True):
            packed[place][replica] = own
    return packed


def job_by_job(
    batches: Mapping[str, Sequence[GlobalBatch]],
    replicas: Sequence[Replica],
    time: TimeModel,
    options: PlanOptions,
) -> dict[int, Pipeline]:
    """One job after another on the same replicas, with each global batch packed alone and no overlap of
    steps."""
    works: dict[int, list[Work]] = {each.id: [] for each in replicas}
    counts: dict[int, list[int]] = {each.id: [] for each in replicas}
    even = [replace(each, layer_split=even_split(time.layers, each.pp)) for each in replicas]
    dispatcher = _dispatcher(even, time, options, drained=True)
    for own in batches.values():
        for batch in own:
            parts = dispatcher.parts([batch], options.labelled_share)
            for replica, capacity in options.capacities.items():
                microbatches = pack(parts[replica], capacity=capacity, replica=replica)
                works[replica] += [
                    schedule_work(each, 1, labelled_share=options.labelled_share) for each in microbatches
                ]
                counts[replica].append(len(microbatches))
    return {
        each.id: _machine(each, each.layer_split, time, options).pipeline(
            works[each.id], OneFOneB(counts[each.id])
        )
        for each in even
    }


def _by_job(held: Held, pipelines: Mapping[int, Pipeline]) -> dict[str, int]:
    """Peak bytes on any device while a microbatch of each job is in flight."""
    found: dict[str, int] = {}
    for (replica, place), size in held.items():
        for job, _ in pipelines[replica].works[place].parts:
            found[job] = max(size, found.get(job, 0))
    return found


def _predicted(
    plan: Plan,
    batches: Mapping[str, Sequence[GlobalBatch]],
    metrics: Metrics,
    run: Run,
    held: Mapping[str, int],
) -> Plan:
    """The plan with each group's seconds (of its last step), device-seconds (its share by tokens) and
    bytes."""
    tokens = {job: sum(sum(batch.lengths) for batch in own) for job, own in batches.items()}
    total = sum(tokens.values())
    ends: dict[str, float] = {}
    for (job, _), seconds in run.steps.items():
        ends[job] = max(ends.get(job, 0.0), seconds)
    groups = tuple(
        replace(
            group,
            predicted=Prediction(
                seconds=max(ends[job] for job in group.jobs),
                bytes=max((held[job] for job in group.jobs), default=None) if held else None,
                device_seconds=metrics.device_seconds * sum(tokens[job] for job in group.jobs) / total,
            ),
        )
        for group in plan.groups
    )
    return replace(plan, groups=groups)
