"""Trials of higher priority in a search whose places are taken: they come in at once, others continue
later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from rung_bench import Bench, KilledError, Notes, halving, states
from studies import space_of, study_of

from plait.core.lifecycle import PauseReason
from plait.core.messages import GroupStep, JobPaused, JobProgress
from plait.core.settings import SearchSettings
from plait.search.orders import Orders
from plait.search.study import StudyTrials

GROUP = ("trial-0000", "trial-0001")
NONE = {"kind": "none"}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.search.run.WAIT_SECONDS", 0.0)
    monkeypatch.setattr("plait.search.run.LOOK_SECONDS", 0.0)


def adds(study: StudyTrials, poll: int, *priorities: int | None) -> Orders:
    """The owner, who adds trials of these priorities after some iterations."""
    if poll == 3:
        for at, priority in enumerate(priorities):
            study.enqueue({"train.lr": 1e-3}, request=f"request {at}", priority=priority)
    return Orders()


def groups(bench: Bench) -> list[tuple[str, ...]]:
    """Who trained together, in order, each group once."""
    found: list[tuple[str, ...]] = []
    for event in bench.of(GroupStep):
        jobs = tuple(sorted(event.jobs))
        if found[-1:] != [jobs]:
            found.append(jobs)
    return found


def steps_of(bench: Bench, name: str) -> list[int]:
    return [event.step for event in bench.of(JobProgress) if event.job == name]


def test_an_urgent_trial_preempts_the_last_one_which_resumes_later(tmp_path: Path) -> None:
    search = halving(trials=2, parallel=2, **NONE)
    bench = Bench(tmp_path, search, owner=lambda study, poll: adds(study, poll, 0, 5, 1))
    bench.run()
    assert groups(bench) == [
        GROUP,
        ("trial-0003", "trial-0004"),
        GROUP,
        ("trial-0002",),
    ]
    assert {event.job for event in bench.of(JobPaused)} == set(GROUP)
    for number in range(5):
        assert steps_of(bench, f"trial-{number:04d}") == list(range(1, 9))
    assert [trial.state for trial in bench.trials] == [TrialState.COMPLETE] * 5
    undisturbed = Bench(tmp_path / "undisturbed", search)
    undisturbed.run()
    assert states(bench)[:2] == states(undisturbed)


def test_urgent_trials_take_at_most_the_available_slots(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path, halving(trials=1, parallel=1, **NONE), owner=lambda study, poll: adds(study, poll, 5, 5, 7)
    )
    bench.run()
    assert groups(bench) == [(f"trial-{number:04d}",) for number in (0, 3, 1, 2, 0)]


def test_trials_of_the_same_priority_wait_for_a_slot(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path, halving(trials=2, parallel=2, **NONE), owner=lambda study, poll: adds(study, poll, None, 0)
    )
    bench.run()
    assert groups(bench) == [GROUP, ("trial-0002", "trial-0003")]
    assert not bench.of(JobPaused)


def test_a_killed_search_resumes_with_the_urgent_trial_first(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path,
        halving(trials=2, parallel=1, **NONE),
        owner=lambda study, poll: adds(study, poll, 5),
        checkpoint_steps=1,
    )
    with pytest.raises(KilledError):
        replace(bench, alive=6).run()
    assert groups(bench) == [("trial-0000",), ("trial-0001",)]
    again = replace(bench, notes=Notes(), owner=lambda _study, _poll: Orders())
    again.run()
    assert groups(again) == [(f"trial-{number:04d}",) for number in (1, 0, 2)]


def test_where_priorities_are_searched_one_that_has_none_yet_preempts_nothing() -> None:
    study = study_of(space_of("train.priority=0,5", "train.lr=1e-3,1e-2"), SearchSettings())
    study.enqueue({"train.lr": 1e-3})
    assert study.ask(above=0) is None
    assert study.ask(above=-1) is not None


def test_an_urgent_trial_waits_out_a_pause(tmp_path: Path) -> None:
    def owner(study: StudyTrials, poll: int) -> Orders:
        adds(study, poll, 5)
        return Orders("paused") if 2 <= poll < 6 else Orders()

    bench = Bench(tmp_path, halving(trials=2, parallel=2, **NONE), owner=owner, alive=200)
    bench.run()
    assert groups(bench) == [
        GROUP,
        ("trial-0000", "trial-0002"),
        ("trial-0001", "trial-0002"),
        ("trial-0001",),
    ]
    assert [trial.state for trial in bench.trials] == [TrialState.COMPLETE] * 3


def test_a_released_trial_takes_the_slot_of_another_released_one(tmp_path: Path) -> None:
    """The cohort is decided as its last member comes to the rung, which would keep its place."""

    def owner(study: StudyTrials, poll: int) -> Orders:
        if poll == 0:
            for lr, priority in ((1e-1, 0), (1e-3, 5), (1e-5, 0), (2e-3, 0)):
                study.enqueue({"train.lr": lr}, request=f"request {lr}", priority=priority)
        return Orders()

    bench = Bench(tmp_path, halving(trials=1, parallel=1, cohort=4, rungs=(2,)), owner=owner)
    bench.run()
    assert groups(bench) == [(f"trial-{number:04d}",) for number in (1, 0, 2, 3, 1, 3, 4)]
    last = bench.of(JobPaused)[-1]
    assert (last.job, last.step, last.reason) == ("trial-0003", 2, PauseReason.PREEMPTED)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    added=st.lists(st.tuples(st.integers(0, 20), st.integers(-1, 3)), max_size=6),
    parallel=st.integers(1, 3),
    kind=st.sampled_from(["none", "successive_halving", "patience"]),
)
def test_every_trial_takes_each_step_once_in_any_order_of_arrival(
    tmp_path_factory: pytest.TempPathFactory, added: list[tuple[int, int]], parallel: int, kind: str
) -> None:
    def owner(study: StudyTrials, poll: int) -> Orders:
        for at, (when, priority) in enumerate(added):
            if poll == when:
                study.enqueue({}, request=f"request {at}", priority=priority)
        return Orders()

    folder = tmp_path_factory.mktemp("search")
    bench = Bench(folder, halving(4, parallel, kind=kind, cohort=3, rungs=(2, 5)), owner=owner, alive=500)
    bench.run()
    assert max(len(jobs) for jobs in groups(bench)) <= parallel
    assert all(state.is_finished() for state, _ in states(bench))
    for trial in bench.trials:
        steps = steps_of(bench, f"trial-{trial.number:04d}")
        assert steps == list(range(1, len(steps) + 1))
        assert trial.state != TrialState.COMPLETE or len(steps) == 8


@pytest.mark.parametrize("kind", ["successive_halving", "hyperband", "median", "asha"])
def test_a_stop_waits_for_no_trial_that_waits_behind_an_urgent_one(tmp_path: Path, kind: str) -> None:
    def owner(study: StudyTrials, poll: int) -> Orders:
        if poll == 1:
            study.enqueue({"train.lr": 1e-3}, request="waits")
            study.enqueue({"train.lr": 2e-3}, request="comes first", priority=5)
        return Orders("stopping") if poll >= 3 else Orders()

    bench = Bench(tmp_path, halving(2, 2, kind=kind, cohort=8), owner=owner, alive=200)
    assert bench.run().ended_by == "stopping"
    assert [state == TrialState.WAITING for state, _ in states(bench)] == [False, False, True, False]
    assert all(state.is_finished() for state, _ in states(bench) if state != TrialState.WAITING)
    assert TrialState.COMPLETE in {state for state, _ in states(bench)}
