"""When the rule is asked about a trial, and what is kept of its answer: events in, decisions out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import optuna
import pytest
from curve_worker import ADAPTER, lengths_data, load_lengths
from optuna.pruners import BasePruner

from plait.core.errors import DataError
from plait.core.jobs import JobSpec, TrainSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import Event, JobAdmitted, JobEvaluated, JobGenerated, JobPaused, JobProgress
from plait.core.objectives import Objective
from plait.core.rungs import Share, Unit
from plait.core.settings import SearchSettings, StoppingSettings
from plait.engine.catalogue import DataCatalogue
from plait.search.objective import Observed
from plait.search.rungs import RungRecord, RungTable
from plait.search.stopper import Stopper, StudyRungs, budgets_of, make_stopper
from plait.search.stopping import CONTINUE, WAIT, Decision
from plait.search.storage import SharedStudy
from plait.search.trials import Trial

STOP = Decision("stop", "not good enough")


@dataclass
class Memory:
    """Of a study, with what was said to it."""

    drawn: dict[int, RungRecord] = field(default_factory=lambda: {0: RungRecord(), 1: RungRecord()})
    cohorts: dict[str, int] = field(default_factory=dict)
    past: list[tuple[int, int]] = field(default_factory=list)

    def records(self) -> Mapping[int, RungRecord]:
        return self.drawn

    def keep_unit(self, usual: Unit) -> Unit:
        return usual

    def keep_cohort(self, rule: str, size: int) -> int:
        return self.cohorts.setdefault(rule, size)

    def measure(self, number: int, step: int, value: float, *, violates: bool = False) -> None:
        record = self.drawn[number]
        broken = record.violates | ({step} if violates else set())
        self.drawn[number] = replace(record, values={step: value, **record.values}, violates=broken)

    def prunes(self, pruner: BasePruner, number: int) -> bool:
        raise AssertionError(f"no pruner is asked about {number}: {pruner}")

    def let_past(self, number: int, step: int) -> None:
        self.past.append((number, step))
        self.drawn[number] = replace(self.drawn[number], passed=step)


@dataclass
class Scripted:
    """Says what it is told to, and notes what it was asked."""

    answer: Decision = WAIT
    at: tuple[int, ...] = (2, 4)
    asked: list[tuple[int, int, int | None]] = field(default_factory=list)

    def rungs(self, _number: int, /) -> tuple[int, ...]:
        return self.at

    def decide(self, number: int, step: int, table: RungTable) -> Decision:
        self.asked.append((number, step, table.expected))
        return self.answer


@dataclass
class Search:
    """Two trials, and the events that they bring."""

    rule: Scripted = field(default_factory=Scripted)
    metric: str = "train/loss"
    asynchronous: bool = False
    memory: Memory = field(default_factory=Memory)
    observed: Observed = field(default_factory=Observed)

    def __post_init__(self) -> None:
        metric = Objective(self.metric)
        self.stopper = Stopper(self.rule, metric, self.memory, asynchronous=self.asynchronous)
        for number in (0, 1):
            assert self.stopper.start(Trial(number)) == (2, 4)

    def tell(self, event: Event) -> None:
        self.observed.handle(event)
        self.stopper.handle(event, self.observed)

    def admitted(self, number: int, step: int, steps: int = 8) -> None:
        job = JobSpec(Trial(number).name, ADAPTER, TrainSpec(steps=steps), lengths_data((3,)))
        self.tell(JobAdmitted(job, step, steps, "g"))

    def trains(self, number: int, step: int, loss: float = 1.0) -> None:
        self.tell(JobProgress(Trial(number).name, step, loss, 0.1, 1e-3, 10 * step, 0.1, 100.0))


def test_a_released_trial_is_decided_again_only_at_the_next_rung() -> None:
    search = Search(Scripted(CONTINUE))
    search.trains(0, 1)
    assert search.stopper.decisions(lambda: 2) == []
    search.trains(0, 2)
    assert [(trial.number, decision) for trial, decision in search.stopper.decisions(lambda: 2)] == [
        (0, CONTINUE)
    ]
    search.admitted(0, 2)  # back from a pause, or after it made room
    assert search.stopper.decisions(lambda: 2, ask_again=True) == []
    search.trains(0, 3)
    search.trains(0, 4)
    assert [trial.number for trial, _ in search.stopper.decisions(lambda: 2)] == [0]
    assert search.rule.asked == [(0, 2, 2), (0, 4, 2)]


def test_a_trial_that_falls_back_is_decided_when_it_reaches_the_rung_again() -> None:
    search = Search(Scripted(STOP), metric="eval/loss")
    name = Trial(0).name
    search.trains(0, 2)
    search.tell(JobPaused(name, 1, PauseReason.LOST))
    assert search.stopper.decisions(lambda: 2) == [], "nothing was measured, so it must not pass"
    search.admitted(0, 1)
    search.trains(0, 2)
    search.tell(JobEvaluated(name, 2, 3.0, 10))
    assert [decision for _, decision in search.stopper.decisions(lambda: 2)] == [STOP]


def test_waiting_trials_are_decided_again_only_after_something_happened() -> None:
    search = Search()
    search.trains(0, 2)
    assert search.stopper.decisions(lambda: 2) == []
    assert search.stopper.decisions(lambda: 2) == []
    assert len(search.rule.asked) == 1
    search.tell(JobResult(Trial(1).name, JobState.FAILED, 1, "", None, 10, 0.1, 1.0, None))
    search.stopper.decisions(lambda: 2)
    assert len(search.rule.asked) == 2, "an end may decide a cohort"
    search.stopper.decisions(lambda: 3, ask_again=True)
    assert len(search.rule.asked) == 3, "so may what another process did"
    assert [expected for _, _, expected in search.rule.asked] == [2, 2, 3]


def test_nothing_is_read_where_there_is_nothing_to_decide() -> None:
    reads: list[int] = []

    def expected() -> int:
        reads.append(1)
        return 2

    search = Search()
    search.trains(0, 1)
    assert search.stopper.decisions(expected, ask_again=True) == []
    assert not reads, "nobody stands at a rung"
    search.trains(0, 2)
    assert search.stopper.decisions(expected) == []
    assert search.stopper.decisions(expected) == []
    assert len(reads) == 1, "nothing happened since"


def test_the_rule_learns_that_no_more_trials_are_suggested() -> None:
    search = Search()
    search.trains(0, 2)
    search.stopper.decisions(lambda: None)
    assert search.rule.asked == [(0, 2, None)]


def test_an_ended_trial_leaves_its_rung() -> None:
    search = Search(Scripted(STOP))
    search.trains(0, 2)
    search.trains(1, 2)
    search.tell(JobResult(Trial(0).name, JobState.FAILED, 2, "", None, 20, 0.2, 1.0, None))
    assert [trial.number for trial, _ in search.stopper.decisions(lambda: 2)] == [1]


def test_a_trial_that_another_worker_had_is_asked_about_again_at_a_rung_that_it_passed() -> None:
    search = Search(Scripted(CONTINUE))
    search.trains(0, 2)
    assert [trial.number for trial, _ in search.stopper.decisions(lambda: 2)] == [0]
    search.tell(JobResult(Trial(0).name, JobState.STOPPED, 2, "adopted", None, 20, 0.2, 1.0, None))
    search.stopper.start(Trial(0))
    search.trains(0, 2)
    assert [trial.number for trial, _ in search.stopper.decisions(lambda: 2)] == [0], "else it waits for ever"


def test_decisions_are_sorted_by_number_not_by_arrival() -> None:
    search = Search(Scripted(STOP))
    search.trains(1, 2)
    search.trains(0, 2)
    assert [trial.number for trial, _ in search.stopper.decisions(lambda: 2)] == [0, 1]


def test_only_values_measured_at_a_rung_are_stored_and_compared() -> None:
    search = Search(Scripted(STOP), metric="eval/loss")
    assert search.stopper.measured
    search.trains(0, 1)
    search.tell(JobEvaluated(Trial(0).name, 1, 3.0, 4))
    search.trains(0, 2)
    assert search.memory.drawn[0].values == {}
    (found,) = search.stopper.decisions(lambda: 2)
    assert found == (Trial(0), CONTINUE), "nothing was measured there, so there is nothing to judge it by"
    assert search.rule.asked == []
    search.trains(1, 2)
    search.tell(JobEvaluated(Trial(1).name, 2, 2.5, 4))
    assert search.memory.drawn[1].values == {2: 2.5}
    assert search.stopper.decisions(lambda: 2) == [(Trial(1), STOP)]


def test_accuracies_are_compared_when_they_are_known_not_when_the_loss_is() -> None:
    search = Search(metric="eval/accuracy")
    for step, accuracy in ((2, 0.25), (4, 0.75)):
        search.trains(0, step)
        search.tell(JobEvaluated(Trial(0).name, step, 1.0, 10))
        assert step not in search.memory.drawn[0].values
        search.tell(JobGenerated(Trial(0).name, step, accuracy))
        assert search.memory.drawn[0].values[step] == accuracy
        search.rule.answer = CONTINUE
        assert [found for _, found in search.stopper.decisions(lambda: 2)] == [CONTINUE]


def test_passed_rungs_are_stored_once_and_only_for_asynchronous_rules() -> None:
    for asynchronous in (False, True):
        search = Search(Scripted(CONTINUE), asynchronous=asynchronous)
        assert not search.stopper.measured
        search.trains(0, 2)
        search.stopper.decisions(lambda: 2)
        assert search.memory.past == ([(0, 2)] if asynchronous else [])
        again = Search(
            search.rule, memory=search.memory, asynchronous=asynchronous
        )  # killed, and goes on from the state at the rung
        again.admitted(0, 2)
        again.stopper.decisions(lambda: 2)
        assert search.memory.past == ([(0, 2)] if asynchronous else [])


def test_a_short_trial_reaches_two_rungs_with_one_step() -> None:
    search = Search()
    search.rule.at = (Share(1250), Share(2500))
    search.admitted(0, 0, steps=4)
    search.admitted(1, 0, steps=16)
    search.trains(0, 1)
    search.trains(1, 2)
    assert search.memory.drawn[0].values == {1250: 1.0, 2500: 1.0}
    assert search.memory.drawn[1].values == {1250: 1.0}
    assert search.stopper.decisions(lambda: 2) == []
    assert [(number, str(rung)) for number, rung, _ in search.rule.asked] == [(0, "25 %"), (1, "12.5 %")]


def test_budgets_are_of_all_jobs() -> None:
    data = DataCatalogue(load_lengths)
    jobs = [
        JobSpec(str(steps), ADAPTER, TrainSpec(steps=steps), lengths_data((3, 5, 8))) for steps in (9, 4, 7)
    ]
    assert budgets_of(jobs, data) == {4, 7, 9}


def test_budgets_are_of_all_combinations_that_probes_stand_for() -> None:
    """Probes have both batches and both lengths, but not the larger batch with fewer epochs."""
    data = lengths_data((3,) * 20)
    kept = [TrainSpec(batch_size=1, epochs=1), TrainSpec(batch_size=4, epochs=2)]
    jobs = [JobSpec(str(number), ADAPTER, train, data) for number, train in enumerate(kept)]
    assert budgets_of(jobs, DataCatalogue(load_lengths)) == {5, 10, 20, 40}
    too_large = JobSpec("large", ADAPTER, TrainSpec(batch_size=1_000_000), data)
    with pytest.raises(DataError, match="Choose a smaller batch"):
        budgets_of([too_large], DataCatalogue(load_lengths))


def test_another_rule_has_cohorts_of_its_own() -> None:
    """By default their size follows from eta and the number of rungs."""
    memory = Memory()
    search = SearchSettings(trials=1000, stopping=StoppingSettings(kind="successive_halving", rungs=(2, 4)))
    for stopping, size in (
        (search.stopping, 4),
        (replace(search.stopping, eta=3), 9),
        (replace(search.stopping, rungs=(2,)), 2),
        (search.stopping, 4),
    ):
        for divergence in (None, 2.0):  # which is beside the rule, and changes no cohort
            with_it = replace(stopping, divergence=divergence)
            assert make_stopper(replace(search, stopping=with_it), {8}, memory) is not None
            assert size in memory.cohorts.values()
    assert len(memory.cohorts) == 3


class Seeing(optuna.pruners.BasePruner):
    """Notes what it is shown."""

    def __init__(self) -> None:
        self.shown: list[dict[int, float]] = []

    def prune(self, _study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        self.shown.append(dict(trial.intermediate_values))
        return False


def test_a_pruner_of_optuna_sees_one_value_for_each_step() -> None:
    """PatientPruner counts reports: rungs of 12.5 and 25 % are the first step of four."""
    study = optuna.create_study()
    trial = study.ask()
    trial.set_user_attr("plait.steps", 4)
    for rung, value in ((1250, 3.0), (2500, 3.0), (5000, 2.0)):
        trial.report(value, rung)
    memory, pruner = StudyRungs(SharedStudy(study), SearchSettings(), cast(Any, None)), Seeing()
    memory.prunes(pruner, 0)
    assert pruner.shown == [{2500: 3.0, 5000: 2.0}]
    assert set(study.trials[0].intermediate_values) == {1250, 2500, 5000}
