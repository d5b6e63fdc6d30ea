"""`plait bench replay/stopping`: stopping rules on the recorded curves of a full grid.

The real search loop, study and rules run over curves, which stand in for the engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from pathlib import Path
from statistics import quantiles
from typing import Annotated

from plait.core.checks import NOT_EMPTY
from plait.core.errors import ConfigError, choices
from plait.core.jobs import JobSpec, TrainSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import Event, JobAdmitted, JobEvaluated, JobGenerated, JobPaused, JobProgress
from plait.core.rungs import step_of
from plait.core.settings import RunSettings, SearchSettings, StoppingSettings
from plait.search.run import SearchLoop
from plait.search.stopper import make_stopper
from plait.search.stopping import rungs_within
from plait.search.trials import Trial
from plait_bench.benchmarks import benchmark
from plait_bench.curves import Curve, RecordedCurves, read_curves
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import Count, shipped
from plait_bench.listed_search import Evaluation, Timeline, listed_study
from plait_bench.progress import part

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
    paused: bool = False
    cancelled: tuple[JobState, str] | None = None

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
        return not self.waits and not self.paused

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
        recorded: float = 0.0,
    ) -> None:
        """Queue a job, from its start: a replay keeps no states and no weights."""
        assert resume_from is None
        assert recorded == 0.0
        assert warm_from is None
        curve = self.curve_of(job)
        steps = frozenset(step_of(rung, curve.last.step) for rung in rungs)
        self._jobs[job.name] = Replayed(job, curve, steps, measured)
        self._joining.append(job.name)

    def cancel(self, job: str, reason: str, *, state: JobState = JobState.STOPPED) -> None:
        """End a job in this state at the next boundary."""
        self._jobs[job].cancelled = state, reason

    def pause(self, job: str) -> None:
        """A replay takes no orders."""
        raise AssertionError(job)

    def resume(self, job: str, reason: PauseReason = PauseReason.BY_USER) -> None:
        """Let a job past the rung at which it waits."""
        replayed = self._jobs[job]
        assert reason == PauseReason.AT_RUNG
        assert replayed.waits
        replayed.passed = replayed.step
        if replayed.paused:
            self._joining.append(job)

    def settle(self) -> Iterable[Event]:
        """End what was cancelled, pause what waits."""
        events: list[Event] = []
        for name, replayed in list(self._jobs.items()):
            if replayed.cancelled is not None:
                events.append(self._end(name, *replayed.cancelled))
            elif replayed.waits and not replayed.paused:
                replayed.paused = True
                events.append(JobPaused(name, replayed.step, PauseReason.AT_RUNG))
        return events

    def stop(self) -> None:
        """Nothing interrupts a replay."""
        raise AssertionError

    def free_slots(self) -> int:
        """There is room for any job: ``search.parallel`` is the limit."""
        return 1

    def advance(self) -> list[Event]:
        """Train all jobs as far as the first of them comes to a rung or to its end."""
        events: list[Event] = [*self.settle()]
        for name in self._joining:
            replayed = self._jobs[name]
            replayed.paused = False
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
        """The engine's events about a job after its last step."""
        name, step, point = replayed.job.name, replayed.step, replayed.curve.at(replayed.step)
        done = step == replayed.budget
        if point is not None and (done or step in replayed.rungs):
            yield JobProgress(name, step, point.train_loss, 0.0, 0.0, step, replayed.seconds, 0.0)
            if done or replayed.measured:
                self._charge(replayed, point.evaluation_seconds)
                yield JobEvaluated(name, step, point.loss, 0)
                if point.accuracy is not None:
                    yield JobGenerated(name, step, point.accuracy)
        if done:
            yield self._end(name, JobState.FINISHED, "budget spent")

    def _end(self, name: str, state: JobState, reason: str) -> JobResult:
        replayed = self._jobs.pop(name)
        point = replayed.curve.at(replayed.step)
        loss = None if point is None else point.loss
        step, seconds = replayed.step, replayed.seconds
        return JobResult(name, state, step, reason, loss, step, seconds, seconds)


@dataclass(frozen=True, slots=True)
class Replay:
    """What a search over recorded curves came to.

    Attributes:
        evaluations: with the device time at which each was there.
        seconds: device time in all.
        steps: optimiser steps in all.
        best: lowest loss of the trials that came to their ends; infinite if none did.
        finished: how many of them there are.
        ends: how and after which step each trial ended, by its name.
    """

    evaluations: tuple[Evaluation, ...]
    seconds: float
    steps: int
    best: float
    finished: int
    ends: Mapping[str, tuple[JobState, int]]


def replay(curves: Sequence[Curve], search: SearchSettings) -> Replay:
    """Search ``curves``, each a trial, in their order.

    Raises:
        ConfigError: a rung at which nothing was recorded.
        SearchError: a pruner of Optuna's is not there or does not take its options.
    """
    budgets = {curve.last.step for curve in curves}
    for curve in curves:
        check_rungs(search, curve.steps, budgets)
    study = listed_study([curve.parameters for curve in curves], search)
    by_job: dict[str, Curve] = {}
    by_point = {tuple(curve.parameters.items()): curve for curve in curves}

    def make_job(trial: Trial) -> JobSpec:
        curve = by_job[trial.name] = by_point[tuple(trial.values.items())]
        return JobSpec(trial.name, train=TrainSpec(steps=curve.last.step))

    coordinator = ReplayCoordinator(lambda job: by_job[job.name])
    timeline = Timeline(lambda: coordinator.seconds)
    stopper = make_stopper(search, budgets, study.rungs)
    SearchLoop(study, make_job, coordinator, timeline, search, stopper=stopper).run()
    finished = timeline.finished
    return Replay(
        tuple(timeline.evaluations),
        coordinator.seconds,
        coordinator.steps,
        min(finished.values(), default=float("inf")),
        len(finished),
        timeline.decided,
    )


