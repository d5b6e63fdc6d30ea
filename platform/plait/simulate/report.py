"""The cost of a simulated run: seconds, idle shares by cause, traffic, padding, bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from plait.core.plans import Microbatch, Plan, Replica
from plait.cost.memory import MemoryCoefficients, MemoryModel, MemoryShape, StaticBytes
from plait.cost.time import StageTime
from plait.simulate.events import Pipeline, Run, Span, simulate

VALUE_BYTES = 2  # bytes of an activation in a 16-bit dtype
Held = dict[tuple[int, int], int]  # by replica and position in its schedule


@dataclass(frozen=True, slots=True)
class Bubble:
    """Idle share of all devices during the makespan, and its parts, which add up to ``total``.

    Attributes:
        total: 1 − busy / (devices · makespan).
        fill_and_drain: idle share of the same order if all microbatches and all stages were equal: filling,
            draining, and waiting for steps and no-ops.
        imbalance: what stages of unequal cost, and replicas that end before the others, add to that.
        raggedness: what unequal microbatches add to that.
    """

    total: float
    fill_and_drain: float
    imbalance: float
    raggedness: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """The figures of one simulated run.

    Attributes:
        mean_completion: mean over the jobs of the seconds until their last step.
        padding_share: padding among the tokens counted against capacities.
        communication_bytes: activations and their gradients between stages: 2(D − 1)·tokens·hidden
            values (mLoRA §3.2.2).
    """

    makespan: float
    mean_completion: float
    bubble: Bubble
    device_seconds: float
    tokens_per_second: float
    padding_share: float
    communication_bytes: int
    microbatches: int
    noops: int


def measure(
    pipelines: Mapping[int, Pipeline],
    *,
    hidden_size: int = 0,
    tp: Mapping[int, int] | None = None,
) -> tuple[Metrics, Run]:
    """Simulate the pipelines and measure the run.

    Args:
        tp: tensor-parallel devices of each stage, by replica; 1 if absent.

    Raises:
        SimulationError: stages wait for each other forever.
    """
    run = simulate(pipelines)
    works = [work for pipeline in pipelines.values() for work in pipeline.works]
    tokens, padded = sum(work.tokens for work in works), sum(work.padded for work in works)
    devices = sum(pipeline.stages * (tp or {}).get(r, 1) for r, pipeline in pipelines.items())
    last = {job: 0.0 for work in works for job, _ in work.parts}
    for (job, _), seconds in run.steps.items():
        last[job] = max(last[job], seconds)
    metrics = Metrics(
        makespan=run.makespan,
        mean_completion=sum(last.values()) / len(last) if last else 0.0,
        bubble=bubble(pipelines, run, tp),
        device_seconds=devices * run.makespan,
        tokens_per_second=tokens / run.makespan if run.makespan else 0.0,
        padding_share=1 - tokens / padded if padded else 0.0,
        communication_bytes=sum(
            2 * (pipeline.stages - 1) * work.tokens * hidden_size * VALUE_BYTES
            for pipeline in pipelines.values()
            for work in pipeline.works
        ),
        microbatches=sum(bool(work.parts) for work in works),
        noops=sum(not work.parts for work in works),
    )
    return metrics, run


def bubble(pipelines: Mapping[int, Pipeline], run: Run, tp: Mapping[int, int] | None = None) -> Bubble:
    """Idle shares of ``run``; the parts come from simulations with equal microbatches, then equal stages."""
    if not run.makespan:
        return Bubble(0.0, 0.0, 0.0, 0.0)
    level = {r: replace(p, seconds=_equal_microbatches(p)) for r, p in pipelines.items()}
    flat = {r: replace(p, seconds=_equal_stages(p.seconds)) for r, p in level.items()}
    equal, even, own = _ends(simulate(level)), _ends(simulate(flat)), _ends(run)
    devices = {r: pipeline.stages * (tp or {}).get(r, 1) for r, pipeline in pipelines.items()}
    busy = dict.fromkeys(pipelines, 0.0)
    for span in run.spans:
        busy[span.replica] += (span.end - span.start) / pipelines[span.replica].stages

    def share(seconds: Mapping[int, float]) -> float:
        idle = sum(devices[r] * seconds[r] for r in pipelines)
        return idle / (sum(devices.values()) * run.makespan)

    return Bubble(
        total=share({r: run.makespan - busy[r] for r in pipelines}),
        fill_and_drain=share({r: even.get(r, 0.0) - busy[r] for r in pipelines}),
        imbalance=share(
            {r: equal.get(r, 0.0) - even.get(r, 0.0) + run.makespan - own.get(r, 0.0) for r in pipelines}
        ),
        raggedness=share({r: own.get(r, 0.0) - equal.get(r, 0.0) for r in pipelines}),
    )


def _ends(run: Run) -> dict[int, float]:
    """End of each replica's last piece of work."""
    ends: dict[int, float] = {}
    for span in run.spans:
        ends[span.replica] = max(ends.get(span.replica, 0.0), span.end)
    return ends


