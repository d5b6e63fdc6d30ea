"""A search that two processes train and end together: its run has the whole, in any order of their ends."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from job_results import ended
from lost_tracker import die
from mlflow import MlflowClient

from plait.core.errors import StorageError
from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import GroupStep, JobAdmitted, JobEvaluated, JobPaused, JobProgress
from plait.core.settings import RunSettings, SearchSettings, TrackingSettings
from plait.terminal.text import status_line
from plait.tracking.facts import SearchFacts
from plait.tracking.leaderboard import JobRecord
from plait.tracking.location import locate
from plait.tracking.mlflow_store import Store
from plait.tracking.results import load_search
from plait.tracking.search_run import conclude, send_left
from plait.tracking.tracker import Peers, Tracker

OBJECTIVES = SearchSettings(
    trials=4, metric=("eval/loss", "adapter.rank"), direction=("minimize", "minimize")
)
VALUES = {0: (1.0, 8.0), 1: (2.0, 2.0), 2: (3.0, 4.0), 3: (0.5, 16.0)}  # 2 is dominated by 1
FRONT = {0, 1, 3}


def worker(settings: TrackingSettings, *, writes_curves: bool = True) -> Tracker:
    tracker = Tracker(settings, writes_curves=lambda: writes_curves)
    tracker.start_search(SearchFacts("both", RunSettings(tracking=settings, search=OBJECTIVES), study="s"))
    return tracker


def begin(tracker: Tracker, trial: int) -> None:
    job = JobSpec(f"trial-{trial:04d}", AdapterSpec(rank=int(VALUES[trial][1])))
    tracker.start_job(job, trial)
    tracker.handle(JobAdmitted(job, 0, 4, "g0"))
    tracker.handle(JobProgress(job.name, 3, 2.5, 1.0, 1e-4, 300, 1.5, 200.0))


def end(tracker: Tracker, trial: int) -> None:
    name, (loss, rank) = f"trial-{trial:04d}", VALUES[trial]
    tracker.handle(JobEvaluated(name, 4, loss, 100))
    tracker.handle(JobResult(name, JobState.FINISHED, 4, "", loss, 400, 2.0, 9.0, values=(loss, rank)))


def results() -> list[JobResult]:
    return [
        JobResult(
            f"trial-{trial:04d}",
            JobState.FINISHED,
            values=values,
            trial=trial,
            parameters={"adapter.rank": int(values[1])},
        )
        for trial, values in VALUES.items()
    ]


def check(settings: TrackingSettings, folder: Path) -> None:
    """Everything that the search's run says of the whole."""
    client = MlflowClient(locate(settings).uri)
    found = load_search(settings, "both")
    run = client.get_run(found.run_id)
    assert (run.info.status, found.state) == ("FINISHED", "finished")
    assert [item.state for item in found.records] == ["finished"] * 4
    assert {item.trial for item in found.records if item.on_front} == FRONT
    for name, trials in (("pareto.json", FRONT), ("leaderboard.json", set(VALUES))):
        table = json.loads(Path(client.download_artifacts(found.run_id, name, str(folder))).read_text())
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        assert {row["trial"] for row in rows} == trials
    tagged = {
        item.trial
        for item in found.records
        if client.get_run(item.run_id).data.tags.get("plait.pareto") == "true"
    }
    assert tagged == FRONT
    assert run.data.tags["mlflow.note.content"] == "Pareto front so far: trial-0003, trial-0000, trial-0001"
    assert run.data.metrics["search/front"] == 3
    assert run.data.metrics["search/ended"] == 4
    assert run.data.metrics["search/running"] == 0
    assert run.data.metrics["train/tokens"] == 1600


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_two_that_end_at_the_same_time(
    settings: TrackingSettings, tmp_path: Path, order: Sequence[int]
) -> None:
    first = worker(settings)
    begin(first, 0)
    first.flush()
    both = [first, worker(settings, writes_curves=False)]
    for tracker, trials in zip(both, ((2, 0), (1, 3)), strict=True):
        for trial in trials:
            if trial != 0:
                begin(tracker, trial)
            end(tracker, trial)
        tracker.peers = lambda: Peers(
            ended={item.job for item in results()}
        )  # both have told the study of all
    for at in order:
        both[at].end_search()
    for at in reversed(order):  # as each has sent what it has, so it writes of the whole
        both[at].close()
        both[at].conclude(results())
    check(settings, tmp_path)