def check_rungs(search: SearchSettings, steps: Sequence[int], budgets: Collection[int]) -> None:
    """Every rung of a search over trials of these budgets lies where something was recorded of one.

    Raises:
        ConfigError: one does not.
    """
    rungs = rungs_within(search.stopping, budgets)
    unknown = sorted({step_of(rung, steps[-1]) for rung in rungs} - set(steps))
    if unknown:
        raise ConfigError(
            f"a rung after {unknown[0]} steps",
            f"The curves have points at the steps {choices(steps)}.",
            "Set rungs at these steps.",
        )


@dataclass(frozen=True, slots=True)
class Options:
    """Options of ``replay/stopping``.

    Attributes:
        curves: name of a record that comes with Plait, or a file.
        rules: settings of ``search.stopping`` by label.
        orders: how many random orders of the trials each rule is tried on.
        within: what a search may choose above the full grid's best loss, in percent.
        share: of the full grid's device time that it may take, in percent.
    """

    curves: str = "smollm2_gsm_symbolic.json"
    rules: Annotated[dict[str, StoppingSettings], NOT_EMPTY] = field(default_factory=dict)
    orders: Count = 100
    within: float = 1.0
    share: float = 25.0


@dataclass(frozen=True, slots=True)
class OrderResult:
    """One search over the curves.

    Attributes:
        gap: of the best loss found above the full grid's best, in percent.
        share: of the full grid's device time, in percent.
        replay: all of it.
    """

    gap: float
    share: float
    replay: Replay


@benchmark("replay/stopping", Options)
def replay_stopping(settings: RunSettings, _jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Search the recorded curves by every rule in many orders; ``jobs`` are not used.

    Raises:
        ConfigError: a rung at which nothing was recorded.
        DataError: there is no such record.
    """
    recorded = read_curves(shipped(asked.curves))
    figures = [
        Figure("full grid: best loss", recorded.best, "nats", "measured"),
        Figure("full grid: device time", recorded.seconds, "s", "measured", note="each evaluated at its end"),
    ]
    by_chance = chance(recorded, asked)
    piece = part("replays", len(asked.rules))
    for label, rule in asked.rules.items():
        piece(label)
        search = replace(settings.search, stopping=rule)
        results = [search_in_order(recorded, search, seed) for seed in range(asked.orders)]
        figures += _figures(label, results, asked, by_chance)
    return Report("replay/stopping", tuple(figures), _assumptions(settings.search, recorded, asked))


def search_in_order(recorded: RecordedCurves, search: SearchSettings, seed: int) -> OrderResult:
    """Search the curves in a random order."""
    order = list(recorded.curves)
    random.Random(seed).shuffle(order)
    found = replay(order, search)
    gap, share = found.best / recorded.best - 1, found.seconds / recorded.seconds
    return OrderResult(100 * gap, 100 * share, found)


def chance(recorded: RecordedCurves, options: Options) -> float:
    """Percent of orders whose first trials, trained to their ends in ``options.share`` of the full grid's
    device time, have one within ``options.within`` of the best: by count, trials take about the same."""
    losses = [curve.last.loss for curve in recorded.curves]
    good = sum(loss <= recorded.best * (1 + options.within / 100) for loss in losses)
    tried = int(len(losses) * options.share / 100)
    return 100 * (1 - comb(len(losses) - good, tried) / comb(len(losses), tried))


def _figures(label: str, results: Sequence[OrderResult], options: Options, by_chance: float) -> list[Figure]:
    good = sum(each.gap <= options.within and each.share <= options.share for each in results)
    near = sum(each.gap <= options.within for each in results)
    count = len(results)
    return [
        _spread(f"{label}: device time", [each.share for each in results], "% of the full grid's"),
        _spread(f"{label}: found above the best", [each.gap for each in results], "%"),
        Figure(
            f"{label}: within {options.within:g} % at {options.share:g} % or less",
            100 * good / count,
            "% of orders",
            "simulated",
            Baseline(by_chance, "trials in random order to their ends, in the same time", at_least=1.0),
            note=f"within {options.within:g} % at any cost: {100 * near / count:.0f} %",
        ),
    ]


def _spread(name: str, values: Sequence[float], unit: str) -> Figure:
    """The median, with quartiles and extremes in the note."""
    first, middle, third = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    note = f"quartiles {first:.3g} and {third:.3g}; {min(values):.3g} to {max(values):.3g}"
    return Figure(name, middle, unit, "simulated", note=note)


def _assumptions(search: SearchSettings, recorded: RecordedCurves, options: Options) -> tuple[str, ...]:
    facts = recorded.facts
    machine = facts.get("machine", {})
    return (
        f"Medians over {options.orders} random orders of {len(recorded.curves)} trials, {search.parallel} at "
        "a time. Replays of measured curves through the real loop, study and rules; evaluations at rungs "
        "count, each as long as it took; pausing and resuming are assumed to take no time.",
        f"Curves recorded {facts.get('date', '')} on {machine.get('cpus', '?')} × "
        f"{machine.get('processor', '?')}, {facts.get('together', '?')} trials together, "
        f"at most {recorded.steps[-1]} steps each.",
    )
