"""What is written when a job is over: all that its device did, its last step, and a leaderboard."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from job_results import ended
from lost_tracker import die
from mlflow import MlflowClient

from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import GroupStep, JobAdmitted, JobPaused, JobProgress
from plait.core.settings import RunSettings, SearchSettings, TrackingSettings
from plait.tracking.event_log import logs_folder
from plait.tracking.facts import SearchFacts
from plait.tracking.location import locate
from plait.tracking.results import load_search
from plait.tracking.search_run import left_unsent, send_left
from plait.tracking.tracker import Tracker

STEPS = 20


def begin(settings: TrackingSettings) -> Tracker:
    tracker = Tracker(settings)
    search = SearchSettings(trials=2)
    tracker.start_search(SearchFacts("demo", RunSettings(tracking=settings, search=search)))
    return tracker


def train(tracker: Tracker, trial: int, last: int = STEPS) -> None:
    name = f"trial-{trial:04d}"
    tracker.start_job(JobSpec(name), trial)
    tracker.handle(JobAdmitted(JobSpec(name), 0, STEPS, "g0"))
    for step in range(1, last + 1):
        tracker.handle(JobProgress(name, step, 3.0 / step, 1.0, 1e-4, 100 * step, 1.0 * step, 200.0))


def end(tracker: Tracker, trial: int, seconds: float) -> None:
    name = f"trial-{trial:04d}"
    tracker.handle(
        JobResult(name, JobState.FINISHED, STEPS, "", 1.0, 100 * STEPS, seconds, 42.0, values=(1.0,))
    )


def crash(tracker: Tracker) -> None:
    """The process is gone, and what it handed over is on its disk."""
    tracker.commit()
    die(tracker)


@pytest.mark.parametrize("points", [1000, 3])
def test_device_time_after_the_last_step_is_in_the_jobs_run(settings: TrackingSettings, points: int) -> None:
    """An evaluation, say; what a process that was killed before anybody was told of the end did again
    adds to it."""
    settings = replace(settings, points=points)
    killed = begin(settings)
    train(killed, 0)
    end(killed, 0, STEPS + 5.0)
    crash(killed)
    tracker = begin(settings)
    train(tracker, 0)
    end(tracker, 0, STEPS + 6.0)
    train(tracker, 1)
    end(tracker, 1, STEPS)  # of this one, nothing
    tracker.end_search()
    tracker.close()
    client = MlflowClient(locate(settings).uri)
    found = load_search(settings, "demo")
    by_trial = {item.trial: item for item in found.records}
    assert [by_trial[trial].device_seconds for trial in (0, 1)] == [STEPS + 6.0, STEPS]
    for item in found.records:
        history = client.get_metric_history(item.run_id, "cost/device_seconds")
        last = sorted(point.value for point in history if point.step == STEPS)
        assert last == ([STEPS] if item.trial == 1 else [STEPS, STEPS + 5.0, STEPS + 6.0])
        losses = client.get_metric_history(item.run_id, "train/loss")
        assert [point.step for point in losses] == sorted({point.step for point in losses})


def test_the_sum_over_the_jobs_is_the_searchs_total(settings: TrackingSettings) -> None:
    tracker = begin(settings)
    for trial in (0, 1):
        train(tracker, trial)
        end(tracker, trial, STEPS + 5.0 * trial)
    tracker.handle(GroupStep("g0", 1, (), 1, 100, 0.5, None, 200))
    tracker.end_search()
    tracker.close()
    found = load_search(settings, "demo")
    parent = MlflowClient(locate(settings).uri).get_run(found.run_id)
    assert parent.data.metrics["cost/device_seconds"] == sum(item.device_seconds for item in found.records)


@pytest.mark.parametrize("adopted", [False, True], ids=["its log", "another's log"])
def test_a_job_that_ends_without_more_training_has_its_last_written_step(
    settings: TrackingSettings, adopted: bool
) -> None:
    """As `plait control NAME cancel` ends what a killed process left behind: of three points the curve has
    steps 1 and 7."""
    settings = replace(settings, points=3)
    other = begin(settings) if adopted else None
    killed = begin(settings)
    train(killed, 0, 12)
    crash(killed)
    tracker = other or begin(settings)
    assert tracker.start_job(JobSpec("trial-0000"), 0) == 7, "device seconds of what is recorded"
    tracker.handle(ended("stopped", None, "by order", job="trial-0000"))
    tracker.end_search()
    tracker.close()
    (item,) = load_search(settings, "demo").records
    assert (item.state, item.step, item.loss, item.tokens) == ("stopped", 7, 3.0 / 7, 700)
    client = MlflowClient(locate(settings).uri)
    assert client.get_run(item.run_id).data.tags["plait.step"] == "7"
    losses = client.get_metric_history(item.run_id, "train/loss")
    assert [point.step for point in losses] == [1, 7]


def test_an_interrupted_job_has_one_cost_at_its_last_step(settings: TrackingSettings) -> None:
    """What its device did after that step is in the next one's figure, and no step has two."""
    for last, state in ((8, JobState.PAUSED), (STEPS, JobState.FINISHED)):
        tracker = begin(settings)
        train(tracker, 0, last)
        tracker.handle(JobResult("trial-0000", state, last, "", 1.0, 100 * last, last + 0.5, 42.0))
        tracker.end_search(state)
        tracker.close()
    (item,) = load_search(settings, "demo").records
    client = MlflowClient(locate(settings).uri)
    for metric, due in (
        ("cost/device_seconds", [*range(1, STEPS + 1), STEPS]),
        ("job/completion_seconds", [STEPS]),
    ):
        assert sorted(point.step for point in client.get_metric_history(item.run_id, metric)) == due


