"""A search continues while its store is unavailable; its records reach the store later, in order, once."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from disk_operations import Operations
from lost_tracker import die, wait_for_threads
from mlflow import MlflowClient
from mlflow.entities import Run

from plait.core.errors import StorageError
from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import GroupStep, JobAdmitted, JobEvaluated, JobProgress
from plait.core.settings import RunSettings, SearchSettings, TrackingSettings
from plait.tracking.connection import AwayError, open_store
from plait.tracking.facts import SearchFacts
from plait.tracking.leaderboard import JobRecord
from plait.tracking.location import Location, locate
from plait.tracking.mlflow_store import Store
from plait.tracking.results import load_search
from plait.tracking.search_run import conclude, left_unsent, send_left
from plait.tracking.tracker import Peers, Tracker

STEPS = 6
OBJECTIVES = SearchSettings(
    trials=3, metric=("eval/loss", "adapter.rank"), direction=("minimize", "minimize")
)
VALUES = {0: (1.0, 8.0), 1: (2.0, 2.0), 2: (0.5, 9.0)}
FRONT = {0, 1, 2}


class Switch:
    """Whether the store is unavailable."""

    def __init__(self) -> None:
        self.away = False

    def open(self, location: Location, experiment: str) -> Store:
        if self.away:
            raise AwayError(f"tracking.uri={location}: no answer", "One must answer.", "Start it.")
        return open_store(location, experiment)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Switch:
    switch = Switch()
    for module in ("connection", "search_run"):
        monkeypatch.setattr(f"plait.tracking.{module}.open_store", switch.open)
    monkeypatch.setattr("plait.tracking.writer.FIRST_DELAY", 0.01)
    monkeypatch.setattr("plait.tracking.tracker.READ_PAUSE", 0.01)
    monkeypatch.setattr("plait.tracking.tracker.READ_SHARE", 1e9)  # however long a reading takes
    return switch


@pytest.fixture
def settings(settings: TrackingSettings) -> TrackingSettings:
    return replace(settings, flush_seconds=0.01)


def start(settings: TrackingSettings, known: str = "") -> Tracker:
    tracker = Tracker(settings)
    facts = SearchFacts("demo", RunSettings(tracking=settings, search=OBJECTIVES), study="s")
    tracker.start_search(facts, known)
    for result in over(0) if known else ():  # as the search does, which asks the study
        tracker.board.take_result(result)
    return tracker


def begin(tracker: Tracker, trial: int, step: int = 0) -> None:
    job = JobSpec(f"trial-{trial:04d}", AdapterSpec(rank=int(VALUES[trial][1])))
    tracker.start_job(job, trial)
    tracker.handle(JobAdmitted(job, step, STEPS, "g0"))


def train(tracker: Tracker, trial: int, first: int = 1, last: int = STEPS) -> None:
    name = f"trial-{trial:04d}"
    for step in range(first, last + 1):
        tracker.handle(JobProgress(name, step, 3.0 / step, 1.0, 1e-4, 100 * step, 0.5 * step, 200.0))
        tracker.handle(GroupStep("g0", step, (name,), 1, 100, 0.5, None, 200))


def end(tracker: Tracker, trial: int) -> None:
    name, (loss, rank) = f"trial-{trial:04d}", VALUES[trial]
    tracker.handle(JobEvaluated(name, STEPS, loss, 100))
    measured = (STEPS, "", loss, 100 * STEPS, 0.5 * STEPS, 9.0)
    tracker.handle(JobResult(name, JobState.FINISHED, *measured, values=(loss, rank)))


def over(*trials: int) -> list[JobResult]:
    return [
        JobResult(
            f"trial-{trial:04d}",
            JobState.FINISHED,
            values=VALUES[trial],
            trial=trial,
            parameters={"adapter.rank": 1},
        )
        for trial in trials
    ]


def interrupted(settings: TrackingSettings) -> str:
    """Trial 0 is over and trial 1 at step 3 when a process is interrupted; the id of the search's run."""
    tracker = start(settings)
    for trial in (0, 1):
        begin(tracker, trial)
    train(tracker, 0)
    end(tracker, 0)
    train(tracker, 1, 1, 3)
    tracker.end_search(JobState.PAUSED)
    tracker.close()
    assert tracker.notices == []
    return load_search(settings, "demo").run_id


