"""Seconds that planning takes: deployment by devices, dispatch and bucketing by step, packing by samples."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Annotated

from plait.core.checks import NOT_EMPTY, Rule, between
from plait.core.jobs import JobSpec
from plait.core.samples import Int64
from plait.core.settings import RunSettings
from plait.cost.profiles import ClusterProfile
from plait.planner.buckets import dynamic_buckets
from plait.planner.deployment import GAP, deploy, relaxation_bound
from plait.planner.dispatch import dispatch, spread
from plait.planner.dispatch_step import Replicas, plan_step
from plait.planner.solver import Limits
from plait_bench.benchmarks import benchmark
from plait_bench.exact import exact_dispatch
from plait_bench.figures import Figure, Published, Report
from plait_bench.inputs import read_profile
from plait_bench.lobra import (
    ALIGNED,
    SAMPLE_STEPS,
    Assumption,
    Rows,
    Task,
    costs_of,
    deployed,
    devices_of,
    drawn_steps,
    expected_counts,
    limits,
)
from plait_bench.lobra_plans import plan_figures
from plait_bench.progress import part

SOURCE = "LobRA appendix B.2, Table 5 (70B, 4 tasks)"
WHOLE_STEP = "whole step (bucketing, search and by replica)"
BY_NUMBER = Rule(
    "a mapping by numbers of devices, each at least 1", lambda found: all(count >= 1 for count in found)
)
ILP = Limits(nodes=500, gap=0.005, seconds=5.0)


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """Options of ``lobra/planning_time``.

    Attributes:
        tasks: of the joint batch.
        assumptions: about lengths; deployments are planned for each, dispatch is for the first.
        devices: published seconds, None if there are none, by number of devices.
        kinds: of replica, that the dispatch is to.
        steps: drawn and dispatched.
        step_seconds: that a step trains while the next one is planned.
        plans: published deployments by number of devices, which are compared with Plait's.
        gap: to the proved bound at which planning ends.
    """

    tasks: tuple[Task, ...]
    assumptions: Annotated[tuple[Assumption, ...], NOT_EMPTY]
    devices: Annotated[dict[int, float | None], BY_NUMBER]
    kinds: Rows
    steps: Annotated[int, between(1, SAMPLE_STEPS)]
    step_seconds: Annotated[float, between(0, 60)]
    plans: dict[int, Rows] = field(default_factory=dict)
    gap: float = GAP


@benchmark("lobra/planning_time", DeploymentOptions)
def planning_time(settings: RunSettings, _jobs: Sequence[JobSpec], asked: DeploymentOptions) -> Report:
    """Planning seconds compared with the published ones, with each plan's distance to its proved bound.

    Raises:
        ConfigError: a cluster that is not described.
    """
    profile = read_profile(settings)
    samples = {str(each): drawn_steps(asked.tasks, each, SAMPLE_STEPS) for each in asked.assumptions}
    figures = []
    piece = part("deployments", len(asked.devices))
    for devices, theirs in asked.devices.items():
        piece(f"{devices} devices")
        figures += _deployment_figures(profile, [*samples.values()], devices, theirs, asked.gap)
        if rows := asked.plans.get(devices):
            for number, (assumption, known) in enumerate(samples.items()):
                label = f"; {assumption}" if number else ""
                some, case = _on(profile, devices), f"{devices} devices"
                figures += plan_figures(some, known, rows, case, label, gap=asked.gap)
    batches = next(iter(samples.values()))[: asked.steps]
    part("dispatch by step")
    some = _on(profile, sum(tp * pp * count for tp, pp, count in asked.kinds))
    figures += _dispatch_figures(some, batches, asked.kinds)
    figures += _ahead_figures(some, batches, asked.kinds, asked.step_seconds)
    return Report("Planning time", tuple(figures), (*samples, f"cost model: {profile.source}"))


def _deployment_figures(
    profile: ClusterProfile, samples: Sequence[Int64], devices: int, theirs: float | None, gap: float
) -> list[Figure]:
    """One batch whatever the devices, as published, and a batch that grows with them: medians, the worst."""
    figures, some = [], _on(profile, devices)
    for name, share in (("one batch", profile.devices.count), ("batch by devices", devices)):
        seconds, plans, instances = [], [], []
        for known in samples:
            buckets = dynamic_buckets(known.ravel(), required=limits(profile))
            costs = costs_of(some, buckets.lengths)
            expected = expected_counts(buckets.counts, known.shape[1])
            counts = [-(-count * share // profile.devices.count) for count in expected]
            instances.append((costs, counts))
            begin = process_time()  # other work on the machine does not count
            plans.append(deploy(costs, counts, devices_of(some), gap=gap))
            seconds.append(process_time() - begin)
        case, plan = f"deployment, {devices} devices, {name}", plans[0]
        linear = relaxation_bound(*instances[0], devices_of(some))
        published = (  # of another model, on another machine
            None if theirs is None else Published(theirs, SOURCE, sense="at most", weak="other workload")
        )
        note = f"longest {max(seconds):.2f} s; " if len(plans) > 1 else ""
        note += f"{plan}; step {plan.makespan:.3f} s, bound {plan.bound:.3f} s, LP bound {linear:.3f} s"
        struck = sorted({each.limit_hit for each in plans if each.limit_hit})
        note += f"; limit hit: {', '.join(struck)}" if struck else ""
        gaps = [100.0 * each.gap for each in plans]
        worst = f"worst {max(gaps):.2f} %" if len(plans) > 1 else ""
        figures.append(Figure(case, median(seconds), "s", "measured", published, note))
        figures.append(Figure(f"{case}: above the bound", median(gaps), "%", "computed", note=worst))
    return figures


def _dispatch_figures(profile: ClusterProfile, batches: Int64, rows: Rows) -> list[Figure]:
    """Median milliseconds of a step's bucketing and dispatch, with the median distance to the bound."""
    parts = ("bucketing", "search", "by replica")
    seconds: dict[str, list[float]] = {name: [] for name in (*parts, WHOLE_STEP, "program")}
    gaps: dict[str, list[float]] = {"search": [], "by replica": [], "program": []}
    for batch in batches:
        begin = perf_counter()
        buckets = dynamic_buckets(batch, interval=ALIGNED, required=limits(profile))
        seconds["bucketing"].append(perf_counter() - begin)
        kinds = deployed(profile, buckets.lengths, rows)
        begin = perf_counter()
        found = dispatch(kinds, buckets.counts)
        seconds["search"].append(perf_counter() - begin)
        begin = perf_counter()
        each = spread(kinds, buckets.counts, found)
        seconds["by replica"].append(perf_counter() - begin)
        seconds[WHOLE_STEP].append(sum(seconds[name][-1] for name in parts))
        begin = perf_counter()
        exact = exact_dispatch(kinds, buckets.counts, ILP)
        seconds["program"].append(perf_counter() - begin)
        for name, result in (("search", found), ("by replica", each), ("program", exact)):
            gaps[name].append(result.gap)
    case = f"dispatch, {len(rows)} kinds of replica"
    return [
        *(Figure(f"{case}: {name}", 1e3 * median(each), "ms", "measured") for name, each in seconds.items()),
        *(
            Figure(f"{case}: {name} above the bound", 100.0 * median(each), "%", "computed")
            for name, each in gaps.items()
        ),
    ]