def _equal_microbatches(pipeline: Pipeline) -> list[list[StageTime]]:
    """Give every microbatch except no-ops its stage's mean."""
    real = [bool(work.parts) for work in pipeline.works]
    return [_level(stage, real) for stage in pipeline.seconds]


def _level(stage: Sequence[StageTime], real: Sequence[bool]) -> list[StageTime]:
    count = max(1, sum(real))
    forward = sum(item.forward for item in stage) / count
    backward = sum(item.backward for item in stage) / count
    return [StageTime(forward, backward) if each else StageTime(0.0, 0.0) for each in real]


def _equal_stages(seconds: Sequence[Sequence[StageTime]]) -> list[list[StageTime]]:
    """Give every stage the mean over all stages."""
    count = len(seconds)
    mean = [
        StageTime(sum(item.forward for item in row) / count, sum(item.backward for item in row) / count)
        for row in zip(*seconds, strict=True)
    ]
    return [mean for _ in range(count)]


@dataclass(frozen=True, slots=True)
class RunMemory:
    """What the memory of a run is computed from.

    Attributes:
        model: memory model of a microbatch that goes through the whole model on one device.
        static: static bytes: weights, and the adapters of all jobs.
        shape: returns what the memory of a planned microbatch depends on.
    """

    model: MemoryModel
    static: StaticBytes
    shape: Callable[[Microbatch], MemoryShape]


def most_bytes(run: Run, plan: Plan, memory: RunMemory) -> Held:
    """Peak bytes on any device, including the model's margin, while each microbatch is in flight.

    Activations are assumed to be spread evenly over the layers and divided by tensor parallelism; head and
    loss belong to the last stage, as in :meth:`MemoryModel.stage_peak` for equal microbatches.
    """
    found: Held = {}
    for replica in plan.replicas:
        shapes = [
            memory.shape(item)
            for item in plan.schedule
            if isinstance(item, Microbatch) and item.replica == replica.id
        ]
        for stage in range(replica.pp):
            spans = [span for span in run.spans if (span.replica, span.stage) == (replica.id, stage)]
            for place, size in _stage(spans, shapes, replica, stage, memory).items():
                found[replica.id, place] = max(size, found.get((replica.id, place), 0))
    return found


def _stage(
    spans: Sequence[Span], shapes: Sequence[MemoryShape], replica: Replica, stage: int, memory: RunMemory
) -> dict[int, int]:
    """Peak bytes on one device of a stage while each of its microbatches is in flight."""
    share = replica.layer_split[stage] / sum(replica.layer_split)
    last = stage == replica.pp - 1
    most: dict[int, float] = {}
    for phase in memory.model.phases.values():
        c = phase.coefficients
        kept = [_kept(c, shape, share, last, memory.model.logit_rows) for shape in shapes]
        for place, held in most_held(spans, kept).items():
            passing = (1.0 + phase.margin) * (held + c.fixed) if shapes[place].tokens else 0.0
            most[place] = max(most.get(place, 0.0), passing)
    static = memory.static.stage(replica.layer_split, stage)
    return {place: int((static + size) / replica.tp) for place, size in most.items()}


def _kept(c: MemoryCoefficients, shape: MemoryShape, share: float, last: bool, logit_rows: float) -> float:
    """Bytes that one microbatch takes on a stage, in addition to what exists only once."""
    return share * c.body(shape) + (c.head(shape, logit_rows) if last else 0.0)


def most_held(spans: Sequence[Span], weights: Sequence[float]) -> Mapping[int, float]:
    """For each microbatch of one stage, the largest sum of weights held while it is in flight.

    In flight means from the start of its forward to the end of its backward; ends count before starts.
    """
    changes = sorted(
        (span.start, 1, span.work) if span.kind == "forward" else (span.end, 0, span.work) for span in spans
    )
    most: dict[int, float] = {}
    there: set[int] = set()
    for _, starts, work in changes:
        if not starts:
            there.discard(work)
            continue
        there.add(work)
        held = sum(weights[each] for each in there)
        most.update((each, max(held, most.get(each, 0.0))) for each in there)
    return most
