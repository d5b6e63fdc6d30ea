"""All that planning costs, in one run: deployment, a step's dispatch, packing; with distances to bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.config.fields import build
from plait.core.figures import Figure, Report
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.utils.benchmarks import BENCHMARKS
from plait_bench import lorafusion, planning_time
from plait_bench.lorafusion_workload import read_options


@dataclass(frozen=True, slots=True)
class Options:
    """Of the benchmark.

    Attributes:
        lobra: those of ``lobra/planning_time``.
        lorafusion: those of ``lorafusion/scheduler_time``.
        packing_published: milliseconds by sample.
    """

    lobra: dict[str, Any]
    lorafusion: dict[str, Any]
    packing_published: float


@BENCHMARKS.register("planner")
def run(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """The figures of the benchmarks of deployment and packing, and milliseconds of packing by sample.

    Raises:
        ConfigError: a wrong option, or a cluster that is not described.
    """
    asked = build(Options, options, "bench.options")
    read_options(asked.lorafusion)  # a mistake there is said before the deployments' seconds
    deployed = planning_time.run(settings, jobs, asked.lobra)
    packed = lorafusion.scheduler_time(settings, jobs, asked.lorafusion)
    figures = [*deployed.figures]
    for figure in packed.figures:
        samples = int(figure.name.split()[0])
        figures.append(replace(figure, name=f"packing, {figure.name}"))
        figures.append(
            Figure(
                f"packing, {figure.name}: each",
                1000.0 * figure.ours / samples,
                "ms",
                "measured",
                asked.packing_published,
                "LoRAFusion, figure 21, largest case",
                note="grouping, packing, merging, ordering and verifying",
            )
        )
    return Report("Planner", tuple(figures), (*deployed.assumptions, *packed.assumptions))
