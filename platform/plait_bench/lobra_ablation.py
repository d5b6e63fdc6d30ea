"""LobRA's ablation of the 7B model: device-seconds saved over Task-Fused, step by step (LobRA Figure 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plait.config.fields import build
from plait.core.errors import ConfigError
from plait.core.figures import Figure, Report
from plait.core.jobs import JobSpec
from plait.core.samples import Int64
from plait.core.settings import RunSettings
from plait.cost.profiles import ClusterProfile
from plait.planner.buckets import dynamic_buckets, fixed_buckets
from plait.planner.deployment import DeployOptions, deploy
from plait.planner.dispatch import dispatch, length_based, spread
from plait.planner.dispatch_search import ReplicaKind
from plait.planner.solver import Limits
from plait.utils.benchmarks import BENCHMARKS
from plait_bench.lobra_workload import (
    Assumption,
    Rows,
    Task,
    Workload,
    costs_of,
    limits,
    replicas,
)
from plait_bench.lorafusion_workload import read_profile

SOURCE = "LobRA §5.3, Figure 8"
STEPS = ("heterogeneous replicas, length-based", "+ balanced dispatch", "+ dynamic bucketing")
OURS = "Plait's deployment, shares by replica"
LIMITS = Limits(nodes=100, gap=0.005, seconds=5.0)
SAMPLE_STEPS = 100


@dataclass(frozen=True, slots=True)
class Options:
    """Of the benchmark.

    Attributes:
        tasks: of the joint batch.
        assumptions: about lengths, each shown.
        fused: the deployment of equal replicas.
        deployment: the published one.
        saved_percent: published, by step of the ablation.
        steps: drawn, over which is averaged.
        boundaries: of fixed buckets by name; None for the least padding over the sample.
    """

    tasks: tuple[Task, ...]
    assumptions: tuple[Assumption, ...]
    fused: Rows
    deployment: Rows
    saved_percent: tuple[float, float, float]
    steps: int
    boundaries: dict[str, tuple[int, ...] | None]

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"bench.options.steps={self.steps}", "It must be at least 1.")
        for name, edges in self.boundaries.items():
            if edges is not None and (not edges or edges[0] < 1 or list(edges) != sorted(set(edges))):
                raise ConfigError(
                    f"bench.options.boundaries: {name}={list(edges)}", "They must rise from at least 1."
                )


@BENCHMARKS.register("lobra/ablation")
def run(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Device-seconds saved by each step, for each assumption about lengths and fixed boundaries.

    Raises:
        ConfigError: a wrong option, or a cluster that is not described.
    """
    del jobs
    asked = build(Options, options, "bench.options")
    profile = read_profile(settings)
    figures = []
    for assumption in asked.assumptions:
        for name, edges in asked.boundaries.items():
            saved = savings(profile, assumption, edges, asked)
            for step, ours, theirs in zip((*STEPS, OURS), saved, (*asked.saved_percent, None), strict=True):
                label = f"{assumption}; fixed buckets {name}: {step}"
                source = SOURCE if theirs is not None else ""
                figures.append(Figure(label, ours, "% saved", "simulated", theirs, source))
    return Report(
        "LobRA ablation, 7B on 16 A100-40GB: device-seconds saved over Task-Fused",
        tuple(figures),
        (
            f"cost model: {profile.source}",
            "The paper does not print its fixed bucket boundaries; what they pad decides what dynamic "
            "bucketing can save, so two choices stand beside each other.",
        ),
    )


def savings(
    profile: ClusterProfile,
    assumption: Assumption,
    boundaries: Sequence[int] | None,
    options: Options,
) -> list[float]:
    """Percent of device-seconds saved by each of :data:`STEPS` and by :data:`OURS`, over drawn steps."""
    sample = Workload.draw(options.tasks, assumption, SAMPLE_STEPS + options.steps)
    known, batches = sample.batches[:SAMPLE_STEPS], sample.batches[SAMPLE_STEPS:]
    seen = dynamic_buckets(known.ravel(), required=limits(profile))
    edges = [*(boundaries or seen.lengths)]
    edges[-1] = max(edges[-1], *limits(profile))
    costs = costs_of(profile, seen.lengths, profile.devices.count)
    expected = Workload(assumption, known).expected(seen)
    plan = deploy(costs, expected, profile.devices.count, DeployOptions())
    rows = {
        "fused": options.fused,
        "published": options.deployment,
        "ours": tuple(_row(kind) for kind in plan.kinds),
    }
    seconds = np.mean([_step_seconds(profile, batch, edges, rows) for batch in batches], axis=0)
    return [float(value) for value in 100.0 * (1.0 - seconds[1:] / seconds[0])]


def _step_seconds(
    profile: ClusterProfile, batch: Int64, edges: Sequence[int], rows: Mapping[str, Rows]
) -> list[float]:
    """Seconds of one step: Task-Fused, the three steps of the ablation, and Plait."""
    fixed = fixed_buckets(batch, edges)
    costs = costs_of(profile, fixed.lengths, profile.devices.count)
    fused, published = replicas(costs, rows["fused"]), replicas(costs, rows["published"])
    moving = dynamic_buckets(batch, required=limits(profile))
    moved = costs_of(profile, moving.lengths, profile.devices.count)
    ours = replicas(moved, rows["ours"])
    return [
        max(kind.cost.seconds([-(-count // kind.count) for count in fixed.counts]) for kind in fused),
        length_based(published, fixed.counts).makespan,
        dispatch(published, fixed.counts, LIMITS).makespan,
        dispatch(replicas(moved, rows["published"]), moving.counts, LIMITS).makespan,
        spread(ours, moving.counts, dispatch(ours, moving.counts)).makespan,
    ]


def _row(kind: ReplicaKind) -> tuple[int, int, int]:
    return kind.cost.configuration.tp, kind.cost.configuration.pp, kind.count
