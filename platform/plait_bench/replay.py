"""The real search loop, study and rules over recorded curves, which stand in for the engine as an oracle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plait.core.errors import ConfigError, choices
from plait.core.jobs import JobSpec, TrainSpec
from plait.core.messages import Event, JobAdmitted, JobEnded, JobEvaluated, JobParked, JobProgress
from plait.core.settings import SearchSettings
from plait.engine.live import AT_RUNG
from plait.search.run import SearchRun
from plait.search.stopper import make_stopper
from plait.search.stopping import rung_steps
from plait.search.trials import Trial
from plait_bench.recorded_curves import Curve
from plait_bench.replay_study import Evaluation, Timeline, listed_study

GROUP = "replay"


@dataclass(slots=True, eq=False)
class Replayed:
    """One job on its curve."""

    job: JobSpec
    curve: Curve
    rungs: frozenset[int]
    measured: bool
    step: int = 0
    passed: int = 0
    seconds: float = 0.0
    parked: bool = False
    cancelled: str | None = None

    @property
    def budget(self) -> int:
        """Optimiser steps of the whole job."""
        return self.curve.last.step

    @property
    def waits(self) -> bool:
        """Whether it stands at a rung that it was not let past."""
        return self.step in self.rungs and self.step > self.passed and self.step < self.budget

    @property
    def trains(self) -> bool:
        """Whether its next step may be taken."""
        return not self.waits and not self.parked

    def to_go(self) -> int:
        """Steps to the next rung or to the end."""
        return min(rung for rung in {*self.rungs, self.budget} if rung > self.step) - self.step


@dataclass(slots=True)
class ReplayCoordinator:
    """Does to jobs what the engine's coordinator does, with curves in place of training.

    Attributes:
        curve_of: the curve of a job.
        seconds: device time so far: training and evaluations, as recorded.
        steps: optimiser steps so far.
    """

    curve_of: Callable[[JobSpec], Curve]
    seconds: float = 0.0
    steps: int = 0
    _jobs: dict[str, Replayed] = field(default_factory=dict)
    _joining: list[str] = field(default_factory=list)

    def submit(
        self,
        job: JobSpec,
        *,
        resume_from: Path | None = None,
        warm_from: Path | None = None,
        rungs: Collection[int] = (),
        measured: bool = False,
    ) -> None:
        """Queue a job, from its start: a replay keeps no states and no weights."""
        assert resume_from is None
        assert warm_from is None
        self._jobs[job.name] = Replayed(job, self.curve_of(job), frozenset(rungs), measured)
        self._joining.append(job.name)

    def cancel(self, job: str, reason: str) -> None:
        """End a job as "stopped" at the next boundary."""
        self._jobs[job].cancelled = reason

    def park(self, job: str, reason: str) -> None:
        """Nobody steers a replay."""
        raise AssertionError(job, reason)

    def unpark(self, job: str, reason: str) -> None:
        """Let a job past the rung at which it waits."""
        replayed = self._jobs[job]
        assert reason == AT_RUNG
        assert replayed.waits
        replayed.passed = replayed.step
        if replayed.parked:
            self._joining.append(job)

    def settle(self) -> Iterable[Event]:
        """End what was cancelled, park what waits."""
        events: list[Event] = []
        for name, replayed in list(self._jobs.items()):
            if replayed.cancelled is not None:
                events.append(self._end(name, "stopped", replayed.cancelled))
            elif replayed.waits and not replayed.parked:
                replayed.parked = True
                events.append(JobParked(name, replayed.step, AT_RUNG))
        return events

    def stop(self) -> None:
        """Nothing interrupts a replay."""
        raise AssertionError

    def places(self) -> int:
        """There is room for any job: ``search.parallel`` is the limit."""
        return 1

    def advance(self) -> list[Event]:
        """Train all jobs as far as the first of them comes to a rung or to its end."""
        events: list[Event] = [*self.settle()]
        for name in self._joining:
            replayed = self._jobs[name]
            replayed.parked = False
            events.append(JobAdmitted(replayed.job, replayed.step, replayed.budget, GROUP))
        self._joining.clear()
        live = [replayed for replayed in self._jobs.values() if replayed.trains]
        stride = min(replayed.to_go() for replayed in live)
        for replayed in live:
            self._train(replayed, replayed.step + stride)
            events += self._events(replayed)
        return events

    def _train(self, replayed: Replayed, step: int) -> None:
        spent = replayed.curve.training_seconds(step)
        spent -= replayed.curve.training_seconds(replayed.step) if replayed.step else 0.0
        self.steps += step - replayed.step
        replayed.step = step
        self._charge(replayed, spent)

    def _charge(self, replayed: Replayed, seconds: float) -> None:
        self.seconds += seconds
        replayed.seconds += seconds

    def _events(self, replayed: Replayed) -> Iterable[Event]:
        """What the engine would tell of a job after its last step."""
        name, step, point = replayed.job.name, replayed.step, replayed.curve.at(replayed.step)
        done = step == replayed.budget
        if point is not None and (done or step in replayed.rungs):
            yield JobProgress(name, step, point.train_loss, 0.0, 0.0, step, replayed.seconds, 0.0)
            if done or replayed.measured:
                self._charge(replayed, point.evaluation_seconds)
                yield JobEvaluated(name, step, point.loss, 0)
        if done:
            yield self._end(name, "finished", "budget spent")

    def _end(self, name: str, state: str, reason: str) -> JobEnded:
        replayed = self._jobs.pop(name)
        point = replayed.curve.at(replayed.step)
        loss = None if point is None else point.loss
        return JobEnded(
            name, state, replayed.step, reason, loss, replayed.step, replayed.seconds, replayed.seconds, None
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """What a search over recorded curves came to.

    Attributes:
        evaluations: with the device time at which each was there.
        seconds: device time in all.
        steps: optimiser steps in all.
        best: lowest loss of the trials that came to their ends; infinite where none did.
        finished: how many of them there are.
    """

    evaluations: tuple[Evaluation, ...]
    seconds: float
    steps: int
    best: float
    finished: int


def replay(curves: Sequence[Curve], search: SearchSettings) -> Replay:
    """Search ``curves``, each a trial, in their order.

    Raises:
        ConfigError: a rung at which nothing was recorded.
        SearchError: a pruner of Optuna's is not there or does not take its options.
    """
    for curve in curves:
        check_rungs(search, [point.step for point in curve.points])
    study = listed_study([curve.parameters for curve in curves], search)
    by_job: dict[str, Curve] = {}
    by_point = {tuple(curve.parameters.items()): curve for curve in curves}

    def make_job(trial: Trial) -> JobSpec:
        curve = by_job[trial.name] = by_point[tuple(trial.values.items())]
        return JobSpec(trial.name, train=TrainSpec(steps=curve.last.step))

    coordinator = ReplayCoordinator(lambda job: by_job[job.name])
    timeline = Timeline(lambda: coordinator.seconds)
    budget = min(curve.last.step for curve in curves)
    stopper = make_stopper(search, budget, study.rungs)
    SearchRun(study, make_job, coordinator, timeline, search, stopper=stopper).run()
    finished = timeline.finished
    return Replay(
        tuple(timeline.evaluations),
        coordinator.seconds,
        coordinator.steps,
        min(finished.values(), default=float("inf")),
        len(finished),
    )


def check_rungs(search: SearchSettings, steps: Sequence[int]) -> None:
    """Every rung of a search lies where something was recorded.

    Raises:
        ConfigError: one does not.
    """
    unknown = sorted(set(rung_steps(search.stopping, steps[-1])) - set(steps))
    if unknown:
        raise ConfigError(
            f"a rung after {unknown[0]} steps",
            f"The curves have points at the steps {choices(steps)}.",
            "Put the rungs there.",
        )