def test_the_cost_of_an_evaluation_at_a_rung_outlives_a_kill_while_the_job_is_paused(
    settings: TrackingSettings,
) -> None:
    """It is pruned there by another process, and no later event says what its evaluation took."""
    killed = begin(settings)
    train(killed, 0, 8)
    killed.handle(JobPaused("trial-0000", 8, PauseReason.AT_RUNG, 800, 8.5))
    crash(killed)
    tracker = begin(settings)
    assert tracker.start_job(JobSpec("trial-0000"), 0) == 8.5
    tracker.handle(ended("pruned", None, "rung 8", job="trial-0000"))
    tracker.end_search()
    tracker.close()
    (item,) = load_search(settings, "demo").records
    client = MlflowClient(locate(settings).uri)
    history = client.get_metric_history(item.run_id, "cost/device_seconds")
    costs = sorted((point.step, point.value) for point in history)
    assert costs == [*((step, float(step)) for step in range(1, 9)), (8, 8.5)]
    assert item.device_seconds == 8.5


def test_steps_that_another_host_repeated_are_not_sent_twice(
    settings: TrackingSettings, tmp_path: Path
) -> None:
    """They share the store and no disk."""
    one, two = (replace(settings, root=tmp_path / name) for name in ("one", "two"))
    killed = begin(replace(one, flush_seconds=3600.0))
    train(killed, 0, 3)
    killed.flush()
    for step in range(4, 9):
        killed.handle(JobProgress("trial-0000", step, 3.0 / step, 1.0, 1e-4, 100 * step, 1.0 * step, 200.0))
    crash(killed)
    tracker = begin(two)
    train(tracker, 0)
    end(tracker, 0, STEPS)
    tracker.end_search()
    tracker.close()
    assert left_unsent(one, "demo") != []
    assert send_left(one, "demo") == []
    assert left_unsent(one, "demo") == []
    (item,) = load_search(one, "demo").records
    losses = MlflowClient(locate(one).uri).get_metric_history(item.run_id, "train/loss")
    assert [point.step for point in losses] == list(range(1, STEPS + 1))


def test_a_job_resumed_on_another_host_is_running_and_has_its_last_figures(
    settings: TrackingSettings, tmp_path: Path
) -> None:
    """Nothing of the event log is there, and the job's last step is trained a second time."""
    one, two = (replace(settings, root=tmp_path / name) for name in ("one", "two"))
    first = begin(one)
    train(first, 0)
    first.end_search(JobState.PAUSED)
    first.close()
    client = MlflowClient(locate(two).uri)
    (item,) = load_search(two, "demo").records
    assert client.get_run(item.run_id).info.status == "SCHEDULED"
    second = begin(two)
    train(second, 0)
    second.flush()
    found = client.get_run(item.run_id)
    assert (found.info.status, found.data.tags["plait.state"]) == ("RUNNING", "running")
    end(second, 0, STEPS + 5.0)
    second.end_search()
    second.close()
    assert client.get_run(item.run_id).info.status == "FINISHED"
    history = client.get_metric_history(item.run_id, "cost/device_seconds")
    assert sorted(point.value for point in history if point.step == STEPS) == [STEPS, STEPS + 5.0]


def test_leaderboards_take_room_in_the_event_log_as_jobs_do(
    settings: TrackingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.tracking.search_run.REFRESH_SECONDS", 0.0)
    monkeypatch.setattr("plait.tracking.search_run.REFRESH_SHARE", 1e9)
    tracker = begin(replace(settings, flush_seconds=3600.0))
    folder = logs_folder(settings.root, "demo")
    sizes = []
    for trial in range(20):
        train(tracker, trial, 1)
        end(tracker, trial, 1.0)
        sizes.append(sum(path.stat().st_size for path in folder.glob("*.jsonl")))
    growth = [after - before for before, after in pairwise(sizes)]
    assert max(growth) - min(growth) < 100  # digits
    crash(tracker)
    assert send_left(settings, "demo") == []
    client, run_id = MlflowClient(locate(settings).uri), load_search(settings, "demo").run_id
    table = json.loads(Path(client.download_artifacts(run_id, "leaderboard.json")).read_text())
    assert len(table["data"]) == 20
