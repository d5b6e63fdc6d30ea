"""LoRAFusion's figures in the simulator: idle shares, gains of merging and packing, planning time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from time import perf_counter
from typing import Annotated

from plait.core.checks import at_least, each
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import balanced_split, even_split
from plait.cost.time import HeadTime, MicrobatchShape, StageTime, TimeModel
from plait.planner.packing_exact import GREEDY, PackingLimits, pack_all, solve_packing
from plait.planner.schedule import turns
from plait.simulate.events import Pipeline
from plait.simulate.forecast import Machine
from plait.simulate.report import measure
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Figure, Report
from plait_bench.inputs import Count, Positive, read_profile, shipped
from plait_bench.lengths import Family, LengthGenerator
from plait_bench.lorafusion_order import grouped, next_fit, ordered
from plait_bench.lorafusion_runs import idle_in_runs, rate_in_runs
from plait_bench.pipelines import (
    Trace,
    global_batches,
    in_batches,
    lorapp,
    mixed_lengths,
    one_after_another,
    plan_schedule,
    planned_pipeline,
    read_trace,
)
from plait_bench.progress import part

Lengths = dict[str, list[list[int]]]  # by adapter: the lengths of each global batch


@dataclass(frozen=True, slots=True)
class DataSet:
    """Lengths assumed for one data set of the mixture."""

    name: str
    family: Family
    mean: float
    sigma: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another assumption, to show how the figures move with it.

    Attributes:
        label: of its figures.
        means: by data set; those left out keep theirs.
        seed: of the draws; None keeps it.
        square: seconds of a layer for each squared token of a sample (attention), forward and backward, in
            addition to the profile's own.
        head: factor of the seconds of head and loss; None keeps it.
        spread: factor of the data sets' sigma.
        plaits: whether microbatches are grouped, ordered and merged as Plait does it, not as LoRAFusion's
            artifact.
        capacity: most tokens of a microbatch; None keeps it.
    """

    label: str
    means: dict[str, float]
    seed: int | None = None
    square: float = 0.0
    head: float | None = None
    spread: float = 1.0
    plaits: bool = False
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the benchmarks on this workload.

    Attributes:
        trace: name of a trace that comes with Plait, or a file.
        data_sets: the data sets that the trace was drawn from.
        clip: longest length.
        seed: of the draws.
        adapters: how many.
        steps: global batches of each adapter.
        global_batch: samples of one of them.
        stages: pipeline stages.
        capacity: most tokens of a microbatch.
        tile: padding multiple of LoRAFusion.
        samples: samples of one microbatch, if a system does not pack.
        other_samples: those that are tried for mLoRA's idle share, too.
        head: factor of the profile's seconds of head and loss.
        sizes: the same by system and workload, where they differ.
        alternatives: other assumptions.
        workers: processes that pack.
        batches: global batches of one adapter, if planning itself is timed.
        capacities: by workload, those that LoRAFusion chose.
        tried: capacities that are compared with them.
        kernels: factors of its kernels, which are not simulated; the first is what is compared.
        replicas: copies of the pipeline.
        layer_gigabytes: weights of a layer, which devices that share them collect before it.
        gigabytes_per_s: at which each device receives them.
    """

    trace: str
    data_sets: tuple[DataSet, ...]
    clip: Count
    seed: int
    adapters: Count
    steps: Count
    global_batch: Count
    stages: Count
    capacity: Count
    tile: Count
    samples: Count
    other_samples: Annotated[tuple[int, ...], each(at_least(1))] = ()
    head: Positive = 1.0
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    workers: Count = 2
    batches: tuple[int, ...] = ()
    capacities: dict[str, int] = field(default_factory=dict)
    tried: tuple[int, ...] = ()
    kernels: tuple[float, ...] = (1.0,)
    replicas: tuple[int, ...] = ()
    layer_gigabytes: float = 0.0
    gigabytes_per_s: float = 1.0

    @property
    def gather(self) -> float:
        """Seconds in which a device receives the other devices' parts of a layer."""
        return self.layer_gigabytes * (1 - 1 / self.stages) / self.gigabytes_per_s

    def lengths(self) -> Lengths:
        """The trace.

        Raises:
            DataError: it cannot be read.
        """
        return read_trace(shipped(self.trace))

    def drawn(
        self,
        alternative: Alternative | None = None,
        steps: int | None = None,
        sets: Sequence[Sequence[str]] = (),
    ) -> Lengths:
        """Lengths drawn under these assumptions, or an alternative's.

        Args:
            sets: data sets of each adapter; empty: all have all.
        """
        means, spread = (alternative.means, alternative.spread) if alternative else ({}, 1.0)
        seed = self.seed if alternative is None or alternative.seed is None else alternative.seed
        generators = {
            each.name: LengthGenerator(
                *(each.family, means.get(each.name, each.mean), spread * each.sigma, self.clip, seed)
            )
            for each in self.data_sets
        }
        count = (steps or self.steps) * self.global_batch
        return {
            f"adapter{a}": in_batches(
                mixed_lengths(
                    {name: generators[name] for name in (sets[a] if sets else generators)},
                    *(count,),
                    seed=seed,
                    job=f"adapter{a}",
                ),
                self.global_batch,
            )
            for a in range(self.adapters)
        }

    def workload(self, name: str, alternative: Alternative | None = None) -> Lengths:
        """Lengths of a workload of LoRAFusion: a data set, all mixed, or one for each adapter and the mixture
        for the last ("het")."""
        every = [each.name for each in self.data_sets]
        if name == "het":
            return self.drawn(alternative, sets=[*([each] for each in every), every])
        return self.drawn(alternative, sets=[every if name == "mixed" else [name]] * self.adapters)

    def assumptions(self) -> tuple[str, ...]:
        """What is assumed, in words."""
        sets = "; ".join(f"{d.name} {d.family}, mean {d.mean:g}, sigma {d.sigma:g}" for d in self.data_sets)
        return (
            f"Lengths are assumed, not published: equal shares of {sets}; "
            f"clipped at {self.clip}, seed {self.seed}.",
        )