def _ahead_figures(profile: ClusterProfile, batches: Int64, rows: Rows, step_seconds: float) -> list[Figure]:
    """Median and longest milliseconds that a step waits for its plan: made when it begins, and made ahead.

    Ahead is in a thread, as the engine does it.
    """
    deployment = deployed(profile, limits(profile), rows)
    kinds = ((kind.cost.configuration, profile.time, kind.count) for kind in deployment)
    to = Replicas(tuple(kinds))
    steps = [[int(length) for length in batch] for batch in batches]
    now, ahead = [], []
    with ThreadPoolExecutor(1) as executor:
        for lengths in steps:
            plan = executor.submit(plan_step, lengths, to)
            sleep(step_seconds)  # the step before trains
            begin = perf_counter()
            plan.result()
            ahead.append(perf_counter() - begin)
            begin = perf_counter()
            plan_step(lengths, to)
            now.append(perf_counter() - begin)
    return [
        Figure(
            f"dispatch, a step waits: {name}",
            1e3 * median(seconds),
            "ms",
            "measured",
            note=f"longest {1e3 * max(seconds):.1f} ms; steps of {1e3 * step_seconds:.0f} ms, slept",
        )
        for name, seconds in (("planned when it begins", now), ("planned ahead", ahead))
    ]


def _on(profile: ClusterProfile, count: int) -> ClusterProfile:
    """The profile on so many devices."""
    return replace(profile, devices=replace(profile.devices, count=count))