def killed(settings: TrackingSettings) -> str:
    """The same, by a kill, with almost all of it unsent."""
    tracker = start(replace(settings, flush_seconds=3600.0))
    for trial in (0, 1):
        begin(tracker, trial)
    tracker.flush()
    train(tracker, 0)
    end(tracker, 0)
    train(tracker, 1, 1, 3)
    tracker.commit()
    die(tracker)
    assert left_unsent(settings, "demo")
    return load_search(settings, "demo").run_id


def curve(client: MlflowClient, run: Run, key: str) -> list[tuple[int, float]]:
    return [(item.step, item.value) for item in client.get_metric_history(run.info.run_id, key)]


def check(settings: TrackingSettings, run_id: str) -> None:
    """Everything is there, once and in order."""
    assert left_unsent(settings, "demo") == []
    client = MlflowClient(locate(settings).uri)
    found = load_search(settings, "demo")
    parent = client.get_run(run_id)
    assert (found.run_id, parent.info.status, found.state) == (run_id, "FINISHED", "finished")
    assert sorted(item.trial for item in found.records) == [0, 1, 2]
    for item in found.records:
        run = client.get_run(item.run_id)
        assert (run.info.status, item.state, item.step) == ("FINISHED", "finished", STEPS)
        assert curve(client, run, "train/loss") == [(step, 3.0 / step) for step in range(1, STEPS + 1)]
        assert curve(client, run, "objective") == [(STEPS, VALUES[item.trial][0])]
        assert run.data.tags["plait.pareto"] == "true"
    table = json.loads(Path(client.download_artifacts(run_id, "leaderboard.json")).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert {row["trial"]: row["tokens"] for row in rows} == dict.fromkeys(range(3), 100 * STEPS)
    for key in ("search/seconds", "group/fill", "train/tokens", "search/ended", "search/front"):
        points = curve(client, parent, key)
        assert points == sorted(set(points))
        if key != "group/fill":  # what sums up never falls
            assert [value for _, value in points] == sorted(value for _, value in points), key
    assert parent.data.metrics["train/tokens"] == 300 * STEPS


def finish(tracker: Tracker, settings: TrackingSettings, run_id: str) -> None:
    """The search ends in this process, which has the store by now."""
    tracker.end_search()
    tracker.close()
    assert tracker.notices == []
    tracker.conclude(over(0, 1, 2))
    check(settings, run_id)


def rest(tracker: Tracker) -> None:
    """Trial 1 goes on from step 2, and trial 2 follows."""
    begin(tracker, 1, 2)
    train(tracker, 1, 3)
    end(tracker, 1)
    begin(tracker, 2)
    train(tracker, 2)
    end(tracker, 2)


BEFORE = pytest.mark.parametrize("before", [interrupted, killed])


@BEFORE
def test_a_store_that_never_answers_gets_everything_from_the_next_start(
    settings: TrackingSettings, store: Switch, before: Callable[[TrackingSettings], str]
) -> None:
    run_id = before(settings)
    store.away = True
    tracker = start(settings, run_id)
    assert tracker.away is not None
    assert tracker.board.jobs["trial-0000"].objective == 1.0
    rest(tracker)
    assert {job.name for job in tracker.board.front()} == {"trial-0000", "trial-0001", "trial-0002"}
    tracker.end_search()
    tracker.close()
    (told,) = tracker.notices
    assert "have not been sent to sqlite" in told
    assert "no answer" in told
    assert left_unsent(settings, "demo")
    with pytest.raises(AwayError):
        send_left(settings, "demo")
    store.away = False
    assert load_search(settings, "demo").state == ("running" if before is killed else "paused")
    assert send_left(settings, "demo") == []
    assert conclude(settings, "demo", "s", over(0, 1, 2)) == run_id
    check(settings, run_id)


@BEFORE
def test_a_store_that_answers_later_gets_everything_from_this_process(
    settings: TrackingSettings, store: Switch, before: Callable[[TrackingSettings], str]
) -> None:
    run_id = before(settings)
    store.away = True
    tracker = start(settings, run_id)
    begin(tracker, 1, 2)
    train(tracker, 1, 3)
    assert tracker.board.jobs["trial-0000"].tokens == 0
    store.away = False
    until = time.monotonic() + 30
    while tracker.board.jobs["trial-0000"].tokens == 0 and time.monotonic() < until:
        tracker.handle(GroupStep("g0", 9, ("trial-0001",), 1, 100, 0.5, None, 200))
        time.sleep(0.01)
    assert tracker.board.jobs["trial-0000"].tokens == 100 * STEPS
    tracker.flush()
    parent = MlflowClient(locate(settings).uri).get_run(run_id)
    assert (parent.info.status, parent.data.tags["plait.state"]) == ("RUNNING", "running")
    end(tracker, 1)
    begin(tracker, 2)
    train(tracker, 2)
    end(tracker, 2)
    finish(tracker, settings, run_id)


def test_two_workers_begin_without_the_store(settings: TrackingSettings, store: Switch) -> None:
    run_id = interrupted(settings)
    store.away = True
    first, second = (start(settings, run_id) for _ in range(2))
    begin(first, 1, 2)
    begin(second, 2)
    train(first, 1, 3)
    train(second, 2)
    end(first, 1)
    first.peers = lambda: Peers(training=True)
    first.end_search()
    first.close()
    assert first.notices
    end(second, 2)
    store.away = False
    second.end_search()
    second.close()
    assert second.notices == []
    assert send_left(settings, "demo") == []
    assert conclude(settings, "demo", "s", over(0, 1, 2)) == run_id
    check(settings, run_id)


def test_without_an_earlier_start_the_store_must_answer(settings: TrackingSettings, store: Switch) -> None:
    interrupted(settings)
    store.away = True
    with pytest.raises(AwayError):
        start(settings)


def test_a_trial_that_the_study_says_has_ended_keeps_what_the_store_has_of_it(
    settings: TrackingSettings,
) -> None:
    """The process that trained it is on another host, and was killed before it had sent its end."""
    tracker = start(settings)
    tracker.board.take_result(over(0)[0])
    stored = JobRecord("trial-0000", 0, {"adapter.rank": 1, "train.lr": 1e-4}, JobState.RUNNING)
    stored.tokens, stored.run_id = 300, "r"
    tracker._take_others([stored])
    shown = tracker.board.jobs["trial-0000"]
    assert (shown.state, shown.values, shown.tokens) == (JobState.FINISHED, VALUES[0], 300)
    assert shown.parameters["train.lr"] == 1e-4
    tracker.close()


def test_a_store_that_becomes_unavailable_during_the_start(
    settings: TrackingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = interrupted(settings)

    def lost(*_: object) -> None:
        raise AwayError("tracking.uri=there: no answer")

    with monkeypatch.context() as patched:
        patched.setattr("plait.tracking.search_run.find_or_make", lost)
        tracker = start(settings, run_id)
    assert tracker.away is not None
    rest(tracker)
    finish(tracker, settings, run_id)


def test_a_store_that_comes_back_without_the_run_gets_nothing(
    settings: TrackingSettings, store: Switch
) -> None:
    """What was sent would be refused there for good, and be lost."""
    run_id = interrupted(settings)
    store.away = True
    tracker = start(settings, run_id)
    rest(tracker)
    client = MlflowClient(locate(settings).uri)
    client.delete_run(run_id)
    store.away = False
    tracker.end_search()
    tracker.close()
    (told,) = tracker.notices
    assert f"run {run_id} is not in sqlite" in told
    with pytest.raises(StorageError, match="was recorded in this run"):
        tracker.conclude(over(0, 1, 2))
    client.restore_run(run_id)
    assert send_left(settings, "demo") == []
    assert conclude(settings, "demo", "s", over(0, 1, 2)) == run_id
    check(settings, run_id)


def life(settings: TrackingSettings, known: str, last: int) -> int:
    """A process that goes on without the store and is killed before its operation ``last`` on the disk; how
    it ended."""
    child = os.fork()
    if child == 0:
        try:
            Operations(last)
            tracker = start(settings, known)
            begin(tracker, 1, 2)
            train(tracker, 1, 3, 5)
            tracker.commit()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_start_without_the_store_that_is_killed_before_each_of_its_operations(
    settings: TrackingSettings, store: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = interrupted(settings)
    assert wait_for_threads() == []
    for name in ("hardware", "packages"):
        monkeypatch.setattr(f"plait.tracking.facts.{name}", dict)
    store.away = True
    statuses: list[int] = []
    while not statuses or statuses[-1] != 0:
        statuses.append(life(settings, run_id, len(statuses) + 1))
    assert set(statuses[:-1]) == {-signal.SIGKILL}
    assert len(statuses) > 10  # 20 to 22, as the thread that sends finds more or less to do at once
    store.away = False
    tracker = start(settings, run_id)
    assert tracker.away is None
    rest(tracker)
    finish(tracker, settings, run_id)
