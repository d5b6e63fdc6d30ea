"""The link between the engine's events, the study's rung table and the rule that stops trials.

Values of the objective are stored as the trial's intermediate values, which Optuna's pruners, its samplers
and optuna-dashboard read. Values of another metric are stored in a user attribute, so that the two are never
mixed, as are all values if there are several objectives, for which Optuna has no intermediate values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from itertools import product

from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial, TrialState
from optuna.trial import Trial as LiveTrial

from plait.core.errors import DataError
from plait.core.jobs import JobSpec, TrainSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import (
    Event,
    JobAdmitted,
    JobEvaluated,
    JobGenerated,
    JobPaused,
    JobProgress,
)
from plait.core.objectives import Constraint, Objective
from plait.core.rungs import PARTS, Unit, step_of
from plait.core.settings import SearchSettings
from plait.engine.catalogue import DataCatalogue
from plait.engine.steps import DataOrder
from plait.search.attributes import state_of
from plait.search.objective import Observed
from plait.search.ownership import Claims
from plait.search.rungs import RungRecord, RungTable, once_a_step, rung_metric, unit_of
from plait.search.stopping import (
    CONTINUE,
    RULES,
    Decision,
    PerTrialRule,
    Rule,
    make_rule,
    rungs_within,
)
from plait.search.storage import SharedStudy
from plait.search.trials import Trial
from plait.tracking import names
from plait.tracking.leaderboard import job_of

VIOLATES = "plait.violates"  # trial: the rungs at which it broke a constraint
RUNGS = "plait.rungs"  # trial: value by rung, where they are not Optuna's intermediate values
PASSED = "plait.passed"  # trial: the last rung that an asynchronous rule let it pass
STEPS = "plait.steps"  # trial: its optimiser steps, if its values are kept by shares of them
UNIT = "plait.rungs_in"  # study: by what it keeps the values of its trials
RUNG_METRIC = "plait.rung_metric"  # study: the metric of the values in RUNGS
COHORTS = "plait.cohorts"  # study: how many trials a rule compares with each other, by rule


class StudyRungs:
    """The rung table in a study."""

    def __init__(self, shared: SharedStudy, settings: SearchSettings, claims: Claims) -> None:
        self._shared = shared
        self._claims = claims
        first, *further = (each.metric for each in settings.objectives)
        metric = rung_metric(settings).metric if settings.stopping.active else first
        self._metric = metric
        self._intermediate = not further and metric == first

    def records(self) -> dict[int, RungRecord]:
        """All suggested trials, by number, without enqueued ones, which may never be suggested."""
        trials = self._shared.patience(self._shared.trials)
        return {
            trial.number: RungRecord(
                self._values(trial),
                trial.state.is_finished(),
                int(trial.user_attrs.get(PASSED, 0)),
                frozenset(trial.user_attrs.get(VIOLATES, ())),
                state_of(trial) == JobState.INFEASIBLE,
                int(trial.user_attrs.get(STEPS, PARTS)),
            )
            for trial in trials
            if trial.state != TrialState.WAITING
        }

    def _values(self, trial: FrozenTrial) -> dict[int, float]:
        if self._intermediate:
            return trial.intermediate_values
        return {int(rung): value for rung, value in trial.user_attrs.get(RUNGS, {}).items()}

    def keep_cohort(self, rule: str, size: int) -> int:
        """How many trials a rule compares with each other: the stored number, or ``size``, which is then
        stored."""

        def attempt() -> int:
            kept: dict[str, int] = self._shared.study.user_attrs.get(COHORTS, {})
            if rule not in kept:
                self._shared.study.set_user_attr(COHORTS, kept | {rule: size})
            return kept.get(rule, size)

        return self._shared.locked(attempt)

    def keep_unit(self, usual: Unit) -> Unit:
        """By what the study keeps the values of its trials: the stored unit, or ``usual``, which is then
        stored."""

        def attempt() -> Unit:
            if not self._intermediate and self._shared.study.user_attrs.get(RUNG_METRIC) != self._metric:
                self._shared.study.set_user_attr(RUNG_METRIC, self._metric)
            unit: Unit | None = self._shared.study.user_attrs.get(UNIT)
            if unit is None:
                self._shared.study.set_user_attr(UNIT, usual)
            return unit or usual

        return self._shared.locked(attempt)

    def measure(self, number: int, rung: int, value: float, *, violates: bool = False) -> None:
        """Store the value measured at a rung, and whether the trial breaks a constraint there. If it was
        measured before, the first value is kept."""

        if not math.isfinite(value):
            return
        rung = int(rung)  # stored without its unit

        def note(frozen: FrozenTrial, live: LiveTrial) -> None:
            if rung in self._values(frozen):
                return
            broken = frozen.user_attrs.get(VIOLATES, [])
            if violates and rung not in broken:  # before the value, from which others may decide immediately
                live.set_user_attr(VIOLATES, [*broken, rung])
            if self._intermediate:
                live.report(value, rung)
            else:
                live.set_user_attr(RUNGS, frozen.user_attrs.get(RUNGS, {}) | {str(rung): value})

        self._claims.change(number, note)

    def let_past(self, number: int, rung: int) -> None:
        """Store that an asynchronous rule let a trial pass a rung."""
        self._claims.change(number, lambda _, live: live.set_user_attr(PASSED, int(rung)))

    def keep_steps(self, number: int, steps: int) -> None:
        """Store a trial's optimiser steps, since its values are kept by shares of them from now on."""

        def note(frozen: FrozenTrial, live: LiveTrial) -> None:
            if frozen.user_attrs.get(STEPS) != steps:
                live.set_user_attr(STEPS, steps)

        self._claims.change(number, note)

    def prunes(self, pruner: BasePruner, number: int) -> bool:
        """Whether a pruner of Optuna would end the trial, given what is stored now."""

        def attempt() -> bool:
            frozen = copy(self._shared.live(number)[0])
            steps = int(frozen.user_attrs.get(STEPS, PARTS))
            frozen.intermediate_values = once_a_step(frozen.intermediate_values, steps)
            return pruner.prune(self._shared.study, frozen)

        return self._shared.patience(attempt)


