"""Between the engine's events and the rule that stops trials: who stands at a rung, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from plait.core.jobs import JobSpec
from plait.core.messages import Event, JobAdmitted, JobEnded, JobEvaluated, JobProgress
from plait.core.settings import SearchSettings
from plait.engine.catalogue import DataCatalogue
from plait.engine.order import DataOrder
from plait.search.objective import Observed
from plait.search.rungs import EQUAL, Judged, judged, rung_steps, usual_cohort
from plait.search.stopping import GO, CohortRule, Record, Rule, Table, Verdict, make_rule
from plait.search.trials import Trial
from plait.tracking.board import Ladder


class RungMemory(Protocol):
    """Keeps rungs where a killed search finds them again."""

    def records(self) -> Mapping[int, Record]:
        """All trials that were drawn, by number."""

    def keep_cohort(self, rule: str, size: int) -> int:
        """How many trials a rule compares with each other: what was kept first, else ``size`` from now on."""

    def measure(self, number: int, step: int, value: float) -> None:
        """Keep what was measured at a rung; of a step that was measured before, the first stands."""

    def let_past(self, number: int, step: int) -> None:
        """Keep that an asynchronous rule let a trial past a rung."""


class Stopper:
    """Measures at rungs, keeps what was measured, and asks the rule.

    Args:
        rule: decides.
        judged: the metric.
        memory: of the study.
    """

    def __init__(self, rule: Rule, judged: Judged, memory: RungMemory) -> None:
        self._rule = rule
        self._judged = judged
        self._memory = memory
        self._trials: dict[str, Trial] = {}
        self._standing: dict[str, int] = {}  # step of the rung, by name
        self._past: dict[str, int] = {}  # the last rung that a trial was let past
        self._changed = False

    @property
    def measured(self) -> bool:
        """Whether the validation split must be evaluated at rungs."""
        return self._judged.metric.startswith("eval/")

    def ladder(self, number: int) -> Ladder:
        """The rungs of a trial, and its cohort: what is shown of it."""
        if isinstance(self._rule, CohortRule):
            cohort = self._rule.layout.cohort(number)
            return Ladder(cohort.rungs, range(cohort.first, cohort.first + cohort.size))
        return Ladder(self._rule.rungs(number))

    def start(self, trial: Trial) -> tuple[int, ...]:
        """A trial is about to begin, or to go on: its rungs."""
        self._trials[trial.name] = trial
        return self._rule.rungs(trial.number)

    def handle(self, event: Event, observed: Observed) -> None:
        """Learn from an event, which ``observed`` has seen already."""
        match event:
            case JobAdmitted():
                self._reach(event.job.name, event.step)
            case JobProgress():
                self._reach(event.job, event.step)
                if not self.measured:
                    self._measure(event.job, event.step, observed)
            case JobEvaluated() if self.measured:
                self._measure(event.job, event.step, observed)
            case JobEnded():
                self._trials.pop(event.job, None)
                self._standing.pop(event.job, None)
                self._changed = True

    def _reach(self, job: str, step: int) -> None:
        trial = self._trials.get(job)
        if trial is not None and step in self._rule.rungs(trial.number) and step > self._past.get(job, 0):
            self._standing[job] = step
            self._changed = True

    def _measure(self, job: str, step: int, observed: Observed) -> None:
        value = observed.value(job, self._judged.metric)
        if value is not None and self._standing.get(job) == step:
            self._memory.measure(self._trials[job].number, step, value)

    def verdicts(
        self, expected: Callable[[], int | None], *, ask_again: bool = False
    ) -> list[tuple[Trial, Verdict]]:
        """What becomes of those that stand at a rung, by trial number; who must wait is left out.

        Args:
            expected: how many trials there will be; None: no more than were drawn, whatever waits. Asked for
                where there is something to decide only, since it reads the study.
            ask_again: even where nothing happened here: another process may have gone on, or no more trials
                are to come.
        """
        if not self._standing or not (self._changed or ask_again):
            return []
        self._changed = False
        table = Table(self._memory.records(), expected())
        found = []
        for job, step in sorted(self._standing.items(), key=lambda item: self._trials[item[0]].number):
            trial = self._trials[job]
            verdict = self._ask(trial.number, step, table)
            if verdict.action == "wait":
                continue
            del self._standing[job]
            self._past[job] = step
            found.append((trial, verdict))
        return found

    def _ask(self, number: int, step: int, table: Table) -> Verdict:
        record = table.records[number]
        if step not in record.values:  # not measured, so there is nothing to judge it by
            return GO
        verdict = self._rule.verdict(number, step, table)
        if verdict.action == "go" and self._rule.asynchronous and record.passed < step:
            self._memory.let_past(number, step)
        return verdict


def shortest_budget(jobs: Iterable[JobSpec], data: DataCatalogue) -> int:
    """Optimiser steps of the shortest of these jobs."""
    return min(DataOrder.of(job.train, len(data.of(job.data).train)).steps for job in jobs)


def make_stopper(
    search: SearchSettings, budget: int, memory: RungMemory, prunes: Callable[[int], bool]
) -> Stopper | None:
    """What the settings ask for; None where every trial is trained to its end.

    Args:
        search: its settings.
        budget: optimiser steps of the shortest job.
        memory: of the study.
        prunes: asks Optuna's pruner about a trial.

    Raises:
        ConfigError: the metric is not measured at rungs, or a rung is not within the budget.
    """
    rule = make_rule(_with_kept_cohort(search, budget, memory), budget, prunes)
    return None if rule is None else Stopper(rule, judged(search), memory)


def _with_kept_cohort(search: SearchSettings, budget: int, memory: RungMemory) -> SearchSettings:
    """With cohorts of the size that the search began with: by default it depends on settings that may change
    from start to start, and between workers."""
    stopping = search.stopping
    if stopping.kind not in EQUAL or stopping.cohort is not None:
        return search
    rungs = rung_steps(stopping, budget)
    rule = f"{stopping.kind}, eta {stopping.eta}, {len(rungs)} rungs"
    size = memory.keep_cohort(rule, usual_cohort(search, rungs))
    return replace(search, stopping=replace(stopping, cohort=size))
