"""The state of a search, from its stored study."""

from dataclasses import asdict

import optuna
import pytest
from optuna.trial import TrialState, create_trial

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
