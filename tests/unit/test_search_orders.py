"""What a search does about its owner's orders while trials stand at rungs: pause, stop, cancel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import optuna
import pytest
from curve_worker import CurveWorker, step_fault
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from rung_bench import Bench, KilledError, Notes, halving, states

from plait.core.errors import StorageError
from plait.core.lifecycle import JobResult
from plait.core.messages import (
    Command,
    GroupStep,
    JobPaused,
    JobProgress,
    Notice,
    SaveCheckpoint,
    WorkerEvent,
)
from plait.search.orders import ENDING, ORDERED, ORDERS, Mode, Orders
from plait.search.ownership import Owner as Trainer
from plait.search.study import StudyTrials

RUNNING, PAUSED = Orders(), Orders("paused")
STOPPING, CANCELLING = Orders("stopping"), Orders("cancelling")
Owner = Callable[[StudyTrials, int], Orders]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.search.run.WAIT_SECONDS", 0.0)


def from_poll(first: int, orders: Orders, until: int = 1_000_000) -> Owner:
    """Orders that hold from one look at them to another."""
    return lambda _study, poll: orders if first <= poll < until else RUNNING


def names(numbers: Sequence[int]) -> set[str]:
    return {f"trial-{number:04d}" for number in numbers}


def steps_of(bench: Bench, name: str) -> list[int]:
    return [event.step for event in bench.of(JobProgress) if event.job == name]


def decided(bench: Bench) -> list[tuple[TrialState, dict[int, float], str]]:
    """What became of each trial, from which values, and why."""
    return [(t.state, t.intermediate_values, t.user_attrs["plait.reason"]) for t in bench.trials]


# ---- pause ----------------------------------------------------------------------------------------------


def test_a_pause_decides_no_cohort(tmp_path: Path) -> None:
    """Two stand at the rung when the search is paused; the six that they are compared with come later."""
    bench = Bench(tmp_path / "paused", halving(trials=8, parallel=2, cohort=8), owner=from_poll(2, PAUSED, 9))
    undisturbed = Bench(tmp_path / "undisturbed", bench.search)
    bench.run()
    undisturbed.run()
    assert any(event.text.startswith("paused") for event in bench.of(Notice))
    assert decided(bench) == decided(undisturbed)


def test_trials_that_trained_when_a_pause_began_resume_after_it(tmp_path: Path) -> None:
    owner = from_poll(4, PAUSED, 8)
    search = halving(trials=10, parallel=3, kind="patience", rungs=(6,))
    bench = Bench(tmp_path, search, owner=owner)
    bench.run()
    kinds = [type(event) for event in bench.notes.events]
    last_parked = len(kinds) - 1 - kinds[::-1].index(JobPaused)
    groups = [
        {event.jobs for event in part if isinstance(event, GroupStep)}
        for part in (bench.notes.events[:last_parked], bench.notes.events[last_parked:])
    ]
    assert groups[0] == {("trial-0000", "trial-0001", "trial-0002")}
    assert ("trial-0000", "trial-0001", "trial-0002") in groups[1]
    assert [event.reason for event in bench.of(JobPaused)] == ["by the user"] * 3


def test_a_trial_released_during_a_pause_resumes_after_it(tmp_path: Path) -> None:
    """Both halves of the cohort are at the rung when all are paused, so it is decided in the pause."""
    search = halving(trials=4, parallel=4, cohort=4)
    bench = Bench(tmp_path, search, owner=from_poll(2, PAUSED, 6))
    undisturbed = Bench(tmp_path / "undisturbed", bench.search)
    bench.run()
    undisturbed.run()
    assert decided(bench) == decided(undisturbed)
    assert {event.step for event in bench.of(JobPaused)} == {2}


def test_how_a_pause_ends_is_said_when_it_begins_and_an_interrupt_knows_of_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, halving(trials=4, parallel=2), owner=from_poll(2, PAUSED), stop_at=8)
    result = bench.run()
    said = "paused, as requested with `plait control`; `plait control NAME resume` ends the pause"
    assert [event.text for event in bench.of(Notice)] == [said]
    assert (result.interrupted, result.ended_by) == (True, "paused")


def test_a_search_that_was_killed_in_a_pause_stays_paused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, halving(trials=4, parallel=2), owner=from_poll(2, PAUSED), checkpoint_steps=1)
    with pytest.raises(KilledError):
        replace(bench, alive=6).run()
    with pytest.raises(KilledError):
        replace(bench, alive=6, notes=(again := Notes()), owner=from_poll(0, PAUSED)).run()
    assert not [event for event in again.events if isinstance(event, JobProgress)]
    bench.owner = from_poll(0, RUNNING)
    assert bench.run().exit_status == 0
    assert len(bench.trials) == 4


# ---- stop and cancel ---------------------------------------------------------------------------------------


def test_stop_while_a_cohort_waits_ends_with_the_suggested_trials(tmp_path: Path) -> None:
    bench = Bench(tmp_path, halving(trials=8, parallel=2, cohort=8), owner=from_poll(3, STOPPING))
    result = bench.run()
    assert (result.ended_by, result.why) == ("stopping", ORDERED)
    assert Counter(state.name for state, _ in states(bench)) == {"COMPLETE": 1, "PRUNED": 3}
    bench.owner = from_poll(0, RUNNING)
    assert not bench.run().ended_by
    assert len(bench.trials) == 8
    assert all(state.is_finished() for state, _ in states(bench))


def test_a_search_whose_trials_all_ran_to_their_end_did_not_end_early(tmp_path: Path) -> None:
    bench = Bench(tmp_path, halving(trials=2, parallel=2, kind="none"), owner=from_poll(1, STOPPING))
    result = bench.run()
    assert (result.ended_by, result.why) == ("", "")
    assert [item.state for item in bench.trials] == [TrialState.COMPLETE] * 2
    bench = Bench(tmp_path / "b", halving(trials=2, parallel=2, kind="none"), owner=from_poll(1, CANCELLING))
    assert bench.run().why == ORDERED


def test_points_that_wait_for_their_turn_do_not_hold_up_a_search_that_is_stopped(tmp_path: Path) -> None:
    """What was added is a member of the cohort, and will not come."""

    def owner(study: StudyTrials, poll: int) -> Orders:
        if poll == 3:
            for at in (1e-4, 1e-3):
                study.enqueue({"train.lr": at}, request=f"add {at}")
        return STOPPING if poll >= 3 else RUNNING

    bench = Bench(tmp_path, halving(trials=8, parallel=2, cohort=8), owner=owner, alive=60)
    assert bench.run().ended_by == "stopping"
    assert Counter(state.name for state, _ in states(bench)) == {"COMPLETE": 1, "PRUNED": 3, "WAITING": 2}


def test_nor_one_in_which_too_many_fail(tmp_path: Path) -> None:
    def owner(study: StudyTrials, poll: int) -> Orders:
        if poll == 1:
            study.enqueue({"train.lr": 1e-4}, request="add")
        return RUNNING

    search = replace(halving(trials=12, parallel=2, cohort=6), max_failure_rate=0.0)
    fails = {"fault": step_fault(lambda job, _: job == "trial-0001")}
    bench = Bench(tmp_path, search, worker=fails, owner=owner, alive=60)
    bench.run()
    assert [state.name for state, _ in states(bench)] == ["COMPLETE", "FAIL", "WAITING"]


def test_a_search_that_gives_up_ends_what_an_earlier_process_began(tmp_path: Path) -> None:
    """Its cohort would wait for it forever."""
    search = replace(halving(trials=12, parallel=3, cohort=6), max_failure_rate=0.0)
    bench = Bench(tmp_path, search, worker={"fault": step_fault(lambda job, _: job == "trial-0001")})
    with pytest.raises(KilledError):
        replace(bench, alive=1, worker={}).run()
    assert len(bench.trials) == 3
    replace(bench, search=replace(search, parallel=1), alive=60).run()
    ends = [state.name for state, _ in states(bench)]
    assert ends[1] == "FAIL"
    assert {ends[0], ends[2]} == {"COMPLETE", "PRUNED"}


def test_cancel_also_ends_paused_jobs(tmp_path: Path) -> None:
    bench = Bench(tmp_path, halving(trials=8, parallel=2, cohort=8), owner=from_poll(5, CANCELLING))
    result = bench.run()
    assert result.ended_by == "cancelling"
    assert {event.job for event in bench.of(JobPaused)} == names(range(4))
    assert [trial.state for trial in bench.trials] == [TrialState.PRUNED] * 6
    assert {trial.user_attrs["plait.reason"] for trial in bench.trials} == {"by the user"}
    assert len(bench.notes.judged) == 6


@pytest.mark.parametrize("parallel", [1, 2])
def test_cancel_ends_what_a_killed_process_left_behind_untrained(tmp_path: Path, parallel: int) -> None:
    bench = Bench(tmp_path, halving(trials=8, parallel=2, cohort=8), checkpoint_steps=1)
    with pytest.raises(KilledError):
        replace(bench, alive=4).run()
    left = len(bench.trials)
    assert left > 2  # some stood at a rung
    search = replace(bench.search, parallel=parallel)
    again = replace(bench, search=search, notes=Notes(), owner=from_poll(0, CANCELLING), alive=20)
    assert again.run().ended_by == "cancelling"
    assert [trial.state for trial in again.trials] == [TrialState.PRUNED] * left
    assert {trial.user_attrs["plait.reason"] for trial in again.trials} == {"by the user"}
    assert again.notes.judged == dict.fromkeys(names(range(left)), ("stopped", "by the user"))
    assert not again.of(JobProgress)
    assert not list(tmp_path.glob("checkpoints/*/*"))


def test_cancel_during_a_pause(tmp_path: Path) -> None:
    def owner(_study: StudyTrials, poll: int) -> Orders:
        return RUNNING if poll < 3 else PAUSED if poll < 6 else CANCELLING

    bench = Bench(tmp_path, halving(trials=8, parallel=2, cohort=8), owner=owner, alive=60)
    assert bench.run().ended_by == "cancelling"
    assert [state for state, _ in states(bench)] == [TrialState.PRUNED] * 4


def test_a_trial_ended_while_paused_does_not_hold_up_its_cohort(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path,
        halving(trials=4, parallel=1, cohort=4),
        owner=lambda _study, poll: Orders(stops=(0,)) if poll >= 4 else RUNNING,
        alive=200,
    )
    bench.run()
    first, *others = bench.trials
    assert first.state == TrialState.PRUNED
    assert first.user_attrs["plait.reason"] == "by the user"
    assert steps_of(bench, "trial-0000") == [1, 2]
    assert all(trial.state.is_finished() for trial in others)


def test_interrupting_a_pause_saves_all_and_resumes_later(tmp_path: Path) -> None:
    bench = Bench(tmp_path, halving(trials=6, parallel=3, cohort=6), owner=from_poll(3, PAUSED, 8))
    undisturbed = Bench(tmp_path / "undisturbed", bench.search)
    undisturbed.run()
    bench.stop_at = 6
    assert bench.run().interrupted
    assert {state for state, _ in states(bench)} == {TrialState.RUNNING}
    again = replace(bench, stop_at=None, owner=from_poll(0, RUNNING), notes=Notes())
    again.run()
    assert decided(again) == decided(undisturbed)
    first = [steps_of(again, name)[:1] for name in names(range(3))]
    assert [3] in first
    assert all(each in ([3], []) for each in first)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["successive_halving", "hyperband", "median"]),
    pauses=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), max_size=4),
    parallel=st.integers(1, 5),
    max_jobs=st.one_of(st.none(), st.integers(1, 3)),
)
def test_pauses_change_no_decision_and_no_step(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    pauses: list[tuple[int, int]],
    parallel: int,
    max_jobs: int | None,
) -> None:
    def owner(_study: StudyTrials, poll: int) -> Orders:
        return PAUSED if any(first <= poll < first + length for first, length in pauses) else RUNNING

    search = halving(trials=9, parallel=parallel, kind=kind, cohort=5, rungs=(1, 3, 5))
    undisturbed = Bench(tmp_path_factory.mktemp("undisturbed"), search, max_jobs=max_jobs)
    undisturbed.run()
    bench = Bench(tmp_path_factory.mktemp("paused"), search, max_jobs=max_jobs, owner=owner, alive=500)
    bench.run()
    assert decided(bench) == decided(undisturbed)
    for name in names(range(9)):
        assert steps_of(bench, name) == steps_of(undisturbed, name)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    modes=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from(["running", "paused", "stopping"])), max_size=8
    ),
    last=st.sampled_from(["running", "stopping", "cancelling"]),
    stops=st.dictionaries(st.integers(0, 11), st.integers(0, 25), max_size=4),
    kind=st.sampled_from(["successive_halving", "asha", "median", "patience"]),
    parallel=st.integers(1, 5),
    max_jobs=st.one_of(st.none(), st.integers(1, 3)),
    added=st.sets(st.integers(0, 20), max_size=3),
)
def test_under_any_orders_a_search_ends_and_reports_every_trial_once(
    tmp_path_factory: pytest.TempPathFactory,
    modes: list[tuple[int, Mode]],
    last: Mode,
    stops: dict[int, int],
    kind: str,
    parallel: int,
    max_jobs: int | None,
    added: set[int],
) -> None:
    ordered: list[Mode] = [mode for length, mode in modes for _ in range(length)]

    def owner(study: StudyTrials, poll: int) -> Orders:
        if poll in added:
            study.enqueue({}, request=f"add {poll}")
        mode = ordered[poll] if poll < len(ordered) else last
        return Orders(mode, tuple(number for number, since in stops.items() if poll >= since))

    search = halving(trials=10, parallel=parallel, kind=kind, cohort=4, rungs=(1, 3, 5))
    folder = tmp_path_factory.mktemp("search")
    bench = Bench(folder, search, max_jobs=max_jobs, owner=owner, alive=500)
    result = bench.run()
    assert not [trial for trial in bench.trials if trial.state == TrialState.RUNNING]
    told = [trial for trial in bench.trials if trial.state.is_finished()]
    assert len(bench.notes.judged) == len(told)
    if not result.ended_by:
        assert len(told) == len(bench.trials) >= 10
    for trial in told:
        steps = steps_of(bench, f"trial-{trial.number:04d}")
        assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("mode", ["running", "paused", "stopping", "cancelling"])
def test_an_order_that_comes_too_late_does_not_wait_for_the_next_start(tmp_path: Path, mode: Mode) -> None:
    """It is given between this worker's last look at the orders and the end of the search."""

    def owner(study: StudyTrials, _poll: int) -> Orders:
        if study.over == 4:
            study.orders.set_mode(mode)
            study.orders.stop_trial(3)
            return RUNNING
        return study.orders.read()

    bench = Bench(tmp_path, halving(trials=4, parallel=2, kind="none"), owner=owner)
    assert not bench.run().ended_by
    again = replace(bench, search=replace(bench.search, trials=6), alive=100)
    again.owner = lambda study, _poll: study.orders.read()
    assert not again.run().ended_by
    assert [item.state for item in bench.trials] == [TrialState.COMPLETE] * 6
    kept = optuna.load_study(study_name=None, storage=bench.storage).user_attrs[ORDERS]
    assert (kept["mode"], [*kept["stops"]], kept["ended"]) == ("running", [], int(mode in ENDING))


