"""A real search over listed jobs: every point is enqueued, in order, and nothing is tracked.

The study, the rules and the loop are those of `plait sweep`; a :class:`Timeline` stands in for the tracker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

from plait.core.errors import ConfigError, PlaitError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import NANOSECONDS, Event, JobEvaluated
from plait.core.settings import RunSettings, SearchSettings
from plait.core.space import Choice, Dimension, Space, Value
from plait.engine.coordinator import Coordinator
from plait.search.identity import identify
from plait.search.run import SearchLoop
from plait.search.stopper import budgets_of, make_stopper
from plait.search.storage import in_memory, quiet
from plait.search.study import StudyTrials
from plait.search.trials import Trial
from plait_bench.joint_side import JointSide

Parameters = Mapping[str, Value]


def listed_study(points: Sequence[Parameters], search: SearchSettings) -> StudyTrials:
    """A study in memory that suggests these points in this order.

    Args:
        points: points with the same keys.
        search: its settings, except for the number of trials.

    Raises:
        SearchError: a pruner of Optuna does not exist or does not accept its options.
    """
    quiet()
    space = space_of(points)
    listed = replace(search, trials=len(points), sampler="random", sampler_options={}, fresh=False)
    identity = identify(space, JobSpec("listed"), RunSettings(search=listed))
    study = StudyTrials(listed, space, identity, in_memory())
    for point in points:
        study.enqueue(point, beyond=False)
    return study


def space_of(points: Sequence[Parameters]) -> Space:
    """The smallest space of choices that contains these points."""
    keys = points[0].keys()
    columns = {key: tuple(dict.fromkeys(point[key] for point in points)) for key in keys}
    return Space(
        tuple(Dimension(key, Choice(values, tuple(map(repr, values)))) for key, values in columns.items())
    )


def parameters_apart(jobs: Sequence[JobSpec]) -> list[dict[str, Value]]:
    """The parameters of each job in which the jobs differ.

    Raises:
        ConfigError: two jobs are the same.
    """
    rows = [job.parameters() for job in jobs]
    apart = [key for key in rows[0] if any(row[key] != rows[0][key] for row in rows)]
    points = [{key: row[key] for key in apart} for row in rows]
    if len({tuple(point.values()) for point in points}) < len(points):
        raise ConfigError(
            "two jobs with the same parameters", "No two trials of a benchmark may be the same."
        )
    return points


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation, and its time in the search."""

    seconds: float
    job: str
    step: int
    loss: float


@dataclass(slots=True)
class Timeline:
    """Records what a search reports.

    Attributes:
        clock: measures the seconds of the search so far.
        evaluations: evaluations in the order in which they came.
        started: trial numbers by job.
        ends: results of the jobs.
    """

    clock: Callable[[], float]
    evaluations: list[Evaluation] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)
    ends: dict[str, JobResult] = field(default_factory=dict)

    def start_job(self, job: JobSpec, trial: int, outside: str = "") -> float:
        """Note that a job is about to be submitted."""
        del outside
        self.started[job.name] = trial
        return 0.0

    def handle(self, event: Event) -> None:
        """Record an event of the engine."""
        if isinstance(event, JobEvaluated):
            self.evaluations.append(Evaluation(self.clock(), event.job, event.step, event.loss))
        elif isinstance(event, JobResult):
            self.ends[event.job] = event

    def lose(self, job: str) -> None:
        """Do nothing: no other process trains."""
        raise AssertionError(job)

    def commit(self) -> None:
        """Do nothing: records in memory cannot be made durable."""

    @property
    def decided(self) -> dict[str, tuple[JobState, int]]:
        """How and after which step each job ended."""
        return {job: (result.state, result.step) for job, result in self.ends.items()}

    @property
    def finished(self) -> dict[str, float]:
        """Objectives of the finished jobs."""
        return {
            job: result.values[0]
            for job, result in self.ends.items()
            if result.state == JobState.FINISHED and result.values
        }


def reached(evaluations: Sequence[Evaluation], loss: float) -> float | None:
    """The time of the first evaluation at ``loss`` or below; None if there is none."""
    return next((each.seconds for each in evaluations if each.loss <= loss), None)


@dataclass(slots=True)
class Stopwatch:
    """A clock that counts seconds since it was made, except those inside :meth:`outside`."""

    _started: float = field(default_factory=perf_counter)
    _away: float = 0.0

    def read(self) -> float:
        """Seconds so far."""
        return perf_counter() - self._started - self._away

    def outside(self, action: Callable[[], None]) -> None:
        """Exclude the code inside from the count."""
        began = perf_counter()
        action()
        self._away += perf_counter() - began


@dataclass(frozen=True, slots=True)
class JointSearch:
    """The result of a joint search.

    Attributes:
        evaluations: evaluations, each with its time.
        seconds: seconds of the whole search: suggesting, packing, training, evaluations, pausing, rules,
            export.
        finished: final losses of the finished jobs, by job.
        names: the jobs' names in the search, in the order of the jobs.
        device_seconds: of all jobs together, with states and adapters.
        ends: how and after which step each job ended.
    """

    evaluations: tuple[Evaluation, ...]
    seconds: float
    finished: dict[str, float]
    names: tuple[str, ...]
    device_seconds: float = 0.0
    ends: dict[str, tuple[JobState, int]] = field(default_factory=dict)


def search_together(
    side: JointSide,
    jobs: Sequence[JobSpec],
    search: SearchSettings,
    folder: Path,
    between: Callable[[], None] = lambda: None,
) -> JointSearch:
    """Run a search over listed jobs in their order.

    Args:
        side: model and data.
        jobs: different jobs, which are renamed as trials.
        search: its settings; its sampler suggests nothing.
        folder: folder for checkpoints and adapters.
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
    stopper = make_stopper(search, budgets_of(jobs, side.data), study.rungs)
    watch = Stopwatch()
    timeline = Timeline(watch.read)
    SearchLoop(study, make_job, coordinator, timeline, search, stop, stopper).run()
    seconds = watch.read()
    failed = {job: end.reason for job, end in timeline.ends.items() if end.state == JobState.FAILED}
    if failed:
        raise PlaitError(f"failed: {failed}", "No trial of a benchmark may fail.")
    return JointSearch(
        tuple(timeline.evaluations),
        seconds,
        timeline.finished,
        tuple(Trial(number).name for number in range(len(jobs))),
        coordinator.device_ns / NANOSECONDS,
        timeline.decided,
    )
