"""What a study keeps of rungs, read again by another process."""

from __future__ import annotations

import math
import warnings

import optuna
import pytest

from plait.core.settings import SearchSettings, StoppingSettings
from plait.search.ownership import Claims
from plait.search.rungs import RungRecord
from plait.search.stopper import StudyRungs
from plait.search.stopping import make_pruner
from plait.search.storage import SharedStudy

ONE = SearchSettings(stopping=StoppingSettings(kind="asha"))
ANOTHER = SearchSettings(stopping=StoppingSettings(kind="asha", metric="train/loss"))
SEVERAL = SearchSettings(
    metric=("eval/loss", "adapter.rank"),
    direction=("minimize", "minimize"),
    stopping=StoppingSettings(kind="asha"),
)


def made(search: SearchSettings) -> optuna.Study:
    return optuna.create_study(directions=[each.direction for each in search.objectives])


def rungs(study: optuna.Study, search: SearchSettings) -> StudyRungs:
    shared = SharedStudy(study)
    return StudyRungs(shared, search, Claims(shared, None, lambda _: None))


@pytest.mark.parametrize("search", [ONE, ANOTHER, SEVERAL], ids=["objective", "another metric", "several"])
def test_the_first_value_of_a_step_counts_and_only_finite_ones(search: SearchSettings) -> None:
    study = made(search)
    study.ask()
    mine = rungs(study, search)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, value in ((2, 1.5), (2, 9.0), (4, math.nan), (8, math.inf), (4, 1.25)):
            mine.measure(0, step, value)
    assert rungs(study, search).records() == {0: RungRecord({2: 1.5, 4: 1.25})}
    shown = study.get_trials()[0].intermediate_values
    assert shown == ({2: 1.5, 4: 1.25} if search is ONE else {})


def test_records_have_suggested_trials_their_ends_and_passed_rungs() -> None:
    study = made(ONE)
    study.enqueue_trial({})
    study.enqueue_trial({})
    study.enqueue_trial({})
    for _ in range(2):
        study.ask()
    rungs(study, ONE).let_past(0, 2)
    study.tell(1, state=optuna.trial.TrialState.FAIL)
    assert rungs(study, ONE).records() == {0: RungRecord(passed=2), 1: RungRecord(ended=True)}


def test_the_size_of_a_cohort_is_what_was_kept_first_for_each_rule() -> None:
    study = made(ONE)
    assert rungs(study, ONE).keep_cohort("median", 4) == 4
    assert rungs(study, ONE).keep_cohort("halving", 8) == 8
    assert rungs(study, ONE).keep_cohort("median", 16) == 4
    assert rungs(study, ONE).keep_cohort("halving", 2) == 8


def test_a_patient_pruner_may_wrap_no_other() -> None:
    stopping = StoppingSettings(kind="optuna", pruner="PatientPruner", options={"patience": 1})
    study = made(ONE)
    trial = study.ask()
    pruner = make_pruner(stopping)
    for step, value in enumerate((1.0, 2.0, 3.0)):
        trial.report(value, step)
    assert pruner.prune(study, study.get_trials()[0])


def test_the_unit_of_a_study_is_what_was_kept_first() -> None:
    study = made(ONE)
    assert rungs(study, ONE).keep_unit("shares") == "shares"
    assert rungs(study, ONE).keep_unit("steps") == "shares"
