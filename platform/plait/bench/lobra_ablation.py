"""LobRA's ablation of the 7B model: device-seconds saved over Task-Fused, step by step (LobRA Figure 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from plait.bench.figures import Figure, Report
from plait.bench.lobra_workload import (
    Assumption,
    Workload,
    costs_of,
    limits,
    read_assumptions,
    read_tasks,
    replicas,
)
from plait.cost.profiles import ClusterProfile, cluster_profile
from plait.jobs import JobSpec
from plait.planner.buckets import dynamic_buckets, fixed_buckets
from plait.planner.deployment import DeployOptions, deploy
from plait.planner.dispatch import dispatch, length_based, spread
from plait.planner.dispatch_search import ReplicaKind
from plait.planner.solver import Limits
from plait.samples import Int64
from plait.settings import RunSettings

SOURCE = "LobRA §5.3, Figure 8"
STEPS = ("heterogeneous replicas, length-based", "+ balanced dispatch", "+ dynamic bucketing")
OURS = "Plait's deployment, shares by replica"
LIMITS = Limits(nodes=100, gap=0.005, seconds=5.0)
SAMPLE_STEPS = 100
Rows = Sequence[Sequence[int]]


def run(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Device-seconds saved by each step, for each assumption about lengths and fixed boundaries.

    Options: ``tasks``, ``assumptions``, ``fused`` and ``deployment`` (rows [tp, pp, replicas]),
    ``boundaries`` (name: bucket boundaries, null for the least padding over the sample), ``steps``.
    """
    del jobs
    profile = cluster_profile(settings.cluster.options)
    published = cast("Sequence[float]", options["saved_percent"])
    boundaries = cast("Mapping[str, Sequence[int] | None]", options["boundaries"])
    figures = []
    for assumption in read_assumptions(options):
        for name, edges in boundaries.items():
            saved = savings(profile, assumption, edges, options)
            for step, ours, theirs in zip((*STEPS, OURS), saved, (*published, None), strict=True):
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
    options: Mapping[str, object],
) -> list[float]:
    """Percent of device-seconds saved by each of :data:`STEPS` and by :data:`OURS`, over drawn steps."""
    tasks, count = read_tasks(options), int(cast("int", options["steps"]))
    sample = Workload.draw(tasks, assumption, SAMPLE_STEPS + count)
    known, batches = sample.batches[:SAMPLE_STEPS], sample.batches[SAMPLE_STEPS:]
    seen = dynamic_buckets(known.ravel(), required=limits(profile))
    edges = [*(boundaries or seen.lengths)]
    edges[-1] = max(edges[-1], *limits(profile))
    costs = costs_of(profile, seen.lengths, profile.devices.count)
    expected = Workload(assumption, known).expected(seen)
    plan = deploy(costs, expected, profile.devices.count, DeployOptions())
    rows = {
        "fused": cast("Rows", options["fused"]),
        "published": cast("Rows", options["deployment"]),
        "ours": [_row(kind) for kind in plan.kinds],
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
