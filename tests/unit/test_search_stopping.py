"""The search loop with rules that end trials: the real loop, study and coordinator on a worker of curves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from curve_worker import ADAPTER, lengths_data, load_lengths, step_fault
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from rung_bench import Bench, KilledError, Notes, halving, make_job, states

from plait.core.errors import ConfigError, SearchError
from plait.core.jobs import JobSpec, TrainSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import GroupStep, JobEvaluated, JobPaused, JobProgress
from plait.core.plans import GlobalBatch
from plait.core.settings import SearchSettings, StoppingSettings
from plait.engine.steps import DataOrder, training_batch
from plait.planner.packing import pack
from plait.search.stored import read_standing
from plait.search.study import StudyTrials
from plait.search.trials import Trial

KINDS = ("successive_halving", "hyperband", "asha", "median", "patience", "threshold", "divergence", "optuna")


def test_a_search_with_rungs_from_its_first_trial_to_its_last(tmp_path: Path) -> None:
    bench = Bench(tmp_path, halving(cohort=8))
    result = bench.run()
    assert result.exit_status == 0
    trials = bench.trials
    last = [len(trial.intermediate_values) for trial in trials]
    assert Counter(last) == {1: 4, 2: 2, 3: 2}
    ranked = sorted(trials, key=lambda trial: trial.intermediate_values[2])
    assert {t.number for t in ranked[:4]} == {t.number for t in trials if 4 in t.intermediate_values}
    for trial in trials:
        name = f"trial-{trial.number:04d}"
        if trial.state == TrialState.PRUNED:
            assert trial.value == trial.intermediate_values[max(trial.intermediate_values)]
            assert "at rung" in trial.user_attrs["plait.reason"]
            assert bench.notes.judged[name] == ("pruned", trial.user_attrs["plait.reason"])
        else:
            assert trial.state == TrialState.COMPLETE
            assert bench.notes.judged[name][0] == "finished"
    assert not list(tmp_path.glob("checkpoints/*/*"))


def test_trials_that_satisfy_the_constraints_rank_first_at_a_rung(tmp_path: Path) -> None:
    """The lowest losses break the constraint, so that the rule alone would keep none but them."""
    search = replace(halving(8, 8, cohort=8, rungs=(4,)), constraints={"train/loss": ">= 1.0"})
    bench = Bench(tmp_path, search)
    bench.run()
    loss = {event.job: event.loss for event in bench.of(JobProgress) if event.step == 4}
    broken = {trial.number: loss[f"trial-{trial.number:04d}"] < 1.0 for trial in bench.trials}
    assert 0 < sum(broken.values()) < 8
    for trial in bench.trials:
        assert trial.user_attrs.get("plait.violates", []) == ([4] if broken[trial.number] else [])
    ranked = sorted(bench.trials, key=lambda each: (broken[each.number], each.intermediate_values[4]))
    assert {each.number for each in ranked[:4]} == {
        each.number for each in bench.trials if each.state == TrialState.COMPLETE
    }


def test_a_cohort_halves_its_trained_members(tmp_path: Path) -> None:
    search = replace(halving(trials=8, parallel=4, cohort=4, rungs=(4,)), constraints={"train.lr": "<= 1e-3"})
    bench = Bench(tmp_path, search)
    assert bench.run().count(JobState.INFEASIBLE) > 0
    for first in range(0, len(bench.trials), 4):
        cohort = [each for each in bench.trials[first : first + 4] if each.intermediate_values]
        kept = [each for each in cohort if each.state == TrialState.COMPLETE]
        assert len(kept) == max(1, len(cohort) // 2) if cohort else not kept


def test_every_step_is_trained_once_and_in_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path, halving(trials=20, cohort=4))
    bench.run()
    assert len(bench.of(JobPaused)) > 0
    for trial in bench.trials:
        steps = [e.step for e in bench.of(JobProgress) if e.job == f"trial-{trial.number:04d}"]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) == (8 if trial.state == TrialState.COMPLETE else max(trial.intermediate_values))


@pytest.mark.parametrize("kind", ["successive_halving", "hyperband", "median"])
def test_decisions_depend_neither_on_slots_nor_on_failures_of_other_cohorts(
    tmp_path: Path, kind: str
) -> None:
    benches = [
        Bench(tmp_path / str(parallel), halving(trials=14, parallel=parallel, kind=kind, rungs=(1, 3, 5)))
        for parallel in (1, 3, 14)
    ]
    if kind == "median":
        benches = [
            replace(each, search=replace(each.search, stopping=replace(each.search.stopping, cohort=7)))
            for each in benches
        ]
    for bench in benches:
        bench.run()
    first, *others = [states(bench) for bench in benches]
    assert {state for state, _ in first} == {TrialState.COMPLETE, TrialState.PRUNED}
    for other in others:
        assert other == first


def test_no_slot_stays_empty_while_trials_are_left(tmp_path: Path) -> None:
    bench = Bench(tmp_path, halving(trials=30, parallel=4, cohort=6), max_jobs=4)
    bench.run()
    groups = [event.jobs for event in bench.of(GroupStep)]
    last_drawn = next(index for index, jobs in enumerate(groups) if "trial-0029" in jobs)
    assert last_drawn > 20
    assert {len(jobs) for jobs in groups[:last_drawn]} == {4}


CAPACITY = 64


def short_samples(trial: Trial, steps: int = 8) -> JobSpec:
    """Batches of eight samples of 3 to 12 tokens, each trial's in an order of its own: a microbatch takes
    about nine of them."""
    train = TrainSpec(steps=steps, batch_size=8, lr=float(trial.values["train.lr"]), seed=trial.number)
    return JobSpec(trial.name, ADAPTER, train, lengths_data([3 + 7 * at % 10 for at in range(40)]))


def next_batch(name: str, step: int) -> GlobalBatch:
    """What a trial trains on in a step."""
    job = short_samples(Trial(int(name[6:]), {"train.lr": 1e-3}))
    train = load_lengths(job.data).train
    return replace(training_batch(job, DataOrder.of(job.train, len(train)), train, step), job=name)


def test_capacity_in_use_against_what_first_fit_decreasing_could_use(tmp_path: Path) -> None:
    """Tokens in use, over the capacity of the microbatches that they take, until the queue is empty.

    It is held against first-fit-decreasing over the samples of all live and queued trials, in the strict
    sense: the least filled microbatch counts, what could be used is what the fullest as many microbatches
    hold, and each iteration counts by itself. 32 trials at once use 95 %.
    """
    trials, parallel = 96, 32
    search = halving(trials, parallel, cohort=8)
    bench = Bench(tmp_path, search, capacity=CAPACITY, job=short_samples)
    bench.run()
    steps = bench.of(GroupStep)
    last = f"trial-{trials - 1:04d}"
    last_drawn = next(at for at, event in enumerate(steps) if last in event.jobs)
    done: Counter[str] = Counter()
    shares = []
    for event in steps[:last_drawn]:
        assert len(event.jobs) == parallel
        queued = [name for name in map("trial-{:04d}".format, range(trials)) if not done[name]]
        wanted = [*event.jobs, *(name for name in queued if name not in event.jobs)]
        could = pack([next_batch(name, done[name] + 1) for name in wanted], capacity=CAPACITY, tile=1)
        fullest = sorted((each.tokens for each in could), reverse=True)[: event.microbatches]
        shares.append(event.tokens / sum(fullest))
        done.update(event.jobs)
    print(
        f"{parallel} trials, {steps[0].microbatches} microbatches: least {min(shares):.3f}, "
        f"mean {sum(shares) / len(shares):.3f} of {len(shares)} iterations"
    )
    assert len(shares) > 4
    assert min(shares) >= 0.95


@pytest.mark.parametrize(
    ("search", "later"),
    [
        (halving(trials=9, parallel=3, kind="median"), {"parallel": 5}),
        (halving(trials=3, parallel=3), {"trials": 9}),
    ],
    ids=["median", "successive halving"],
)
def test_cohorts_stay_as_large_as_the_search_began_with(
    tmp_path: Path, search: SearchSettings, later: dict[str, int]
) -> None:
    """Whatever else changes: more places, more trials."""
    changed = replace(search, **later)
    bench = Bench(tmp_path / "goes on", search, checkpoint_steps=1)
    with pytest.raises(KilledError):
        replace(bench, alive=2).run()
    replace(bench, search=changed, notes=Notes()).run()
    whole = Bench(tmp_path / "whole", replace(changed, stopping=replace(search.stopping, cohort=3)))
    whole.run()
    assert states(bench) == states(whole)


def test_the_sampler_knows_pruned_trials_before_its_next_suggestion(tmp_path: Path, monkeypatch: Any) -> None:
    known: list[Counter[TrialState]] = []
    ask = StudyTrials.ask

    def noted(self: StudyTrials, *, new: bool = True, above: int | None = None) -> Trial | None:
        if above is None:
            known.append(Counter(trial.state for trial in self._study.get_trials(deepcopy=False)))
        return ask(self, new=new, above=above)

    monkeypatch.setattr(StudyTrials, "ask", noted)
    bench = Bench(tmp_path, halving(trials=12, parallel=4, cohort=4))
    bench.run()
    # Four reach the first rung together: two are over before the fifth is drawn.
    assert known[4] == {TrialState.RUNNING: 2, TrialState.PRUNED: 2}
    assert len(bench.trials) == 12


# ---- a cohort that can never fill -----------------------------------------------------------------------


def test_a_last_cohort_that_is_short_decides(tmp_path: Path) -> None:
    bench = Bench(tmp_path, halving(trials=6, parallel=2, cohort=4))
    bench.run()
    assert Counter(state for state, _ in states(bench)[4:]) == {TrialState.COMPLETE: 1, TrialState.PRUNED: 1}


def test_a_cohort_larger_than_the_search_decides(tmp_path: Path) -> None:
    bench = Bench(tmp_path, halving(trials=3, parallel=1, cohort=100))
    bench.run()
    assert sorted(state.name for state, _ in states(bench)) == ["COMPLETE", "PRUNED", "PRUNED"]


def test_a_cohort_decides_even_if_most_members_fail(tmp_path: Path) -> None:
    fails = {"fault": step_fault(lambda job, _: job in ("trial-0000", "trial-0001", "trial-0002"))}
    bench = Bench(tmp_path, halving(trials=4, cohort=4), worker=fails)
    bench.run()
    assert [state.name for state, _ in states(bench)] == ["FAIL", "FAIL", "FAIL", "COMPLETE"]


def test_a_search_that_gives_up_decides_with_the_trials_it_has(tmp_path: Path) -> None:
    fails = {"fault": step_fault(lambda job, _: job == "trial-0001")}
    search = replace(halving(trials=12, parallel=2, cohort=6), max_failure_rate=0.0)
    bench = Bench(tmp_path, search, worker=fails)
    bench.run()
    assert [state.name for state, _ in states(bench)] == ["COMPLETE", "FAIL"]


def test_a_member_that_cannot_be_composed_does_not_hold_up_its_cohort(tmp_path: Path) -> None:
    def steps(trial: Trial) -> int:
        if trial.number == 1:
            raise ConfigError("train.steps", "not for this one")
        return 8

    bench = Bench(tmp_path, halving(trials=4, parallel=1, cohort=4), steps=steps)
    bench.run()
    assert Counter(state.name for state, _ in states(bench)) == {"COMPLETE": 1, "FAIL": 1, "PRUNED": 2}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    trials=st.integers(1, 14),
    parallel=st.integers(1, 6),
    cohort=st.integers(2, 9),
    max_jobs=st.one_of(st.none(), st.integers(1, 4)),
    room=st.one_of(st.none(), st.integers(1, 3)),
    failing=st.sets(st.tuples(st.integers(0, 13), st.integers(1, 8)), max_size=8),
    rate=st.sampled_from([1.0, 0.1]),
    divergence=st.sampled_from([None, 1.01]),
)
def test_a_search_always_ends(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    trials: int,
    parallel: int,
    cohort: int,
    max_jobs: int | None,
    room: int | None,
    failing: set[tuple[int, int]],
    rate: float,
    divergence: float | None,
) -> None:
    rule: dict[str, Any] = {"kind": kind, "rungs": (1, 3, 6), "cohort": cohort, "divergence": divergence}
    rule |= {"upper": 2.0} if kind == "threshold" else {}
    rule |= {"divergence": 1.01} if kind == "divergence" else {}
    search = replace(halving(trials, parallel, **rule), max_failure_rate=rate)
    bench = Bench(
        tmp_path_factory.mktemp("search"),
        search,
        worker={"fault": step_fault(lambda job, step: (int(job[6:]), step) in failing), "room": room},
        max_jobs=max_jobs,
        alive=400,
    )
    result = bench.run()
    assert not result.interrupted
    assert all(state.is_finished() for state, _ in states(bench))
    if rate == 1.0:
        assert len(bench.trials) == trials
        if not failing and divergence is None and kind not in ("threshold", "divergence"):
            assert any(state == TrialState.COMPLETE for state, _ in states(bench))
    assert len(bench.of(JobResult)) == len(bench.notes.judged)


# ---- shares of each trial's own steps ---------------------------------------------------------------------


def unequal_steps(trial: Trial) -> int:
    return (8, 5)[trial.number % 2]


def test_rungs_at_shares_are_reached_after_steps_of_each_trials_own(tmp_path: Path) -> None:
    search = halving(trials=8, cohort=8, rungs=(0.25, 0.5))
    bench = Bench(tmp_path, search, steps=unequal_steps, budgets={5, 8})
    bench.run()
    ends = {result.job: result.step for result in bench.of(JobResult)}
    for trial in bench.trials:
        kept, steps = trial.intermediate_values, unequal_steps(trial)
        at = {2500: -(-steps // 4), 5000: -(-steps // 2), 10_000: steps}
        assert set(kept) <= set(at)
        assert ends[Trial(trial.number).name] == at[max(kept)], "it ended at its last rung"
        assert trial.user_attrs["plait.steps"] == steps
    assert sum(5000 in trial.intermediate_values for trial in bench.trials) == 4
    assert sum(10_000 in trial.intermediate_values for trial in bench.trials) == 2
    ranked = sorted(bench.trials, key=lambda trial: (trial.intermediate_values[2500], trial.number))
    assert all(5000 in trial.intermediate_values for trial in ranked[:4])
    assert any("at rung 25 %: ranked" in reason for _, reason in bench.notes.judged.values())


def test_evaluations_between_rungs_at_shares_are_kept_by_shares_too(tmp_path: Path) -> None:
    def evaluated_often(trial: Trial, steps: int) -> JobSpec:
        job = make_job(trial, steps)
        return replace(job, train=replace(job.train, eval_every=1))

    search = halving(trials=4, cohort=4, rungs=(0.5,))
    bench = Bench(tmp_path, search, steps=unequal_steps, budgets={5, 8}, job=evaluated_often)
    bench.run()
    expected = {5: [2000, 4000, 5000, 8000, 10_000], 8: [1250, 2500, 3750, 5000, 6250, 7500, 8750, 10_000]}
    for trial in bench.trials:
        kept = sorted(trial.intermediate_values)
        assert kept == expected[unequal_steps(trial)][: len(kept)]
        assert 5000 in kept
    study = optuna.load_study(study_name=None, storage=bench.storage)
    standing = {each.number: each.step for each in read_standing(study).trials}
    ends = {int(result.job[-4:]): result.step for result in bench.of(JobResult)}
    assert standing == ends, "the state of a search is told in steps"


def begun(folder: Path, rungs: tuple[float, ...] | None, **more: Any) -> Bench:
    """A search over trials of 8 and 5 steps that was interrupted."""
    search = replace(halving(trials=8, cohort=8, parallel=8, rungs=rungs), name="one")
    bench = Bench(folder, search, steps=unequal_steps, budgets={5, 8}, checkpoint_steps=1, **more)
    replace(bench, stop_at=2).run()
    assert any(trial.intermediate_values for trial in bench.trials)
    return replace(bench, notes=Notes())


def with_rungs(bench: Bench, rungs: tuple[float, ...] | None) -> Bench:
    stopping = replace(bench.search.stopping, rungs=rungs)
    return replace(bench, search=replace(bench.search, stopping=stopping))


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ((0.25, 0.5), (2, 4), r"search\.stopping\.rungs=\[2,4\].*shares of each trial's own steps"),
        ((2, 4), (0.25, 0.5), r"search\.stopping\.rungs=\[0\.25,0\.5\].*count optimiser steps"),
        (None, (2, 4), r"search\.stopping\.rungs=\[2,4\].*shares of each trial's own steps"),
    ],
)
def test_rungs_in_the_other_unit_are_refused_before_anything_trains(
    tmp_path: Path, first: Any, then: Any, said: str
) -> None:
    bench = begun(tmp_path, first)
    before = states(bench)
    with pytest.raises(ConfigError, match=f"(?s){said}.*search\\.name.*search\\.fresh=true"):
        with_rungs(bench, then).run()
    assert states(bench) == before


@pytest.mark.parametrize("first", [(0.25, 0.5), (2, 4)])
def test_rungs_left_open_on_resuming_are_in_the_unit_of_the_study(tmp_path: Path, first: Any) -> None:
    bench = begun(tmp_path, first)
    with_rungs(bench, None).run()
    shares = first[0] < 1
    for trial in bench.trials:
        steps = unequal_steps(trial)
        assert trial.state.is_finished()
        assert max(trial.intermediate_values) <= (10_000 if shares else steps)
        assert (min(trial.intermediate_values) >= 1250) == shares


def test_without_a_rule_a_study_of_shares_goes_on_with_shares(tmp_path: Path) -> None:
    def evaluated_often(trial: Trial, steps: int) -> JobSpec:
        job = make_job(trial, steps)
        return replace(job, train=replace(job.train, eval_every=1))

    bench = begun(tmp_path, (0.25,))
    search = replace(bench.search, stopping=StoppingSettings())
    bench = replace(bench, search=search, job=evaluated_often)
    replace(bench, stop_at=4).run()
    measured = {event.job: (event.step, event.loss) for event in bench.of(JobEvaluated)}
    assert max(step for step, _ in measured.values()) > 2
    study = optuna.load_study(study_name=None, storage=bench.storage)
    told = {Trial(each.number).name: (each.step, each.reported) for each in read_standing(study).trials}
    assert told == told | measured, "the state of a search tells what was measured last"
    bench.run()
    assert {max(trial.intermediate_values) for trial in bench.trials} == {10_000}


def test_a_search_begun_without_rungs_may_get_some_in_the_unit_of_its_values(tmp_path: Path) -> None:
    def evaluated_often(trial: Trial, steps: int) -> JobSpec:
        job = make_job(trial, steps)
        return replace(job, train=replace(job.train, eval_every=1))

    search = replace(halving(trials=8, cohort=8, parallel=8, rungs=(0.25, 0.5)), name="one")
    bench = Bench(
        tmp_path,
        replace(search, stopping=StoppingSettings()),
        steps=unequal_steps,
        budgets={5, 8},
        checkpoint_steps=1,
        job=evaluated_often,
    )
    replace(bench, stop_at=3).run()
    assert any(trial.intermediate_values for trial in bench.trials)
    other = StoppingSettings(kind="successive_halving", rungs=(2, 4))
    with pytest.raises(ConfigError, match="count shares of each trial's own steps"):
        replace(bench, search=replace(search, stopping=other)).run()
    bench = replace(bench, search=search, notes=Notes())
    bench.run()
    assert all(trial.state.is_finished() for trial in bench.trials)
    assert sum(10_000 in trial.intermediate_values for trial in bench.trials) == 4, "past 50 % go the best"
    ends = {result.job: result.step for result in bench.of(JobResult)}
    for trial in bench.trials:
        last = max(trial.intermediate_values)
        assert ends[Trial(trial.number).name] == -(-last * unequal_steps(trial) // 10_000)


# ---- killed ---------------------------------------------------------------------------------------------


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["successive_halving", "hyperband", "median", "patience"]),
    lives=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    checkpoint_steps=st.sampled_from([None, 1, 3]),
    other_metric=st.booleans(),
    by_share=st.booleans(),
)
def test_a_killed_search_decides_the_same_as_one_that_ran_through(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    lives: list[int],
    checkpoint_steps: int | None,
    other_metric: bool,
    by_share: bool,
) -> None:
    rungs = (0.25, 0.3, 0.625) if by_share else (2, 3, 5)
    rule = {"kind": kind, "cohort": 4, "metric": "train/loss" if other_metric else None, "rungs": rungs}
    search = replace(halving(trials=10, parallel=3, **rule), name="one")
    unequal: dict[str, Any] = {"steps": unequal_steps, "budgets": {5, 8}} if by_share else {}
    undisturbed = Bench(tmp_path_factory.mktemp("undisturbed"), search, **unequal)
    undisturbed.run()
    bench = Bench(tmp_path_factory.mktemp("killed"), search, checkpoint_steps=checkpoint_steps, **unequal)
    for life in lives:
        try:
            replace(bench, alive=life, notes=Notes()).run()
        except KilledError:
            continue
    bench.run()
    assert states(bench) == states(undisturbed)
    kept = [trial.user_attrs.get("plait.rungs") for trial in undisturbed.trials]
    assert [trial.user_attrs.get("plait.rungs") for trial in bench.trials] == kept
    assert any(kept) == other_metric


@pytest.mark.parametrize("kind", ["asha", "optuna"])
def test_trials_released_by_order_of_arrival_stay_released(tmp_path: Path, kind: str) -> None:
    bench = Bench(tmp_path, halving(trials=8, parallel=2, kind=kind), checkpoint_steps=1)
    with pytest.raises(KilledError):
        replace(bench, alive=7).run()
    past = {trial.number for trial in bench.trials if "plait.passed" in trial.user_attrs}
    assert past
    bench.run()
    for trial in bench.trials:
        assert trial.state.is_finished()
        if trial.number in past:
            assert max(trial.intermediate_values) >= 4


# ---- what is judged ---------------------------------------------------------------------------------------


def test_another_metric_is_kept_apart_from_the_intermediate_values(tmp_path: Path) -> None:
    bench = Bench(tmp_path, halving(metric="train/loss"))
    bench.run()
    measured = [trial.user_attrs["plait.rungs"] for trial in bench.trials]
    assert all(set(values) <= {"2", "4"} for values in measured)
    assert all(set(trial.intermediate_values) <= {8} for trial in bench.trials)
    assert {event.step for event in bench.of(JobEvaluated)} == {8}


def test_a_diverged_trial_is_reported_as_failed_and_has_no_value(tmp_path: Path) -> None:
    def rising(job: JobSpec, step: int) -> float:
        return 1.0 + step if job.name == "trial-0002" else 3.0 / (step + 1)

    bench = Bench(tmp_path, halving(kind="divergence", divergence=1.5), worker={"curve": rising})
    assert bench.run().exit_status == 3
    diverged = bench.trials[2]
    assert diverged.state == TrialState.FAIL
    assert diverged.value is None
    assert diverged.user_attrs["plait.reason"].startswith("diverged: eval/loss 5 at rung 4")
    assert bench.notes.judged["trial-0002"][0] == "failed"
    assert Counter(trial.state.name for trial in bench.trials) == {"COMPLETE": 7, "FAIL": 1}


@pytest.mark.parametrize(
    ("pruner", "options"),
    [
        ("MedianPruner", {"n_startup_trials": 1}),
        ("SuccessiveHalvingPruner", {"min_resource": 2, "reduction_factor": 2}),
        ("HyperbandPruner", {"min_resource": 2, "max_resource": 8}),
        ("PatientPruner", {"patience": 1}),
        ("ThresholdPruner", {"upper": 1.0}),
        ("PercentilePruner", {"percentile": 25.0, "n_startup_trials": 1}),
        ("NopPruner", {}),
    ],
)
def test_each_of_optunas_pruners_runs(tmp_path: Path, pruner: str, options: dict[str, Any]) -> None:
    search = halving(trials=12, kind="optuna", pruner=pruner, options=options, rungs=(2, 4, 6))
    bench = Bench(tmp_path, search)
    bench.run()
    pruned = [trial for trial in bench.trials if trial.state == TrialState.PRUNED]
    assert bool(pruned) == (pruner not in ("NopPruner", "PatientPruner"))
    for trial in pruned:
        assert trial.user_attrs["plait.reason"].startswith(f"{pruner} at rung")


@pytest.mark.parametrize(
    ("stopping", "said"),
    [
        ({"pruner": "Hyperband"}, "HyperbandPruner, MedianPruner"),
        ({"options": {"startup": 3}}, "n_startup_trials"),
        ({"metric": "train/loss"}, "Leave out search.stopping.metric"),
    ],
)
def test_a_pruner_that_cannot_be_made_is_refused(tmp_path: Path, stopping: dict[str, Any], said: str) -> None:
    with pytest.raises(SearchError) as caught:
        Bench(tmp_path, halving(kind="optuna", **stopping)).run()
    assert said in str(caught.value)
