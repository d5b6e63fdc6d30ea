"""Plait's side: the search loop with its real study, rules and engine, over listed jobs, without MLflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from plait.core.errors import PlaitError
from plait.core.jobs import JobSpec
from plait.core.settings import SearchSettings
from plait.engine.accounting import NANOSECONDS
from plait.engine.coordinator import Coordinator
from plait.search.run import SearchRun
from plait.search.stopper import make_stopper, shortest_budget
from plait.search.trials import Trial
from plait_bench.joint_side import JointSide
from plait_bench.replay_study import Evaluation, Timeline, listed_study, parameters_apart


@dataclass(slots=True)
class Stopwatch:
    """Seconds since it was made, without those spent inside :meth:`outside`."""

    _started: float
    _away: float = 0.0

    @classmethod
    def start(cls) -> Stopwatch:
        """Begin now."""
        return cls(perf_counter())

    def read(self) -> float:
        """Seconds so far."""
        return perf_counter() - self._started - self._away

    def outside(self, action: Callable[[], None]) -> None:
        """Do something that does not count."""
        began = perf_counter()
        action()
        self._away += perf_counter() - began


@dataclass(frozen=True, slots=True)
class JointSearch:
    """What a joint search came to.

    Attributes:
        evaluations: with the time at which each was there.
        seconds: of the whole search: drawing, packing, training, evaluations, parking, rules, export.
        device_seconds: of them, what the worker took, as charged to the jobs.
        finished: losses at the ends of the jobs that came to them, by job.
        names: the jobs' names in the search, in the order of the jobs.
    """

    evaluations: tuple[Evaluation, ...]
    seconds: float
    device_seconds: float
    finished: dict[str, float]
    names: tuple[str, ...]


def search_together(
    side: JointSide,
    jobs: Sequence[JobSpec],
    search: SearchSettings,
    folder: Path,
    between: Callable[[], None] = lambda: None,
) -> JointSearch:
    """Search listed jobs in their order.

    Args:
        side: model and data.
        jobs: all different; they are renamed as trials.
        search: its settings; its sampler draws nothing.
        folder: for states and adapters.
        between: called between two iterations, not timed.

    Raises:
        ConfigError: two jobs are the same, or a rung is not within the budget.
        PlaitError: a trial failed.
    """
    points = parameters_apart(jobs)
    study = listed_study(points, search)
    of_point = {tuple(point.items()): job for point, job in zip(points, jobs, strict=True)}

    def make_job(trial: Trial) -> JobSpec:
        return replace(of_point[tuple(trial.values.items())], name=trial.name)

    def stop() -> bool:
        watch.outside(between)
        return False

    coordinator = Coordinator(side.worker, side.data, side.settings, folder=folder)
    budget = shortest_budget(jobs, side.data)
    stopper = make_stopper(search, budget, study.rungs)
    watch = Stopwatch.start()
    timeline = Timeline(watch.read)
    SearchRun(study, make_job, coordinator, timeline, search, stop, stopper).run()
    seconds = watch.read()
    failed = {job: reason for job, (state, _, reason) in timeline.ends.items() if state == "failed"}
    if failed:
        raise PlaitError(f"failed: {failed}", "No trial of a benchmark may fail.")
    return JointSearch(
        tuple(timeline.evaluations),
        seconds,
        coordinator.device_ns / NANOSECONDS,
        timeline.finished,
        tuple(Trial(number).name for number in range(len(jobs))),
    )
