"""Importance of searched keys, from real studies."""

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState, create_trial

from plait.search.stopper import UNIT
from plait.search.storage import open_storage
from plait_dashboards.importance import Importance, read_importance

SPACE = {name: FloatDistribution(0.0, 1.0) for name in ("train.lr", "adapter.dropout")}


def study(root: Path, trials: int, direction: str = "minimize", *, constant: bool = False) -> None:
    """A study in which the rate decides and the dropout does not; failed and pruned trials mean nothing."""
    chance = random.Random(0)
    made = optuna.create_study(study_name="s", storage=open_storage(None, root), direction=direction)
    for number in range(trials):
        values = {name: chance.random() for name in SPACE}
        good = (values["train.lr"] - 0.3) ** 2 * (1.0 if direction == "minimize" else -1.0)
        made.add_trial(
            create_trial(params=values, distributions=dict(SPACE), value=0.0 if constant else good)
        )
        if number % 5 == 0:
            for state in (TrialState.FAIL, TrialState.PRUNED):
                made.add_trial(create_trial(params=values, distributions=dict(SPACE), state=state))


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_key_that_decides_comes_first(tmp_path: Path, direction: str) -> None:
    study(tmp_path, 60, direction)
    found = read_importance(None, tmp_path, "s")
    assert list(found.shares) == ["train.lr", "adapter.dropout"]
    assert found.shares["train.lr"] > 0.8
    assert math.isclose(sum(found.shares.values()), 1.0)
    assert found.trials == 60
    assert not found.few
    assert found.trouble == ""


def test_few_trials_are_called_few(tmp_path: Path) -> None:
    study(tmp_path, 8)
    found = read_importance(None, tmp_path, "s")
    assert found.trials == 8
    assert found.few


def test_four_trials_have_no_importance(tmp_path: Path) -> None:
    study(tmp_path, 4)
    found = read_importance(None, tmp_path, "s")
    assert not found.shares
    rule = "Importance needs 5 finished trials, or 5 measured at one step."
    assert found.trouble == f"{rule} 4 have finished."


def test_too_few_trials_load_nothing_to_compute_it_with(tmp_path: Path) -> None:
    study(tmp_path, 4)
    program = (
        "import sys; from pathlib import Path; from plait_dashboards.importance import read_importance; "
        "print(read_importance(None, Path(sys.argv[1]), 's').trials, 'sklearn' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "4 False\n"


def test_trials_that_were_stopped_early_count_at_the_last_step_that_half_of_them_reached(
    tmp_path: Path,
) -> None:
    """By halving at steps 2, 4 and 8; what comes after a step says nothing of those that it stopped."""
    chance = random.Random(0)
    made = optuna.create_study(study_name="s", storage=open_storage(None, tmp_path))
    for number in range(40):
        values = {name: chance.random() for name in SPACE}
        good = (values["train.lr"] - 0.3) ** 2
        steps = [2] if number % 2 else [2, 4] if number % 4 else [2, 4, 8]
        made.add_trial(
            create_trial(
                params=values,
                distributions=dict(SPACE),
                state=TrialState.PRUNED,
                intermediate_values={step: good if step == 4 else chance.random() for step in steps},
            )
        )
    found = read_importance(None, tmp_path, "s")
    assert (found.step, found.trials, found.trouble) == (4, 20, "")
    assert found.shares["train.lr"] > 0.8
    made.set_user_attr(UNIT, "shares")
    assert str(read_importance(None, tmp_path, "s").step) == "0.04 %"


def test_five_trials_have_one(tmp_path: Path) -> None:
    study(tmp_path, 5)
    found = read_importance(None, tmp_path, "s")
    assert (found.trials, found.trouble) == (5, "")
    assert math.isclose(sum(found.shares.values()), 1.0)


def test_equal_objectives_have_no_importance(tmp_path: Path) -> None:
    study(tmp_path, 5, constant=True)
    assert read_importance(None, tmp_path, "s") == Importance(
        trials=5, trouble="The compared trials all have the same objective."
    )


def test_a_missing_study_is_reported_and_not_created(tmp_path: Path) -> None:
    assert "optuna.journal was not found" in read_importance(None, tmp_path, "s").trouble
    assert "gone.db was not found" in read_importance(str(tmp_path / "gone.db"), tmp_path, "s").trouble
    assert "gone.db was not found" in read_importance(f"sqlite:///{tmp_path}/gone.db", tmp_path, "s").trouble
    assert list(tmp_path.iterdir()) == []
    study(tmp_path, 1)
    assert "other is no longer in its storage" in read_importance(None, tmp_path, "other").trouble


def test_an_address_without_its_password_is_reported(tmp_path: Path) -> None:
    assert "password" in read_importance("postgresql://user:***@host/studies", tmp_path, "s").trouble


def test_a_database_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    found = read_importance("postgresql://user@127.0.0.1:9/studies", tmp_path, "s")
    assert "does not answer" in found.trouble


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_importance_is_known_of_several_objectives(tmp_path: Path) -> None:
    made = optuna.create_study(
        study_name="s", storage=open_storage(None, tmp_path), directions=["minimize", "maximize"]
    )
    made.set_metric_names(["eval/loss", "eval/accuracy"])
    for number in range(12):
        values = dict.fromkeys(SPACE, number / 12)
        made.add_trial(create_trial(params=values, distributions=dict(SPACE), values=[number, 2.0 * number]))
    assert read_importance(None, tmp_path, "s").trials == 12


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("constant", [0, 1])
def test_importance_needs_only_one_objective_that_varies(tmp_path: Path, constant: int) -> None:
    made = optuna.create_study(
        study_name="s", storage=open_storage(None, tmp_path), directions=["minimize", "minimize"]
    )
    for number in range(12):
        values = dict.fromkeys(SPACE, number / 12)
        objectives = [float(number), float(number)]
        objectives[constant] = 1.0
        made.add_trial(create_trial(params=values, distributions=dict(SPACE), values=objectives))
    found = read_importance(None, tmp_path, "s")
    assert (found.trials, found.trouble) == (12, "")
    assert found.shares
