"""`plait bench record_curves`: every trial of a grid to its end, then the same grid searched with rungs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from plait.core.errors import ConfigError, PlaitError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import JobEvaluated, JobGenerated, JobProgress
from plait.core.settings import RunSettings
from plait.engine.coordinator import Coordinator
from plait.tracking.facts import git_state, hardware
from plait_bench.benchmarks import benchmark
from plait_bench.curves import Curve, Point, RecordedCurves, write_curves
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.joint_side import JointSide, load_joint_side
from plait_bench.listed_search import JointSearch, parameters_apart, search_together
from plait_bench.progress import part

PACKAGES = ("torch", "transformers", "optuna", "numpy", "reasoning-gym")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of ``record_curves``.

    Attributes:
        path: of the record; None: ``curves.json`` below ``tracking.root``.
        steps: after which each trial is evaluated, those within its budget; its end is added.
        search: whether the search that ``search.stopping`` asks for is run as well, on the same jobs.
        processor_time: count the processor's seconds of this process instead of the clock's, so that what
            else runs on the machine does not count; meant for one thread.
    """

    path: Path | None = None
    steps: tuple[int, ...] = ()
    search: bool = True
    processor_time: bool = False


@benchmark("record_curves", Options)
def record_curves(settings: RunSettings, jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Train ``jobs`` together, evaluate each at the same steps, and write the curves.

    Raises:
        ConfigError: no jobs, steps outside of their budgets, or an unknown option.
        PlaitError: a job failed.
    """
    clock = process_time if asked.processor_time else perf_counter
    side = load_joint_side(settings, jobs, clock)
    steps = {job.name: _steps(asked.steps, side.steps(job)) for job in jobs}
    side.warm_up(jobs[0])
    with tempfile.TemporaryDirectory() as folder:
        curves = record(side, jobs, steps, Path(folder))
    seconds = "of the processor" if asked.processor_time else "of the clock"
    recorded = RecordedCurves(tuple(curves), facts(settings, jobs) | {"seconds": seconds})
    path = asked.path or settings.tracking.root / "curves.json"
    write_curves(recorded, path)
    figures = _figures(recorded)
    if asked.search and settings.search.stopping.active:
        part(f"the same jobs searched with {settings.search.stopping.kind}")
        with tempfile.TemporaryDirectory() as folder:
            found = search_together(side, jobs, settings.search, Path(folder))
        figures += _search_figures(recorded, found)
    return Report("record_curves", tuple(figures), (f"The curves are in {path}.",))


def _steps(asked: Sequence[int], budget: int) -> tuple[int, ...]:
    if min(asked, default=1) < 1:
        raise ConfigError(f"bench.options.steps={list(asked)}", "They begin with 1.")
    return tuple(sorted({*(step for step in asked if step < budget), budget}))


def record(
    side: JointSide, jobs: Sequence[JobSpec], steps: Mapping[str, Sequence[int]], folder: Path
) -> list[Curve]:
    """Train ``jobs`` together to their ends; the curve of each, in their order.

    Args:
        side: model and data.
        jobs: of any budgets.
        steps: after which each is evaluated, by name; the last is its budget.
        folder: for adapters.

    Raises:
        PlaitError: a job failed.
    """
    coordinator = Coordinator(side.worker, side.data, side.settings, folder=folder)
    points: dict[str, list[Point]] = {job.name: [] for job in jobs}
    last: dict[str, JobProgress] = {}
    for job in jobs:
        coordinator.submit(job, rungs=steps[job.name][:-1], measured=True)
    longest = max(steps, key=lambda name: steps[name][-1])
    piece = part(f"{len(jobs)} jobs together", len(steps[longest]))
    piece(f"to step {steps[longest][0]}")
    while not coordinator.idle:
        for event in coordinator.advance():
            match event:
                case JobProgress():
                    last[event.job] = event
                case JobEvaluated():
                    taken, before = points[event.job], last[event.job]
                    trained = before.device_seconds - sum(point.evaluation_seconds for point in taken)
                    spent = event.device_seconds - before.device_seconds
                    taken.append(Point(event.step, event.loss, trained, spent, before.loss))
                    if event.step < steps[event.job][-1]:
                        coordinator.resume(event.job, PauseReason.AT_RUNG)
                        if event.job == longest:
                            piece(f"to step {steps[longest][len(taken)]}")
                case JobGenerated():
                    spent = event.device_seconds - last[event.job].device_seconds
                    points[event.job][-1] = replace(
                        points[event.job][-1], accuracy=event.accuracy, evaluation_seconds=spent
                    )
                case JobResult() if event.state != JobState.FINISHED:
                    raise PlaitError(
                        f"{event.job} {event.state}: {event.reason}", "Every job of a recording must finish."
                    )
    return [
        Curve(point, tuple(points[job.name])) for job, point in zip(jobs, parameters_apart(jobs), strict=True)
    ]


def facts(settings: RunSettings, jobs: Sequence[JobSpec]) -> dict[str, Any]:
    """What curves of these jobs depend on."""
    apart = parameters_apart(jobs)[0].keys()
    git = git_state(Path(__file__).parent)
    machine = hardware()
    return {
        "date": date.today().isoformat(),
        "commit": git.commit,
        "changed since": git.dirty,
        "machine": {name: machine[name] for name in ("processor", "cpus", "memory_bytes", "python")},
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in PACKAGES},
        "model": {"kind": settings.model.kind, "dtype": settings.model.dtype},
        "capacity": settings.engine.capacity_or_usual,
        "together": len(jobs),
        "job": {key: value for key, value in jobs[0].parameters().items() if key not in apart},
    }


def _figures(recorded: RecordedCurves) -> list[Figure]:
    count = len(recorded.curves)
    evaluations = sum(point.evaluation_seconds for curve in recorded.curves for point in curve.points[:-1])
    best = min(recorded.curves, key=lambda curve: curve.last.loss)
    return [
        Figure("trials of the full grid", count, "", "measured", note=f"evaluated at {list(recorded.steps)}"),
        Figure("full grid: best loss", recorded.best, "nats", "measured", note=str(dict(best.parameters))),
        Figure("full grid: device time", recorded.seconds, "s", "measured", note="each evaluated at its end"),
        Figure("its earlier evaluations", evaluations, "s", "measured"),
    ]


FULL_GRID = "the full grid, every trial to its end"


def _search_figures(recorded: RecordedCurves, found: JointSearch) -> list[Figure]:
    name = min(found.finished, key=lambda job: found.finished[job])
    chosen = recorded.curves[found.names.index(name)]
    share = 100 * found.device_seconds / recorded.seconds
    gap = 100 * (chosen.last.loss / recorded.best - 1)
    return [
        Figure(
            "real pruned search: best loss",
            found.finished[name],
            "nats",
            "measured",
            Baseline(recorded.best, FULL_GRID),
            note=f"{dict(chosen.parameters)}; {len(found.finished)} trials to their ends",
        ),
        Figure("what it chose, in the full grid: above the best", gap, "%", "measured"),
        Figure(
            "its device time",
            found.device_seconds,
            "s",
            "measured",
            Baseline(recorded.seconds, FULL_GRID),
            note="states and adapters included",
        ),
        Figure("its device time, as a share of the full grid's", share, "%", "measured"),
    ]
