"""LoRAFusion's workload without its kernels: what schedules add, padding, capacities and scaling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean

from plait.core.jobs import JobSpec
from plait.core.plans import GlobalBatch, Replica
from plait.core.settings import RunSettings
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import even_split
from plait.planner.dispatch_step import Batches, Dispatcher, by_dispatch
from plait.simulate.events import Pipeline
from plait.simulate.forecast import PlanOptions, make_plan, plan_pipelines
from plait.simulate.report import measure
from plait_bench.benchmarks import BENCHMARKS
from plait_bench.blocking import blocking_seconds
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.lorafusion import Lengths, Opening, Options, balanced, machine, opened, planned
from plait_bench.pipelines import (
    global_batches,
    lorapp,
    one_after_another,
    plan_schedule,
    planned_pipeline,
    sharded_rate,
)
from plait_bench.progress import part

LEAST = 0.95  # tokens a second at LoRAFusion's capacity over those at the best one, if both agree


@BENCHMARKS.register("lorafusion/breakdown")
def breakdown(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Tokens a second over 1F1B's: jobs in turn, balanced microbatches, and Plait's plan.

    Raises:
        ConfigError: no described cluster, or an unknown option.
    """
    del jobs
    begun = opened(settings, options)
    asked, figures = begun.asked, list[Figure]()
    for padded, how in ((False, ""), (True, ", samples padded to the longest")):
        base, turn, fused, own = systems(begun, begun.trace, asked, padded=padded)
        rates = {"jobs in turn": (turn, own), "balanced": (fused, own)}
        if not padded:
            rates["balanced, one adapter a microbatch"] = (_apart(begun), own)
            rates |= {_with_kernels(each, asked): (each * fused, each * own) for each in asked.kernels}
        figures += [
            Figure(f"{name}{how}", each / base, "× 1F1B", "simulated", plait=plait / base)
            for name, (each, plait) in rates.items()
        ]
    return Report("LoRAFusion, what schedules add", tuple(figures), asked.assumptions())


def _with_kernels(factor: float, asked: Options) -> str:
    label = "" if factor == asked.kernels[0] else f"; × {factor:g}"
    return f"balanced, with its kernels{label}"


def _apart(begun: Opening) -> float:
    """Tokens a second of LoRAFusion's schedule if no microbatch holds samples of two adapters."""
    asked, trace = begun.asked, begun.trace
    plan = plan_schedule(
        trace,
        stages=asked.stages,
        capacity=asked.capacity,
        tile=asked.tile,
        merging=False,
        groups=len(trace),
    )
    return _rate(planned_pipeline(plan, begun.even, padding=True))


def systems(begun: Opening, trace: Lengths, asked: Options, *, padded: bool = False) -> tuple[float, ...]:
    """Tokens a second of 1F1B, mLoRA in that order, LoRAFusion and Plait."""
    return tuple(map(_rate, pipelines_of(begun, trace, asked, padded=padded)))


def pipelines_of(
    begun: Opening, trace: Lengths, asked: Options, *, padded: bool = False
) -> tuple[Pipeline, ...]:
    """1F1B, mLoRA in that order, LoRAFusion and Plait."""
    even = begun.even
    works = lorapp(trace, even, size=asked.samples, padded=padded).works
    plan = plan_schedule(trace, stages=asked.stages, capacity=asked.capacity, tile=asked.tile)
    return (
        one_after_another(trace, even, size=asked.samples, padded=padded, gpipe=False),
        even.in_order(works),
        planned_pipeline(plan, even, padding=True),
        planned(trace, machine(begun.profile, balanced(begun.profile, asked)), asked),
    )


def _rate(pipeline: Pipeline) -> float:
    return measure({0: pipeline})[0].tokens_per_second


