"""The state of a search, from its stored study."""

from dataclasses import asdict
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState, create_trial
from rung_bench import Bench, halving

from plait.core.lifecycle import JobState
from plait.search.attributes import OWNER, STATE
from plait.search.ownership import Owner, this_host
from plait.search.stored import hosts_of, read_standing


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.PAUSED])
def test_trials_of_another_host_are_counted_there_even_while_they_are_paused(state: JobState) -> None:
    study = optuna.create_study()
    for host in ("node7 its-boot", this_host()):
        facts = {OWNER: asdict(Owner("worker", host, "/nowhere")), STATE: state}
        study.add_trial(create_trial(state=TrialState.RUNNING, user_attrs=facts))
        study.add_trial(create_trial(value=1.0, user_attrs=facts))
    assert hosts_of(study.get_trials()) == ("node7", "", "", "")
    standing = read_standing(study)
    assert standing.elsewhere == {"node7": 1}
    assert f"1 {state} on host node7" in standing.describe()[0]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_what_is_reported_is_named_and_stands_at_its_own_step() -> None:
    study = optuna.create_study()
    study.set_metric_names(["eval/loss"])
    facts = {OWNER: asdict(Owner("worker", "node7 its-boot", "/nowhere"))}
    study.add_trial(
        create_trial(state=TrialState.RUNNING, user_attrs=facts, intermediate_values={10: 2.5, 20: 1.25})
    )
    (trial,) = read_standing(study).trials
    assert str(trial) == "trial-0000  running   eval loss 1.25 at step 20"


@pytest.mark.parametrize("metric", ["eval/loss", "train/grad_norm"])
def test_values_at_rungs_are_named_by_the_metric_of_the_rungs(tmp_path: Path, metric: str) -> None:
    bench = Bench(tmp_path, halving(trials=4, parallel=4, metric=metric))
    bench.run()
    study = optuna.load_study(study_name=None, storage=bench.storage)
    pruned = [each for each in read_standing(study).trials if each.state == JobState.PRUNED]
    assert [each.metric for each in pruned] == [metric] * 3
