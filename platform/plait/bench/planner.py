"""All that planning costs, in one run: deployment, a step's dispatch, packing; with distances to bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from plait.bench import lorafusion, planning_time
from plait.bench.figures import Figure, Report
from plait.jobs import JobSpec
from plait.settings import RunSettings


def run(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """The figures of the benchmarks of deployment and packing, and milliseconds of packing by sample.

    Options: ``lobra`` and ``lorafusion``, those of ``lobra/planning_time`` and ``lorafusion/scheduler_time``;
    ``packing_published`` (published milliseconds by sample).

    Raises:
        ConfigError: an unknown option.
    """
    deployed = planning_time.run(settings, jobs, cast("Mapping[str, object]", options["lobra"]))
    packed = lorafusion.scheduler_time(settings, jobs, cast("Mapping[str, object]", options["lorafusion"]))
    published = float(cast("float", options["packing_published"]))
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
                published,
                "LoRAFusion, figure 21, largest case",
                note="grouping, packing, merging, ordering and verifying",
            )
        )
    return Report("Planner", tuple(figures), (*deployed.assumptions, *packed.assumptions))