def with_attention(time: TimeModel, square: float) -> TimeModel:
    """The time model with ``square`` more seconds a squared token in every layer."""
    layers = {tp: replace(layer, square=layer.square + square) for tp, layer in time.layer.items()}
    return replace(time, layer=layers)


def with_head(time: TimeModel, factor: float) -> TimeModel:
    """The time model with a head and loss that take ``factor`` times as long."""
    head = {tp: HeadTime(factor * each.fixed, factor * each.labelled) for tp, each in time.head.items()}
    return replace(time, head=head)


@dataclass(frozen=True, slots=True)
class Opening:
    """What benchmarks of LoRAFusion's workload begin with: options, profile, trace, and equal stages."""

    asked: Options
    profile: ClusterProfile
    trace: Lengths
    even: Machine


def opened(settings: RunSettings, asked: Options) -> Opening:
    """Read profile and trace; with ``engine.checkpointing`` each layer's forward runs twice.

    The profile's head and loss take ``head`` times as long as it says.

    Raises:
        ConfigError: no described cluster.
        DataError: the trace cannot be read.
    """
    profile = read_profile(settings)
    if settings.engine.checkpointing:
        profile = replace(profile, time=profile.time.recomputing())
    profile = replace(profile, time=with_head(profile.time, asked.head))
    even = Machine(profile.time, even_split(profile.time.layers, asked.stages))
    return Opening(asked, profile, asked.lengths(), even)


PLAITS = "Plait's order and merging"
WHOLE = "Plait, all microbatches in one run"
IN_ORDER = "its microbatches in 1F1B order, as LoRAFusion ran it"