def test_a_worker_that_is_alone_writes_nothing_twice(
    settings: TrackingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = worker(settings)
    for trial in VALUES:
        begin(tracker, trial)
        end(tracker, trial)
    tracker.end_search()
    tracker.close()
    written: list[object] = []
    monkeypatch.setattr("plait.tracking.tracker.write_final", lambda *given, **_: written.append(given))
    tracker.conclude(results())
    assert not written


def test_records_of_a_killed_worker_do_not_replace_the_whole(
    settings: TrackingSettings, tmp_path: Path
) -> None:
    """The first knows one job; its last words reach the store after the other has written of the whole."""
    killed = worker(replace(settings, flush_seconds=3600.0))
    begin(killed, 0)
    other = worker(settings, writes_curves=False)
    end(killed, 0)
    killed.commit()
    for trial in (1, 2, 3):
        begin(other, trial)
        end(other, trial)
    other.peers = lambda: Peers(ended={item.job for item in results()})
    other.end_search()
    other.close()
    other.conclude(results())
    die(killed)
    assert send_left(settings, "both") == []
    assert conclude(settings, "both", "s", results()) is not None
    check(settings, tmp_path)


def test_a_search_whose_last_process_was_killed_is_ended(settings: TrackingSettings, tmp_path: Path) -> None:
    killed = worker(settings)
    for trial in VALUES:
        begin(killed, trial)
        end(killed, trial)
    killed.flush()
    die(killed)
    assert load_search(settings, "both").state == JobState.RUNNING
    assert conclude(settings, "both", "another study", results()) is None
    assert conclude(settings, "both", "s", results()) is not None
    check(settings, tmp_path)


def test_trials_that_are_recorded_elsewhere_are_counted(
    settings: TrackingSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = worker(settings)
    for trial in (0, 1):
        begin(tracker, trial)
        end(tracker, trial)
    tracker.end_search()
    tracker.close()
    load_search(settings, "both")
    assert "no run" not in capsys.readouterr().err
    conclude(settings, "both", "s", results())
    load_search(settings, "both")
    assert "Of 4 trials that have ended, 2 have no run in this store" in capsys.readouterr().err


def test_ended_trials_are_as_in_the_study_with_the_rest_from_the_store(
    settings: TrackingSettings, tmp_path: Path
) -> None:
    killed = worker(settings)
    for trial in (0, 1, 2):
        begin(killed, trial)
    end(killed, 0)
    end(killed, 1)
    killed.handle(ended("pruned", 3.5, "rung 2", job="trial-0002"))
    killed.handle(GroupStep("g0", 1, (), 1, 100, 0.5, None, 200))
    killed.flush()
    die(killed)
    first, second, *_ = results()
    judged = [
        first,
        replace(second, violations={"adapter.rank <= 1": 1.0}),
        ended("pruned", None, "rung 2", "trial-0002", trial=2),
        ended("failed", None, "it never had a run", "trial-0003", trial=3),
    ]
    run_id = conclude(settings, "both", "s", judged)
    assert run_id is not None
    client = MlflowClient(locate(settings).uri)
    table = json.loads(Path(client.download_artifacts(run_id, "leaderboard.json", str(tmp_path))).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert {row["trial"]: row["objective"] for row in rows} == {0: 1.0, 1: 2.0, 2: 3.5}
    assert client.get_run(run_id).data.metrics["search/front"] == 1
    steps = [point.step for point in client.get_metric_history(run_id, "search/ended")]
    assert len(steps) == len(set(steps)) > 1


def test_the_leaderboard_shows_unfinished_jobs(settings: TrackingSettings) -> None:
    tracker = worker(settings)
    for trial in (0, 1, 2):
        begin(tracker, trial)
    tracker.handle(JobEvaluated("trial-0001", 4, 2.2, 100))
    tracker.handle(JobPaused("trial-0001", 4, PauseReason.AT_RUNG))
    tracker.handle(GroupStep("g0", 1, ("trial-0000",), 1, 100, 0.5, None, 200))
    end(tracker, 2)
    tracker.flush()
    records = {item.trial: item for item in load_search(settings, "both").records}
    shown = [(each.state, each.step, each.steps, each.loss) for each in map(records.get, range(3)) if each]
    assert shown == [("running", 3, 4, 2.5), ("paused", 4, 4, 2.5), ("finished", 4, 4, 2.5)]
    tracker.end_search()
    tracker.close()
    assert [item.state for item in load_search(settings, "both").records][1:] == ["paused"] * 2


@pytest.mark.parametrize("folders", [("one", "one"), ("one", "other")], ids=["one folder", "two hosts"])
def test_processes_write_the_searchs_own_curves_one_after_the_other(
    settings: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: tuple[str, str]
) -> None:
    monkeypatch.setattr("plait.tracking.tracker.WATCH_PAUSE", 0.0)
    turn = [0]
    facts = SearchFacts("both", RunSettings(tracking=settings, search=OBJECTIVES), study="s")
    both = []
    for at, folder in enumerate(folders):
        own = replace(settings, root=tmp_path / folder)
        both.append(Tracker(own, writes_curves=lambda at=at: turn[0] == at))
        both[at].start_search(facts)
        begin(both[at], at)
    first, second = both

    def step(tracker: Tracker, at: int) -> None:
        tracker.handle(GroupStep("g0", at, (f"trial-000{both.index(tracker)}",), 1, 100, 0.5, None, 200))

    for at in range(1, 4):
        for tracker in both:
            step(tracker, at)
    first.peers = lambda: Peers(training=True)
    first.end_search(JobState.PAUSED)
    first.close()
    last = 4  # its last words
    turn[0] = 1
    second.flush()
    second._watch_curves()
    for at in range(4, 6):
        step(second, at)
    second.end_search()
    second.close()
    found = load_search(settings, "both")
    history = MlflowClient(locate(settings).uri).get_metric_history(found.run_id, "search/seconds")
    assert [point.step for point in history] == list(range(1, last + 4))
    assert [point.value for point in history] == sorted(point.value for point in history)


def test_late_points_from_a_killed_host_repeat_no_step_of_the_searchs_curves(
    settings: TrackingSettings, tmp_path: Path
) -> None:
    """They are sent after another host continued the curves, which is the one that counts."""
    facts = SearchFacts("both", RunSettings(tracking=settings, search=OBJECTIVES), study="s")
    now, turn = [1e9], ["one"]

    def host(name: str) -> Tracker:
        own = replace(settings, root=tmp_path / name, flush_seconds=1e6)
        clock = lambda: now[0]  # noqa: E731
        tracker = Tracker(own, clock=clock, rising=clock, writes_curves=lambda: turn[0] == name)
        tracker.start_search(facts)
        begin(tracker, int(name == "other"))
        return tracker

    def step(tracker: Tracker, times: int) -> None:
        for _ in range(times):
            now[0] += 10.001
            tracker.handle(GroupStep("g0", 1, ("trial-0000",), 1, 100, 0.5, None, 200))

    one, other = host("one"), host("other")
    step(one, 9)
    one.flush()
    step(one, 5)  # while it has the store out of reach
    one.commit()
    die(one)
    turn[0] = "other"
    other._settle_curves(other._running)
    step(other, 3)
    other.flush()
    assert send_left(replace(settings, root=tmp_path / "one"), "both") == []
    step(other, 3)
    other.flush()
    run = load_search(settings, "both").run_id
    history = MlflowClient(locate(settings).uri).get_metric_history(run, "search/seconds")
    assert [point.step for point in history] == list(range(1, 16))
    assert [point.value for point in history] == sorted(point.value for point in history)
    other.end_search()
    other.close()


def test_late_points_from_a_killed_host_repeat_no_step_of_a_job(
    settings: TrackingSettings, tmp_path: Path
) -> None:
    """Its second process resumed the job, and was killed with the store out of reach."""
    facts = SearchFacts("both", RunSettings(tracking=settings, search=OBJECTIVES), study="s")

    def trained(host: str, steps: range, *, sent: bool) -> None:
        tracker = Tracker(replace(settings, root=tmp_path / host, flush_seconds=1e6))
        tracker.start_search(facts)
        tracker.start_job(JobSpec("trial-0000"), 0)
        for at in steps:
            tracker.handle(JobProgress("trial-0000", at, 2.5, 1.0, 1e-4, 100 * at, 0.5 * at, 200.0))
        tracker.commit()
        if sent:
            tracker.flush()
        die(tracker)

    trained("one", range(1, 4), sent=True)
    trained("one", range(4, 7), sent=False)
    trained("other", range(1, 9), sent=True)
    assert send_left(replace(settings, root=tmp_path / "one"), "both") == []
    (record,) = load_search(settings, "both").records
    history = MlflowClient(locate(settings).uri).get_metric_history(record.run_id, "train/loss")
    assert [point.step for point in history] == list(range(1, 9))


def test_only_the_process_that_adopted_a_job_records_it(settings: TrackingSettings) -> None:
    first = worker(settings)
    begin(first, 0)
    first.flush()
    second = worker(settings)
    begin(second, 0)
    first.lose("trial-0000")
    assert "trial-0000" not in first.board.jobs
    first.commit()
    first.peers = lambda: Peers(training=True)
    first.end_search()
    first.close()
    second.flush()
    assert [job.state for job in load_search(settings, "both").records] == [JobState.RUNNING]
    end(second, 0)
    second.end_search()
    second.close()
    assert [job.state for job in load_search(settings, "both").records] == ["finished"]


def test_other_processes_jobs_are_on_the_board_while_the_search_runs(
    settings: TrackingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.tracking.tracker.READ_PAUSE", 0.01)
    monkeypatch.setattr("plait.tracking.tracker.READ_SHARE", 1e9)  # however long a reading takes
    first, second = worker(settings), worker(settings)
    begin(first, 0)
    begin(second, 1)
    end(first, 0)
    first.flush()
    until = time.monotonic() + 30

    def seen() -> str:  # a look that began before the flush may have found it running
        return second.board.jobs["trial-0000"].state if "trial-0000" in second.board.jobs else ""

    while seen() != "finished" and time.monotonic() < until:
        second.handle(GroupStep("g0", 1, ("trial-0001",), 1, 100, 0.5, None, 200))
        time.sleep(0.01)
    record = second.board.jobs["trial-0000"]
    assert (record.state, record.objective, record.others) == ("finished", *VALUES[0][:1], VALUES[0][1:])
    assert second.board.jobs["trial-0001"].state == "running"
    for tracker in (first, second):
        tracker.end_search()
        tracker.close()


def test_what_another_process_did_last_comes_on_the_board_after_its_end(
    settings: TrackingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unanswered(*_: object) -> list[JobRecord]:
        raise StorageError("the store", "It does not answer.")

    monkeypatch.setattr("plait.tracking.tracker.READ_PAUSE", 1e9)
    monkeypatch.setattr("plait.tracking.tracker.READ_SHARE", 1e9)
    first, second = worker(settings), worker(settings)
    begin(first, 0)
    begin(second, 1)
    first.flush()
    second._next_reading = 0.0
    second._read_others()
    end(first, 0)
    first.end_search()
    first.close()
    second._next_reading = 0.0
    with monkeypatch.context() as away:
        away.setattr(Store, "jobs", unanswered)
        with pytest.raises(StorageError):
            second._read_others()
    second._next_reading = 0.0
    second._read_others()
    second.handle(GroupStep("g0", 1, ("trial-0001",), 1, 100, 0.5, None, 200))
    assert second.board.jobs["trial-0000"].state == "finished", "though the store did not answer at first"
    second.end_search()
    second.close()


def test_nothing_is_read_where_no_other_process_is(
    settings: TrackingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.tracking.tracker.READ_PAUSE", 0.0)
    alone = worker(replace(settings, flush_seconds=0.001))
    begin(alone, 0)
    alone.flush()
    read: list[str] = []

    def noted(_: Store, parent_id: str) -> list[JobRecord]:
        read.append(parent_id)
        return []

    monkeypatch.setattr(Store, "jobs", noted)
    time.sleep(0.05)  # some fifty rounds of its writer
    assert read == []
    other = worker(settings)
    until = time.monotonic() + 30
    while not read and time.monotonic() < until:
        time.sleep(0.01)
    assert read
    for tracker in (alone, other):
        tracker.end_search()
        tracker.close()


def test_a_trial_with_a_dead_worker_waits_whatever_the_store_says(settings: TrackingSettings) -> None:
    killed = worker(settings)
    begin(killed, 0)
    begin(killed, 1)
    end(killed, 1)
    killed.flush()
    die(killed)
    other = Tracker(settings)
    other.peers = lambda: Peers(orphaned={"trial-0000"})
    other.start_search(SearchFacts("both", RunSettings(tracking=settings, search=OBJECTIVES), study="s"))
    states = {name: record.state for name, record in other.board.jobs.items()}
    assert states == {"trial-0000": "orphaned", "trial-0001": "finished"}
    assert "0 running · 1 orphaned" in status_line(other.board, None)
    assert {record.name: record.state for record in other._stored_jobs()}["trial-0000"] == "orphaned"
    begin(other, 0)
    assert other.board.jobs["trial-0000"].state == JobState.RUNNING
    end(other, 0)
    other.end_search()
    other.close()