@dataclass(slots=True)
class _Followed:
    """A trial that trains here.

    Attributes:
        steps: of the whole trial; 0 until it is admitted.
        at_rung: the rung that it has reached, if that is not decided yet; else 0.
        past: the last rung that it passed here.
    """

    trial: Trial
    steps: int = 0
    at_rung: int = 0
    past: int = 0


class Stopper:
    """Receives the values at rungs, stores them, and asks the rule.

    Args:
        asynchronous: the rule's decisions depend on the order of arrival, so they must be stored.
        limits: the constraints of the search.
        unit: what rungs count, and so do the steps of all values in the study: samplers and Optuna's pruners
            compare trials at equal steps.
    """

    def __init__(
        self,
        rule: Rule,
        metric: Objective,
        memory: StudyRungs,
        *,
        asynchronous: bool = False,
        limits: Sequence[Constraint] = (),
        unit: Unit = "steps",
    ) -> None:
        self._rule = rule
        self._metric = metric.metric
        self._memory = memory
        self._asynchronous = asynchronous
        self._limits = limits
        self.unit = unit
        self._trials: dict[str, _Followed] = {}  # by name of the job
        self._changed = False

    @property
    def measured(self) -> bool:
        """Whether the validation split must be evaluated at rungs."""
        return self._metric.startswith("eval/")

    def start(self, trial: Trial) -> tuple[int, ...]:
        """The rungs of a trial that is about to begin or to resume."""
        self._trials[trial.name] = _Followed(trial)
        return self._rule.rungs(trial.number)

    def handle(self, event: Event, observed: Observed) -> None:
        """Learn from an event that ``observed`` has already seen."""
        followed = self._trials.get(job_of(event))
        if followed is None:
            return
        match event:
            case JobAdmitted():
                if self.unit == "shares" and not followed.steps:
                    self._memory.keep_steps(followed.trial.number, event.steps)
                followed.steps = event.steps
                self._reach(followed, event.step)
            case JobPaused() if event.step < step_of(followed.at_rung, followed.steps):
                followed.at_rung = 0  # it fell back and will come to the rung again
            case JobProgress():
                self._reach(followed, event.step)
                if not self.measured:
                    self._measure(followed, event.step, observed)
            case JobEvaluated() if self._metric == names.EVAL_LOSS:
                self._measure(followed, event.step, observed)
            case JobGenerated() if self._metric == names.EVAL_ACCURACY:
                self._measure(followed, event.step, observed)
            case JobResult():
                del self._trials[event.job]
                self._changed = True

    def _rungs_at(self, followed: _Followed, step: int) -> list[int]:
        """The rungs that a trial reaches after this step; a short one may reach two with one step."""
        rungs = self._rule.rungs(followed.trial.number)
        return [rung for rung in rungs if step_of(rung, followed.steps) == step]

    def stored_at(self, job: str, step: int) -> int:
        """The step by which the study keeps a value that a job had after ``step`` steps."""
        if self.unit == "steps":
            return step
        followed = self._trials[job]
        return int(max(self._rungs_at(followed, step), default=PARTS * step // followed.steps))

    def _reach(self, followed: _Followed, step: int) -> None:
        last = max(self._rungs_at(followed, step), default=0)
        if last > followed.past:
            followed.at_rung = last
            self._changed = True

    def _measure(self, followed: _Followed, step: int, observed: Observed) -> None:
        value = observed.value(followed.trial.name, self._metric)
        rungs = self._rungs_at(followed, step)
        if value is not None and followed.at_rung in rungs:
            violates = observed.violates(followed.trial.name, self._limits)
            for rung in rungs:
                self._memory.measure(followed.trial.number, rung, value, violates=violates)

    def decisions(
        self, expected: Callable[[], int | None], *, ask_again: bool = False
    ) -> list[tuple[Trial, Decision]]:
        """Decisions about the trials at a rung, by number, without those that must wait.

        Args:
            expected: returns how many trials there will be; None: only those suggested so far. Called only if
                there is something to decide, because it reads the study.
            ask_again: decide even if nothing happened here, because another process may have trained, or no
                more trials will come.
        """
        waiting = [each for each in self._trials.values() if each.at_rung]
        if not waiting or not (self._changed or ask_again):
            return []
        self._changed = False
        table = RungTable(self._memory.records(), expected())
        found = []
        for each in sorted(waiting, key=lambda each: each.trial.number):
            decision = self._decide(each.trial.number, each.at_rung, table)
            if decision.action != "wait":
                each.past, each.at_rung = each.at_rung, 0
                found.append((each.trial, decision))
        return found

    def _decide(self, number: int, rung: int, table: RungTable) -> Decision:
        record = table.records[number]
        if rung not in record.values:  # nothing was measured to base a decision on
            return CONTINUE
        decision = self._rule.decide(number, rung, table)
        if decision.action == "continue" and self._asynchronous and record.passed < rung:
            self._memory.let_past(number, rung)
        return decision


def budgets_of(jobs: Iterable[JobSpec], data: DataCatalogue) -> set[int]:
    """Optimiser steps of these jobs, and of others with any of their batches, lengths and data: a search's
    probes have each choice, but not all combinations.

    Raises:
        DataError: one of these jobs has no data, or much less than a step needs.
    """
    all_jobs = tuple(jobs)
    batches = {job.train.batch_size for job in all_jobs}, {job.train.accumulation for job in all_jobs}
    lengths = {(job.train.steps, job.train.epochs) for job in all_jobs}
    found = {DataOrder.over(job.train, data.of(job.data).train).steps for job in all_jobs}
    specs = {job.data for job in all_jobs}
    for size, accumulation, (steps, epochs), spec in product(*batches, lengths, specs):
        own = TrainSpec(batch_size=size, accumulation=accumulation, steps=steps, epochs=epochs)
        with suppress(DataError):  # that trial's own error, once it is suggested
            found.add(DataOrder.over(own, data.of(spec).train).steps)
    return found


def make_stopper(search: SearchSettings, budgets: Collection[int], memory: StudyRungs) -> Stopper | None:
    """The stopper that the settings ask for; None if every trial is trained to its end in a study that keeps
    values by steps.

    Args:
        budgets: optimiser steps of the jobs.

    Raises:
        ConfigError, SearchError: as for ``make_rule`` and ``unit_of``.
    """
    rungs_within(search.stopping, budgets)  # settings that make no sense leave no unit in the study
    unit = unit_of(search.stopping, budgets, memory.keep_unit)
    rule = make_rule(search, budgets, unit=unit, keep_cohort=memory.keep_cohort, prunes=memory.prunes)
    if rule is not None:
        asynchronous = RULES.get(search.stopping.kind).asynchronous
        metric = rung_metric(search)
        return Stopper(rule, metric, memory, asynchronous=asynchronous, limits=search.limits, unit=unit)
    if unit == "steps":
        return None
    return Stopper(PerTrialRule((), lambda _: None), search.objectives[0], memory, unit=unit)