@benchmark("lorafusion/bubble_ratio", Options)
def bubble_ratio(settings: RunSettings, _jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Idle shares of 1F1B, mLoRA, LoRAFusion with one to all adapters, and Plait, on one trace.

    Raises:
        ConfigError: no described cluster.
    """
    begun = opened(settings, asked)
    profile, trace, even = begun.profile, begun.trace, begun.even
    part("systems that do not pack")
    figures = [*_baselines(trace, even, asked)]
    part("Plait's schedule")
    ours = _plait(trace, profile, asked)
    piece = part("LoRAFusion's schedule by adapters", len(trace))
    for count in range(1, len(trace) + 1):
        piece(_named(count))
        plan = ours[0].ours if count == len(trace) else None
        scheduled = lorafusion(_first(count, trace), even, asked)
        figures.append(replace(_idle(_named(count), scheduled), plait=plan))
    counts = range(3, len(trace) + 1)
    ways: dict[str, Callable[[Trace, Machine, Options], Pipeline]] = {
        PLAITS: plaits_order,
        "without merging": partial(lorafusion, merging=False),
    }
    piece = part(
        "without merging, and under other assumptions", len(counts) * len(ways) + len(asked.alternatives)
    )
    for count in counts:
        for how, schedule in ways.items():
            piece(f"{_named(count)}, {how}")
            figures.append(_idle(f"{_named(count)}, {how}", schedule(_first(count, trace), even, asked)))
    figures += ours
    for alternative in asked.alternatives:
        piece(alternative.label)
        figures += _under(alternative, begun)
    notes = (*asked.assumptions(), f"Cluster {profile.name}: {profile.source}")
    return Report("lorafusion/bubble_ratio", tuple(figures), notes)


def _first(jobs: int, trace: Trace) -> Trace:
    return {job: trace[job] for job in list(trace)[:jobs]}


def _named(adapters: int) -> str:
    return f"LoRAFusion, {adapters} adapter{'s' if adapters > 1 else ''}"


def _baselines(trace: Trace, even: Machine, asked: Options) -> list[Figure]:
    """Systems that do not pack: microbatches with a fixed number of samples, in the order of the data."""
    gpipe = one_after_another(trace, even, size=asked.samples, padded=False, gpipe=True)
    figures = [_idle("GPipe, jobs one after another, packed", gpipe)]
    for padded, how in ((False, "packed"), (True, "padded to the longest")):
        one = one_after_another(trace, even, size=asked.samples, padded=padded, gpipe=False)
        figures.append(_idle(f"1F1B, jobs one after another, {how}", one))
        works = lorapp(trace, even, size=asked.samples, padded=padded).works
        figures.append(_idle(f"mLoRA, {how}", even.in_order(works), note=IN_ORDER))
    for size in asked.other_samples:
        works = lorapp(trace, even, size=size, padded=False).works
        figures.append(_idle(f"mLoRA, packed; {size} samples a microbatch", even.in_order(works)))
    free = lorapp(trace, even, size=asked.samples, padded=False)
    note = "backward first, as its paper has it; takes memory for more microbatches in flight"
    figures.append(_idle("mLoRA, LoRAPP", free, note=note))
    return figures


def lorafusion(
    trace: Trace, even: Machine, asked: Options, *, stages: int | None = None, merging: bool = True
) -> Pipeline:
    """LoRAFusion's schedule by Plait's packer, in its artifact's order and merged as there, with its padding
    rows and equal stages.

    Args:
        stages: microbatches between two steps of a job; None: as many as the pipeline has stages.
    """
    depth = stages or even.stages
    order = list(turns(global_batches(trace), groups_of(trace, asked, depth)))
    packed = pack_all(order, capacity=asked.capacity, tile=asked.tile)
    return ordered(packed, even, capacity=asked.capacity, tile=asked.tile, merging=merging, stages=depth)


def plaits_order(
    trace: Trace,
    even: Machine,
    asked: Options,
    *,
    limits: PackingLimits | None = None,
    merging: bool = True,
    filling: bool = True,
) -> Pipeline:
    """The same, ordered and merged as Plait does it."""
    plan = plan_schedule(
        trace,
        stages=even.stages,
        capacity=asked.capacity,
        tile=asked.tile,
        limits=limits,
        merging=merging,
        filling=filling,
    )
    return planned_pipeline(plan, even, padding=True)


def balanced(profile: ClusterProfile, asked: Options) -> tuple[int, ...]:
    """Layers of each stage; the last one has fewer, by the cost of head and loss at a full microbatch."""
    full = MicrobatchShape.of([asked.capacity])
    return balanced_split(profile.time, asked.stages, full)


def planned(trace: Trace, profile: ClusterProfile, asked: Options, split: tuple[int, ...] = ()) -> Pipeline:
    """Plait's own schedule, with these layers of each stage; (): as it balances them."""
    on = Machine(profile.time, split or balanced(profile, asked))
    return planned_pipeline(plan_schedule(trace, stages=on.stages, capacity=asked.capacity), on)


def _plait(trace: Trace, profile: ClusterProfile, asked: Options) -> list[Figure]:
    split, equal = balanced(profile, asked), even_split(profile.time.layers, asked.stages)
    pipeline = planned(trace, profile, asked, split)
    floor = imbalance_floor(pipeline.seconds)
    return [
        _idle("Plait", pipeline, note=f"layers {split}"),
        Figure(WHOLE, 100 * measure({0: pipeline})[0].bubble.total, "%", "simulated", note=f"layers {split}"),
        _idle("Plait, equal layers", planned(trace, profile, asked, equal), note=f"layers {equal}"),
        Figure("floor of whole layers per stage", 100 * floor, "%", "computed", note=f"layers {split}"),
    ]


def moved(begun: Opening, alternative: Alternative) -> Opening:
    """Profile and equal stages under another assumption; its lengths come from :meth:`Options.drawn`."""
    profile = begun.profile
    if alternative.head is not None:
        profile = replace(profile, time=with_head(profile.time, alternative.head / begun.asked.head))
    profile = replace(profile, time=with_attention(profile.time, alternative.square))
    asked = replace(begun.asked, capacity=alternative.capacity or begun.asked.capacity)
    return replace(begun, asked=asked, profile=profile, even=replace(begun.even, time=profile.time))


def _under(alternative: Alternative, begun: Opening) -> list[Figure]:
    """The main figures under another assumption."""
    other = moved(begun, alternative)
    trace = other.asked.drawn(alternative)
    schedule = plaits_order if alternative.plaits else lorafusion
    pipelines = {
        _named(count): schedule(_first(count, trace), other.even, other.asked)
        for count in range(1, len(trace) + 1)
    }
    pipelines["Plait"] = planned(trace, other.profile, other.asked)
    return [_idle(f"{name}; {alternative.label}", pipeline) for name, pipeline in pipelines.items()]


def _idle(name: str, pipeline: Pipeline, *, note: str = "") -> Figure:
    parts = idle_in_runs(pipeline)
    causes = (
        f"fill, drain and waits {100 * parts.fill_and_drain:.2f}, imbalance {100 * parts.imbalance:.2f}, "
        f"raggedness {100 * parts.raggedness:.2f}; {rate_in_runs(pipeline):,.0f} tokens/s"
    )
    return Figure(name, 100 * parts.total, "%", "simulated", note="; ".join(filter(None, (note, causes))))


@benchmark("lorafusion/packing_gain", Options)
def packing_gain(settings: RunSettings, _jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Throughput that merging and the two-stage packer add, and how often the packer beats greedy.

    Raises:
        ConfigError: no described cluster.
    """
    begun = opened(settings, asked)
    trace, even = begun.trace, begun.even
    part("schedules with and without merging and two-stage packing")
    order, size = list(turns(global_batches(trace), groups_of(trace, asked, even.stages))), asked.capacity
    packed = {
        "two-stage packing": pack_all(order, capacity=size, tile=asked.tile),
        "greedy": pack_all(order, capacity=size, tile=asked.tile, limits=GREEDY),
        "samples as they come": [next_fit(turn, capacity=size, tile=asked.tile) for turn in order],
    }
    runs = {
        (how, merging): ordered(each, even, capacity=size, tile=asked.tile, merging=merging)
        for how, each in packed.items()
        for merging in (True, False)
    }
    plait = planned(trace, begun.profile, asked)
    best, *others = packed
    figures = [
        replace(
            _gain("merging", runs[best, True], runs[best, False]), plait=_percent(plait, runs[best, False])
        ),
        _gain(f"merging, {GREEDILY}", runs["greedy", True], runs["greedy", False]),
    ]
    for how in others:
        name = f"{best} over {how}"
        merged = _gain(f"{name}, merged", runs[best, True], runs[how, True])
        figures += [
            replace(merged, plait=_percent(plait, runs[how, True])),
            _gain(f"{name}, not merged", runs[best, False], runs[how, False]),
        ]
    figures += _plaits_gains(begun)
    figures.append(Figure("packings better than greedy", _share_better(trace, asked), "%", "computed"))
    return Report("lorafusion/packing_gain", tuple(figures), asked.assumptions())


GREEDILY = "packed greedily"


def _percent(after: Pipeline, before: Pipeline) -> float:
    """Tokens a second over those of another schedule, less 1."""
    return 100 * (rate_in_runs(after) / rate_in_runs(before) - 1)


def _gain(name: str, after: Pipeline, before: Pipeline) -> Figure:
    note = ", after ".join(
        f"{each.microbatches} microbatches, {100 * each.padding_share:.2f} % padding"
        for each in (measure({0: pipeline})[0] for pipeline in (after, before))
    )
    return Figure(name, _percent(after, before), "%", "simulated", note=note)


def _plaits_gains(begun: Opening) -> list[Figure]:
    """The gains in Plait's order: merging whole microbatches and parts of them, and two-stage packing."""
    figures, merged = [], {}
    for limits, how in ((PackingLimits(), ""), (GREEDY, f", {GREEDILY}")):
        apart, whole, merged[how] = (
            plaits_order(
                begun.trace, begun.even, begun.asked, limits=limits, merging=merging, filling=filling
            )
            for merging, filling in ((False, False), (True, False), (True, True))
        )
        figures += [
            _gain(f"{PLAITS}: merging{how}", merged[how], apart),
            _gain(f"{PLAITS}: merging, whole microbatches only{how}", whole, apart),
        ]
    figures.append(_gain(f"{PLAITS}: two-stage packing over greedy", *merged.values()))
    return figures


def _share_better(trace: Trace, asked: Options) -> float:
    """Share of packings in which the two-stage packer's answer is used."""
    better = total = 0
    for turn in turns(global_batches(trace), groups_of(trace, asked, asked.stages)):
        packing = solve_packing([batch.lengths for batch in turn], capacity=asked.capacity, tile=asked.tile)
        better += packing.method != "greedy"
        total += 1
    return 100 * better / total


def groups_of(trace: Trace, asked: Options, stages: int) -> tuple[tuple[str, ...], ...]:
    """The groups of a trace's jobs, as LoRAFusion's artifact makes them."""
    return grouped(trace, capacity=asked.capacity, stages=stages)


@benchmark("lorafusion/scheduler_time", Options)
def scheduler_time(_settings: RunSettings, _jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Seconds that planning takes here, by number of samples, packing over a pool of processes."""
    workers = min(asked.workers, os.cpu_count() or 1)
    figures = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        _planning_seconds(asked.drawn(steps=4), asked, pool)  # starts the processes
        piece = part("planning", len(asked.batches))
        for steps in asked.batches:
            piece(f"{steps} global batches of each adapter")
            trace = asked.drawn(steps=steps)
            samples = asked.adapters * steps * asked.global_batch
            packing, whole = _planning_seconds(trace, asked, pool)
            note = f"packing {1000 * packing / samples:.3f} ms a sample, {workers} processes"
            figures.append(Figure(f"{samples} samples", whole, "s", "measured", note=note))
    return Report("lorafusion/scheduler_time", tuple(figures), asked.assumptions())


def _planning_seconds(trace: Lengths, asked: Options, pool: ProcessPoolExecutor) -> tuple[float, float]:
    """Seconds of packing alone, and with grouping, merging, ordering and the verifier."""
    order = list(turns(global_batches(trace), groups_of(trace, asked, asked.stages)))
    begin = perf_counter()
    pack_all(order, capacity=asked.capacity, tile=asked.tile, pool=pool)
    packing = perf_counter() - begin
    plan_schedule(trace, stages=asked.stages, capacity=asked.capacity, tile=asked.tile, pool=pool)
    return packing, perf_counter() - begin - packing


def imbalance_floor(seconds: Sequence[Sequence[StageTime]]) -> float:
    """Idle share that stages of unequal cost leave even without fill, drain and raggedness."""
    costs = [sum(item.total for item in stage) for stage in seconds]
    return 1 - sum(costs) / (len(costs) * max(costs))
