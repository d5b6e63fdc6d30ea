"""The state of a search, from its stored study."""

from dataclasses import asdict
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState, create_trial
from rung_bench import Bench, halving

from plait.core.lifecycle import JobState, PauseReason
from plait.core.messages import JobPaused, JobReleased
from plait.search.attributes import OWNER, STATE
from plait.search.ownership import Owner, this_host
from plait.search.stored import hosts_of, read_standing
from plait.tracking.leaderboard import Leaderboard
from plait.tracking.processes import FOLDER, JobNow, ProcessWatch, read_jobs


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
    """What a process keeps for other terminals may be two seconds older than what the study has."""
    study = optuna.create_study()
    study.set_metric_names(["eval/loss"])
    facts = {OWNER: asdict(Owner("worker", "node7 its-boot", "/nowhere"))}
    study.add_trial(
        create_trial(state=TrialState.RUNNING, user_attrs=facts, intermediate_values={10: 2.5, 20: 1.25})
    )
    for now, shown in (
        (JobNow(18, 40, 3.0), "step 20 of 40  train loss 3.0000 at step 18  eval loss 1.25 at step 20"),
        (JobNow(25, 40, 2.0), "step 25 of 40  train loss 2.0000  eval loss 1.25 at step 20"),
    ):
        (trial,) = read_standing(study, {"trial-0000": now}).trials
        assert str(trial) == f"trial-0000  running   {shown}"


@pytest.mark.parametrize("metric", ["eval/loss", "train/grad_norm"])
def test_values_at_rungs_are_named_by_the_metric_of_the_rungs(tmp_path: Path, metric: str) -> None:
    bench = Bench(tmp_path, halving(trials=4, parallel=4, metric=metric))
    bench.run()
    study = optuna.load_study(study_name=None, storage=bench.storage)
    pruned = [each for each in read_standing(study).trials if each.state == JobState.PRUNED]
    assert [each.metric for each in pruned] == [metric] * 3


def test_why_a_trial_is_paused_is_said(tmp_path: Path) -> None:
    """By the user, at a rung, or since no slot is free: the state is one, the reasons differ."""
    bench = Bench(tmp_path, halving(trials=8, parallel=2, cohort=4))
    bench.run()
    board = Leaderboard("minimize", 8)
    seen: list[tuple[str, str]] = []
    for event in bench.notes.events:
        board.handle(event)
        if isinstance(event, JobPaused | JobReleased):
            ProcessWatch(tmp_path, lambda: board, lambda: {-1}).keep()
            now = read_jobs(tmp_path, [_own(tmp_path)])[event.job]
            seen.append((type(event).__name__, now.paused))
    assert set(seen) == {("JobPaused", "at a rung"), ("JobReleased", "waiting for a slot")}
    study = optuna.create_study()
    reasons = [PauseReason.AT_RUNG, PauseReason.AT_RUNG, PauseReason.BY_ORDER, "waiting for a slot"]
    facts = {OWNER: asdict(Owner("worker", this_host(), "/nowhere")), STATE: JobState.PAUSED}
    for _ in reasons:
        study.add_trial(create_trial(state=TrialState.RUNNING, user_attrs=facts))
    jobs = {f"trial-{at:04d}": JobNow(4, 8, None, str(why)) for at, why in enumerate(reasons)}
    said = read_standing(study, jobs).describe()
    assert said[0] == "4 trials: 2 paused (at a rung), 1 paused (by order), 1 paused (waiting for a slot)."
    assert said[1:] == [f"  trial-{at:04d}  paused ({why})  step 4 of 8" for at, why in enumerate(reasons)]


def _own(folder: Path) -> str:
    (file,) = (folder / FOLDER).iterdir()
    return file.name.partition("-")[0]
