"""LobRA's 7B deployment on 16 A100-40GB beside Plait's, under one cost model, by assumed lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.config.fields import build
from plait.core.figures import Figure, Report
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import ReplicaCost
from plait.planner.deployment import Deployment, DeployOptions, best_equal_replicas, deploy
from plait.planner.dispatch import dispatch
from plait.planner.dispatch_search import ReplicaKind
from plait.planner.solver import Limits
from plait.utils.benchmarks import BENCHMARKS
from plait_bench.lobra_workload import (
    Assumption,
    Rows,
    Task,
    Workload,
    costs_of,
    replicas,
)
from plait_bench.lorafusion_workload import read_profile

SOURCE = "LobRA §5.2, Table 2"
SAMPLE_STEPS = 100  # the distribution is that of 100 steps' sequences, as in the paper
LIMITS = Limits(nodes=500, gap=0.005, seconds=30.0)


@dataclass(frozen=True, slots=True)
class Options:
    """Of the benchmark.

    Attributes:
        tasks: of the joint batch.
        assumptions: about lengths, each shown.
        deployment: the published one.
    """

    tasks: tuple[Task, ...]
    assumptions: tuple[Assumption, ...]
    deployment: Rows


@BENCHMARKS.register("lobra/deploy")
def run(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """The published deployment's seconds over the best one's, for each assumption about lengths.

    Raises:
        ConfigError: a wrong option, or a cluster that is not described.
    """
    del jobs
    asked = build(Options, options, "bench.options")
    profile = read_profile(settings)
    figures = []
    for assumption in asked.assumptions:
        figures += compare(profile, asked.tasks, assumption, asked.deployment)
    return Report(
        "LobRA, 7B on 16 A100-40GB: the published deployment beside Plait's",
        tuple(figures),
        (
            f"cost model: {profile.source}",
            f"most tokens of a microbatch: table {profile.table!r} of {', '.join(profile.tables)}",
            "makespan: T(⌈d/p⌉) of LobRA Eq. 2, integer program within 0.5 % of its bound",
        ),
    )


def compare(
    profile: ClusterProfile, tasks: Sequence[Task], assumption: Assumption, published: Rows
) -> list[Figure]:
    """Figures of one assumption: with every configuration, without pipelines as in LobRA's plan, and with
    replicas that are all equal (Task-Fused)."""
    workload = Workload.draw(tasks, assumption, SAMPLE_STEPS)
    buckets = workload.buckets(profile)
    counts = workload.expected(buckets)
    costs = costs_of(profile, buckets.lengths, profile.devices.count)
    theirs = dispatch(replicas(costs, published), counts, LIMITS)
    figures = []
    needs = _needs_largest(replicas(costs, published), costs, counts)
    for name, allowed in (("all", costs), ("tp only", [cost for cost in costs if not cost.ramp])):
        ours = best(allowed, counts, profile.devices.count)
        figures.append(
            Figure(
                f"{assumption}; {name}: published slower by",
                100.0 * (theirs.makespan / ours.makespan - 1.0),
                "%",
                "computed",
                0.0,
                SOURCE,
                10.0,
                f"Plait: {ours}, {ours.makespan:.2f} s, bound {ours.bound:.2f} s; "
                f"published {theirs.makespan:.2f} s; {needs}",
            )
        )
    chosen = deploy(costs, counts, profile.devices.count)
    equal = best_equal_replicas(costs, counts, profile.devices.count)
    figures.append(
        Figure(
            f"{assumption}; equal replicas (Task-Fused) slower by",
            100.0 * (equal.makespan / chosen.makespan - 1.0),
            "%",
            "computed",
            note=f"{equal}, {equal.makespan:.2f} s; Plait by replica: {chosen}, {chosen.makespan:.2f} s",
        )
    )
    return figures


def _needs_largest(kinds: Sequence[ReplicaKind], costs: Sequence[ReplicaCost], counts: Sequence[int]) -> str:
    """What only the published deployment's largest replica takes, and which configuration would do for it.

    That replica pays where the longest sequences need it, and where there is about as much of them as its
    share of the devices.
    """
    largest, *others = sorted(kinds, key=lambda kind: -kind.cost.configuration.max_tokens)
    most = max(kind.cost.configuration.max_tokens for kind in others)
    rows = [(count, int(length)) for count, length in zip(counts, largest.cost.lengths, strict=True) if count]
    number = sum(count for count, length in rows if length > most)
    share = sum(count * length for count, length in rows if length > most) / sum(
        count * length for count, length in rows
    )
    longest = rows[-1][1]
    able = [cost.configuration for cost in costs if cost.configuration.max_tokens >= longest]
    least = min(able, key=lambda each: (each.devices, each))
    return (
        f"{number} of {sum(counts)} sequences, {100 * share:.1f} % of the tokens, are for its "
        f"{largest.cost.configuration} alone; the longest, {longest} tokens, fits {least}"
    )


def best(costs: Sequence[ReplicaCost], counts: Sequence[int], devices: int) -> Deployment:
    """Plait's deployment judged as LobRA judges, with the integer program's bound."""
    return deploy(costs, counts, devices, DeployOptions(equal_shares=True, exact=True, limits=LIMITS))
