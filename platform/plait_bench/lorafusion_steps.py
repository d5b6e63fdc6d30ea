"""LoRAFusion's workload without its kernels: what schedules add, and padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.cost.replica import even_split
from plait.simulate.events import Pipeline
from plait.simulate.report import measure
from plait_bench.benchmarks import BENCHMARKS
from plait_bench.figures import Figure, Report
from plait_bench.inputs import read_profile
from plait_bench.lorafusion import balanced, machine, planned, read_options
from plait_bench.pipelines import lorapp, one_after_another, plan_schedule, planned_pipeline


@BENCHMARKS.register("lorafusion/breakdown")
def breakdown(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Tokens a second over 1F1B's: jobs in turn, balanced microbatches, and Plait's plan.

    Raises:
        ConfigError: no described cluster, or an unknown option.
    """
    del jobs
    asked, profile = read_options(options), read_profile(settings)
    trace = asked.lengths()
    even = machine(profile, even_split(profile.time.layers, asked.stages))
    plan = plan_schedule(trace, stages=asked.stages, capacity=asked.capacity, tile=asked.tile)
    own = planned(trace, machine(profile, balanced(profile, asked)), asked)
    figures: list[Figure] = []
    for padded, how in ((False, ""), (True, ", samples padded to the longest")):
        base = _rate(one_after_another(trace, even, size=asked.samples, padded=padded, gpipe=False))
        works = lorapp(trace, even, size=asked.samples, padded=padded).works
        ours = _rate(own) / base
        systems = {
            "jobs in turn": even.in_order(works),
            "balanced": planned_pipeline(plan, even, padding=True),
        }
        figures += [
            Figure(f"{name}{how}", _rate(each) / base, "× 1F1B", "simulated", plait=ours)
            for name, each in systems.items()
        ]
    return Report("LoRAFusion, what schedules add", tuple(figures), asked.assumptions())


def _rate(pipeline: Pipeline) -> float:
    return measure({0: pipeline})[0].tokens_per_second


@BENCHMARKS.register("lorafusion/padding")
def padding(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Share of padding among computed tokens: padded to the longest, by samples, and packed.

    Raises:
        ConfigError: no described cluster, or an unknown option.
    """
    del jobs
    asked, profile = read_options(options), read_profile(settings)
    trace = asked.lengths()
    even = machine(profile, even_split(profile.time.layers, asked.stages))
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
