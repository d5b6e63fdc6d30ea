"""Listed trials as a study of Optuna's: every point is enqueued, in order, and the sampler draws nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.messages import Event, JobEvaluated
from plait.core.objectives import Verdict
from plait.core.settings import RunSettings, SearchSettings
from plait.core.space import Choice, Dimension, Space, Value
from plait.search.identity import identify
from plait.search.storage import in_memory, quiet
from plait.search.study import StudyTrials

Parameters = Mapping[str, Value]


def listed_study(points: Sequence[Parameters], search: SearchSettings) -> StudyTrials:
    """A study, kept nowhere, that asks for these points in this order.

    Args:
        points: all with the same keys.
        search: its settings; how many trials there are follows from the points.

    Raises:
        SearchError: a pruner of Optuna's is not there or does not take its options.
    """
    quiet()
    space = space_of(points)
    drawn = replace(search, trials=len(points), sampler="random", sampler_options={}, fresh=False)
    identity = identify(space, JobSpec("listed"), RunSettings(search=drawn))
    study = StudyTrials(drawn, space, identity, in_memory())
    for point in points:
        study.enqueue(point, beyond=False)
    return study


def space_of(points: Sequence[Parameters]) -> Space:
    """The smallest space of choices that holds these points."""
    keys = points[0].keys()
    columns = {key: tuple(dict.fromkeys(point[key] for point in points)) for key in keys}
    return Space(
        tuple(Dimension(key, Choice(values, tuple(map(repr, values)))) for key, values in columns.items())
    )


def parameters_apart(jobs: Sequence[JobSpec]) -> list[dict[str, Value]]:
    """Of each job, the parameters in which the jobs differ.

    Raises:
        ConfigError: two jobs are the same.
    """
    rows = [job.parameters() for job in jobs]
    apart = [key for key in rows[0] if any(row[key] != rows[0][key] for row in rows)]
    points = [{key: row[key] for key in apart} for row in rows]
    if len({tuple(point.values()) for point in points}) < len(points):
        raise ConfigError("two jobs with the same parameters", "Each trial of a benchmark is tried once.")
    return points


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation, and when in its search it was there."""

    seconds: float
    job: str
    step: int
    loss: float


@dataclass(slots=True)
class Timeline:
    """Keeps what a search tells its recorder.

    Attributes:
        clock: seconds of the search so far.
        evaluations: in the order in which they came.
        started: trial numbers by job.
        ends: what became of each job, its objective and why.
    """

    clock: Callable[[], float]
    evaluations: list[Evaluation] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)
    ends: dict[str, tuple[str, float | None, str]] = field(default_factory=dict)

    def start_job(self, job: JobSpec, trial: int) -> None:
        """A job is about to be submitted."""
        self.started[job.name] = trial

    def handle(self, event: Event) -> None:
        """Something happened in the engine."""
        if isinstance(event, JobEvaluated):
            self.evaluations.append(Evaluation(self.clock(), event.job, event.step, event.loss))

    def judge(self, verdict: Verdict) -> None:
        """The search's last word on a job: here there is one objective, and no constraint."""
        assert verdict.feasible
        assert not verdict.others
        self.ends[verdict.job] = verdict.state, verdict.objective, verdict.reason

    def lose(self, job: str) -> None:
        """Nobody else trains here."""
        raise AssertionError(job)

    def commit(self) -> None:
        """What is kept here is as durable as it gets."""

    def run_id(self, job: str) -> str:
        """There is no MLflow: the job's number in the study."""
        return str(self.started[job])

    @property
    def finished(self) -> dict[str, float]:
        """Objectives of the jobs that came to their ends."""
        return {
            job: objective
            for job, (state, objective, _) in self.ends.items()
            if state == "finished" and objective is not None
        }


def reached(evaluations: Sequence[Evaluation], loss: float) -> float | None:
    """When the first evaluation was there that was at ``loss`` or below; None: none was."""
    return next((each.seconds for each in evaluations if each.loss <= loss), None)