# ---- several workers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["stopping", "cancelling"])
def test_a_worker_ends_with_the_others_when_the_last_withdraws_the_order(tmp_path: Path, mode: Mode) -> None:
    """Between the end of this worker's last trial and its next look, another has found nothing left to do."""

    def owner(study: StudyTrials, poll: int) -> Orders:
        if poll == 2:
            study.orders.set_mode(mode)
        if poll > 2 and not [item for item in study._study.get_trials() if item.state == TrialState.RUNNING]:
            study.orders.withdraw()
        return study.orders.read()

    bench = Bench(tmp_path, halving(trials=8, parallel=2, kind="none"), owner=owner)
    assert bench.run().ended_by == mode
    assert len(bench.trials) == 2
    bench.owner = lambda study, _poll: study.orders.read()
    assert not bench.run().ended_by  # the same command resumes it
    assert len(bench.trials) == 8


def test_a_worker_ends_with_the_others_although_it_never_saw_the_order(tmp_path: Path) -> None:
    """Between two of its looks another was told to cancel, ended its trials, and found nobody's any more."""

    def owner(study: StudyTrials, poll: int) -> Orders:
        if poll == 3:
            study.orders.set_mode("cancelling")
            study.orders.withdraw()
        return study.orders.read()

    bench = Bench(tmp_path, halving(trials=8, parallel=2, kind="none"), owner=owner)
    assert bench.run().ended_by == "cancelling"
    assert {item.user_attrs["plait.reason"] for item in bench.trials} == {"by the user"}