@BENCHMARKS.register("lorafusion/end_to_end")
def end_to_end(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """LoRAFusion's and Plait's tokens a second over those of 1F1B and mLoRA, by workload.

    Raises:
        ConfigError: no described cluster, or an unknown option.
    """
    del jobs
    begun = opened(settings, options)
    asked, figures = begun.asked, list[Figure]()
    ratios = defaultdict[str, list[tuple[float, float]]](list)
    piece = part("workloads", len(asked.capacities))
    for name, capacity in asked.capacities.items():
        piece(name)
        trace = asked.workload(name)
        base, turn, fused, own = systems(begun, trace, replace(asked, capacity=capacity))
        others = {"1F1B": base, "mLoRA": turn}
        for other, gather in (("FSDP", asked.gather), ("FSDP, weights in time", 0.0)):
            others[other] = sharded_rate(
                trace, begun.profile.time, devices=asked.stages, size=asked.samples, gather=gather
            )
        for other, rate in others.items():
            ratios[other].append((fused / rate, own / rate))
            note = f"{fused:,.0f} over {rate:,.0f} tokens/s"
            title = f"{name}: over {other}, without kernels"
            figures.append(Figure(title, fused / rate, "×", "simulated", note=note, plait=own / rate))
    for number, factor in enumerate(asked.kernels):
        label = "" if number == 0 else f"; kernels × {factor:g}"
        for other, found in ratios.items():
            for how, of in (("mean", mean), ("largest", max)):
                ours, own = (factor * of(each) for each in zip(*found, strict=True))
                figures.append(Figure(f"over {other}, {how}{label}", ours, "×", "simulated", plait=own))
    notes = (
        *asked.assumptions(),
        f"LoRAFusion's kernels: a factor of {asked.kernels[0]:g}, by its Figure 22.",
    )
    return Report("LoRAFusion, tokens a second of four adapters", tuple(figures), notes)


@BENCHMARKS.register("lorafusion/profiler")
def profiler(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Tokens a second at LoRAFusion's capacity over those at the best of the tried ones, by workload.

    Raises:
        ConfigError: no described cluster, or an unknown option.
    """
    del jobs
    begun = opened(settings, options)
    figures = []
    piece = part("workloads", len(begun.asked.capacities))
    for name, theirs in begun.asked.capacities.items():
        piece(name)
        trace = begun.asked.workload(name)
        rates = {
            capacity: _rate(planned_pipeline(plan, begun.even, padding=True))
            for capacity in sorted({*begun.asked.tried, theirs})
            for plan in [
                plan_schedule(trace, stages=begun.asked.stages, capacity=capacity, tile=begun.asked.tile)
            ]
        }
        best = max(rates, key=lambda each: rates[each])
        beside = Baseline(1.0, "the best capacity that was tried", at_least=LEAST)
        note = f"{theirs} tokens; {best} are best, {rates[best]:,.0f} tokens/s"
        figures.append(Figure(name, rates[theirs] / rates[best], "×", "simulated", beside, note))
    return Report("LoRAFusion's capacities over the best", tuple(figures), begun.asked.assumptions())


@BENCHMARKS.register("lorafusion/scaling")
def scaling(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Tokens a second of more jobs over those of data parallelism, by the number of pipelines.

    Raises:
        ConfigError: no described cluster, or an unknown option.
    """
    del jobs
    begun = opened(settings, options)
    asked, profile = begun.asked, begun.profile
    figures = []
    one = {even: _copies(profile, asked, 1, even=even)[0] for even in (True, False)}
    piece = part("pipelines", len(asked.replicas))
    for number in asked.replicas:
        piece(str(number))
        ours, own = (
            [number * one[even] / each for each in _copies(profile, asked, number, even=even)]
            for even in (True, False)
        )
        name = f"{number * asked.stages} devices: jobs over data parallelism"
        note = f"{number * one[True]:,.0f} tokens/s by jobs"
        figures += [
            Figure(f"{name}{how}", jobs_over, "×", "simulated", note=note, plait=plait)
            for how, jobs_over, plait in zip(("; sums hidden", ""), ours, own, strict=True)
        ]
    return Report("LoRAFusion, ways to use more devices", tuple(figures), asked.assumptions())


def _copies(profile: ClusterProfile, asked: Options, number: int, *, even: bool) -> tuple[float, float]:
    """Tokens a second on ``number`` pipelines, which share global batches that are as many times as large:
    as simulated, and if each stage waits for the same stage of the others after each step.

    Args:
        even: equal layers, and samples dealt in turn, as data parallelism does; otherwise Plait's.
    """
    trace = replace(asked, global_batch=number * asked.global_batch).drawn()
    layers = even_split(profile.time.layers, asked.stages) if even else balanced(profile, asked)
    replicas = [Replica(each, pp=asked.stages, layer_split=layers) for each in range(number)]
    options = PlanOptions({each.id: asked.capacity for each in replicas}, drained=False)  # as theirs are
    dealt = Dealt(number) if even else None
    plan = make_plan(global_batches(trace), replicas, profile.time, options, dealt)
    pipelines = plan_pipelines(plan, profile.time, options)
    tokens = sum(work.tokens for each in pipelines.values() for work in each.works)
    groups = {job: group.jobs[0] for group in plan.groups for job in group.jobs}
    return measure(pipelines)[0].tokens_per_second, tokens / blocking_seconds(pipelines, groups)


class Dealt(Dispatcher):
    """Deals samples to replicas in turn, as data parallelism does."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def parts(self, batches: Sequence[GlobalBatch], labelled_share: float) -> dict[int, Batches]:
        """Each replica's part."""
        del labelled_share
        count = sum(len(batch.lengths) for batch in batches)
        return by_dispatch(batches, [at % self._replicas for at in range(count)], range(self._replicas))


@BENCHMARKS.register("lorafusion/padding")
def padding(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Share of padding among computed tokens: padded to the longest, by samples, and packed.

    Raises:
        ConfigError: no described cluster, or an unknown option.
    """
    del jobs
    begun = opened(settings, options)
    asked, trace, even = begun.asked, begun.trace, begun.even
    figures = []
    for tile in (asked.tile, 1):
        plan = plan_schedule(trace, stages=asked.stages, capacity=asked.capacity, tile=tile)
        share = measure({0: planned_pipeline(plan, even, padding=True)})[0].padding_share
        name = "packed, nothing rounded up" if tile == 1 else f"packed, segments rounded up to {tile}"
        figures.append(Figure(name, 100 * share, "%", "computed"))
    apart = one_after_another(trace, even, size=asked.samples, padded=True, gpipe=False)
    share = measure({0: apart})[0].padding_share
    figures.append(Figure(f"{asked.samples} samples padded to the longest", 100 * share, "%", "computed"))
    return Report("LoRAFusion, padding", tuple(figures), asked.assumptions())