def test_decisions_of_another_worker_take_effect_during_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other brings the last member of a cohort to its rung; here its first one waits, beside a trial of
    the next cohort that nothing happens to."""
    monkeypatch.setattr("plait.search.run.LOOK_SECONDS", 0.0)

    def owner(study: StudyTrials, poll: int) -> Orders:
        if poll == 0:
            elsewhere = study._study.ask(study._suggester._distributions)
            elsewhere.set_user_attr("plait.owner", asdict(Trainer("other", "elsewhere", "/nowhere")))
        if poll == 5:
            study._study._storage.set_trial_intermediate_value(0, 2, 99.0)
            study._study.tell(0, 99.0)
        return RUNNING

    search = halving(trials=4, parallel=2, cohort=2, rungs=(2,))
    bench = Bench(tmp_path, search, owner=owner, alive=60)
    bench.run()
    beside = [event.jobs for event in bench.of(GroupStep) if "trial-0001" in event.jobs]
    assert len(beside[0]) == 2
    assert steps_of(bench, "trial-0001") == list(range(1, 9))
    assert len(beside[2]) == 2  # its third step, beside one that has not ended


@pytest.mark.parametrize("parallel", [1, 2])
def test_adopted_trials_are_left_to_the_other_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: int
) -> None:
    """It could not reach this one, and gave it up: trained, told and judged there, and no longer here. One of
    the two stands at a rung meanwhile."""
    monkeypatch.setattr("plait.search.run.LOOK_SECONDS", 0.0)

    def owner(study: StudyTrials, poll: int) -> Orders:
        storage = study._study._storage
        if poll == 4:
            taken = asdict(Trainer("other", "elsewhere", "/nowhere"))
            storage.set_trial_user_attr(0, "plait.owner", taken)
        if poll == 6:
            study._study.tell(0, 99.0)
        return RUNNING

    search = halving(trials=3, parallel=parallel, cohort=3, rungs=(2, 6))
    bench = Bench(tmp_path, search, owner=owner, alive=60)
    bench.run()
    assert bench.notes.lost == ["trial-0000"]
    assert "trial-0000" not in bench.notes.judged
    assert not [event for event in bench.of(JobResult) if event.job == "trial-0000"]
    assert max(steps_of(bench, "trial-0000")) <= 3
    assert bench.trials[0].value == 99.0
    assert all(trial.state.is_finished() for trial in bench.trials)
    assert [event.text for event in bench.of(Notice) if "adopted the trial" in event.text]


def test_resume_after_stop_suggests_again(tmp_path: Path) -> None:
    def owner(study: StudyTrials, poll: int) -> Orders:
        if poll in (2, 4):
            study.orders.set_mode("stopping" if poll == 2 else "running")
        return study.orders.read()

    bench = Bench(tmp_path, halving(trials=8, parallel=2, kind="patience"), owner=owner)
    assert not bench.run().ended_by
    assert len(bench.trials) == 8


# ---- a full disk -------------------------------------------------------------------------------------------


class FullDisk(CurveWorker):
    """Cannot write a state from one command to another."""

    full: range = range(0)
    tries: int = 0

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        if isinstance(command, SaveCheckpoint):
            type(self).tries += 1
            if type(self).tries in self.full:
                raise StorageError("no space left on device")
        return super().execute(command)


def test_a_job_that_cannot_be_paused_is_reported_once_and_keeps_its_slot(tmp_path: Path) -> None:
    class Full(FullDisk):
        full = range(1_000)

    bench = Bench(
        tmp_path,
        halving(trials=4, parallel=2, cohort=4),
        make_worker=Full,
        owner=from_poll(4, PAUSED, 40),
        alive=400,
    )
    with pytest.raises(KilledError):  # the places are taken by those that wait, so that the others never come
        bench.run()
    notices = [event.text for event in bench.of(Notice) if "could not save" in event.text]
    assert len(notices) == 2
    assert {event.job for event in bench.of(JobProgress)} == names([0, 1])
