"""What MLflow holds after a search: the same on SQLite, in PostgreSQL and behind a real MLflow server."""

import base64
import http.client
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Metric, Run
from mlflow_server import MlflowServer
from safetensors.torch import save_file

from plait.core.errors import SearchError, StorageError
from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import (
    Event,
    GroupStep,
    JobAdmitted,
    JobEvaluated,
    JobGenerated,
    JobProgress,
)
from plait.core.settings import RunSettings, SearchSettings, TrackingSettings
from plait.tracking import trained
from plait.tracking.connection import open_store
from plait.tracking.facts import DataFacts, SearchFacts
from plait.tracking.location import locate
from plait.tracking.results import export, load_search, recorded_text, search_address
from plait.tracking.tracker import Tracker
from plait.tracking.writer import FIRST_DELAY

STEPS = 12


@pytest.fixture(scope="module")
def server(new_store: Callable[[], Path]) -> Iterator[str]:
    running = MlflowServer(new_store())
    running.start()
    yield running.url
    running.stop()


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a SQLite file, made by the first test that uses it."""
    return f"sqlite:///{tmp_path_factory.mktemp('sqlite') / 'mlflow.db'}"


@pytest.fixture(scope="module")
def postgresql(new_database: Callable[[], str]) -> str:
    return new_database()


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres), "server"]
)
def store(request: pytest.FixtureRequest) -> str:
    """The address of each kind of store."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def tracking(store: str, tmp_path: Path) -> TrackingSettings:
    """Settings of an empty experiment."""
    return TrackingSettings(uri=store, root=tmp_path, experiment=f"tests {tmp_path.name}")


@pytest.fixture(scope="module")
def recorded(store: str, tmp_path_factory: pytest.TempPathFactory) -> TrackingSettings:
    """Settings of an experiment with one search, for tests that only read it."""
    folder = tmp_path_factory.mktemp("recorded")
    settings = TrackingSettings(uri=store, root=folder, experiment=f"tests {folder.name}")
    whole_search(settings)
    return settings


def client(settings: TrackingSettings) -> MlflowClient:
    return MlflowClient(locate(settings).uri)


def facts(settings: TrackingSettings, name: str = "demo", *, study: str = "") -> SearchFacts:
    run = RunSettings(tracking=settings, search=SearchSettings(trials=4))
    search = SearchFacts(name, run, "adapter:\n  rank: 8\n", ("plait", "sweep", "a b"), ("train.lr=1,2",))
    return replace(search, study=study)


def job(trial: int) -> JobSpec:
    return JobSpec(f"trial-{trial:04d}", AdapterSpec(rank=2 ** (trial + 1)), TrainSpec(lr=1e-4 * (trial + 1)))


def progress(name: str, step: int, loss: float | None = None) -> JobProgress:
    shown = 3.0 / step if loss is None else loss
    return JobProgress(name, step, shown, 0.5 * step, 1e-4, 100 * step, 0.25 * step, 400.0)


def group_step(iteration: int, jobs: tuple[str, ...]) -> GroupStep:
    return GroupStep("g0", iteration, jobs, 2, 300, 0.5, 2**20, 200)


def ended(
    name: str, state: str, adapter: Path | None, reason: str = "", loss: float = 1.0, **more: Any
) -> JobResult:
    measured = (STEPS, reason, loss, 100 * STEPS, 0.25 * STEPS, 42.0, adapter)
    return JobResult(name, JobState(state), *measured, **more)


def adapter_folder(root: Path) -> Path:
    folder = root / "adapters" / "one"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 2}')
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)))
    return folder


def whole_search(settings: TrackingSettings, name: str = "demo") -> None:
    """Trials 0 and 1 finish, 2 is pruned, 3 diverges at step 5."""
    adapter = adapter_folder(settings.root / name)
    jobs = [job(trial) for trial in range(4)]
    keys = tuple(item.name for item in jobs)
    with Tracker(settings) as tracker:
        tracker.start_search(facts(settings, name))
        tracker.record("plan.json", {"groups": 1})
        for trial, item in enumerate(jobs):
            tracker.start_job(item, trial)
            tracker.handle(JobAdmitted(item, 0, STEPS, "g0"))
        for step in range(1, STEPS + 1):
            for trial, key in enumerate(keys):
                if trial < 3 or step <= 5:
                    tracker.handle(progress(key, step, float("nan") if (trial, step) == (3, 5) else None))
            tracker.handle(group_step(step, keys))
        for trial, key in enumerate(keys[:3]):
            tracker.handle(JobEvaluated(key, STEPS, 2.0 - trial * 0.5, 70))
            tracker.handle(JobGenerated(key, STEPS, 0.25))
            state, reason = ("pruned", "below the cut of rung 1") if trial == 2 else ("finished", "")
            folder, loss = None if trial == 2 else adapter, 2.0 - trial * 0.5
            tracker.handle(ended(key, state, folder, reason, loss, values=(loss,)))
        tracker.handle(ended(keys[3], "failed", None, "loss is nan", values=(float("nan"),)))


def runs_of(settings: TrackingSettings, name: str = "demo") -> tuple[Run, dict[str, Run]]:
    """The search's run and its children by name, asked of MLflow itself."""
    store = client(settings)
    experiment = store.get_experiment_by_name(settings.experiment)
    assert experiment is not None
    runs = store.search_runs([experiment.experiment_id], f"tags.`plait.search` = '{name}'")
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == 1
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id]
    assert len(children) + 1 == len(runs)
    return parents[0], {run.data.tags["plait.job"]: run for run in children}


def test_runs_say_what_they_try_and_which_data_they_use(sqlite: str, tmp_path: Path) -> None:
    settings = TrackingSettings(uri=sqlite, root=tmp_path)
    found = replace(facts(settings, "steer"), searched=("adapter.rank", "train.lr", "data"))
    with Tracker(settings) as tracker:
        tracker.start_search(found)
        tracker.use_data({job(0).data: DataFacts("rows.jsonl", 64 * "a", {"path": "/r"}, {"num_rows": 9})})
        for trial in range(2):
            tracker.start_job(job(trial), trial, "train.lr=1e-4" if trial else "")
    parent, children = runs_of(settings, "steer")
    assert [children[name].info.run_name for name in sorted(children)] == [
        "steer/0000 r2 lr1e-4 data=reasoning_gym",
        "steer/0001 r4 lr2e-4 data=reasoning_gym",
    ]
    assert [children[name].data.tags.get("plait.outside") for name in sorted(children)] == [
        None,
        "train.lr=1e-4",
    ]
    for run in (parent, *children.values()):
        (used,) = run.inputs.dataset_inputs
        assert (used.dataset.name, used.dataset.digest) == ("rows.jsonl", 36 * "a")
        assert json.loads(used.dataset.profile) == {"num_rows": 9}
        assert [(tag.key, tag.value) for tag in used.tags] == [("mlflow.data.context", "train")]
    tags = client(settings).get_experiment(parent.info.experiment_id).tags
    (view,) = (json.loads(text) for key, text in tags.items() if key.startswith("mlflow.sharedViewState."))
    assert view["searchFilter"] == f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    columns = {"metrics.`objective`", "params.`adapter.rank`", "params.`data.source`"}
    assert columns <= set(view["selectedColumns"])
    address = search_address(settings, None, "http://here")
    assert address.startswith(f"http://here/#/experiments/{parent.info.experiment_id}/runs?workflowType=")
    assert f"mlflow.sharedViewState.{address.rpartition('=')[2]}" in tags


def curve(settings: TrackingSettings, run: Run, metric: str) -> list[tuple[int, float]]:
    points: list[Metric] = client(settings).get_metric_history(run.info.run_id, metric)
    return [(point.step, point.value) for point in points]


def artifact(settings: TrackingSettings, run: Run, path: str, folder: Path) -> str:
    return Path(client(settings).download_artifacts(run.info.run_id, path, str(folder))).read_text()


class TestWholeSearch:
    def test_every_job_is_a_child_with_its_parameters_and_state(self, recorded: TrackingSettings) -> None:
        parent, children = runs_of(recorded)
        assert parent.info.status == "FINISHED"
        assert {name: run.info.status for name, run in children.items()} == {
            "trial-0000": "FINISHED",
            "trial-0001": "FINISHED",
            "trial-0002": "KILLED",
            "trial-0003": "FAILED",
        }
        tags = children["trial-0002"].data.tags
        assert (tags["plait.trial"], tags["plait.state"], tags["plait.group"]) == ("2", "pruned", "g0")
        assert tags["plait.reason"] == "below the cut of rung 1"
        assert children["trial-0003"].data.tags["plait.reason"] == "loss is nan"
        parameters = children["trial-0001"].data.params
        assert set(parameters) == set(job(1).parameters())
        assert (parameters["adapter.rank"], parameters["train.lr"]) == ("4", "0.0002")
        assert parameters["adapter.target_modules"] == '["q_proj", "k_proj", "v_proj", "o_proj"]'

    def test_curves_have_their_names_and_steps(self, recorded: TrackingSettings) -> None:
        _, children = runs_of(recorded)
        run, steps = children["trial-0000"], range(1, STEPS + 1)
        assert curve(recorded, run, "train/loss") == [(step, 3.0 / step) for step in steps]
        assert curve(recorded, run, "train/grad_norm") == [(step, 0.5 * step) for step in steps]
        assert curve(recorded, run, "train/lr") == [(step, 1e-4) for step in steps]
        assert curve(recorded, run, "train/tokens") == [(step, 100.0 * step) for step in steps]
        assert curve(recorded, run, "throughput/tokens_per_s") == [(step, 400.0) for step in steps]
        assert curve(recorded, run, "cost/device_seconds") == [(step, 0.25 * step) for step in steps]
        assert curve(recorded, run, "eval/loss") == [(STEPS, 2.0)]
        assert curve(recorded, run, "eval/accuracy") == [(STEPS, 0.25)]
        assert curve(recorded, run, "job/completion_seconds") == [(STEPS, 42.0)]
        assert curve(recorded, run, "objective") == [(STEPS, 2.0)]

    def test_nothing_that_is_not_finite_is_sent(self, recorded: TrackingSettings) -> None:
        _, children = runs_of(recorded)
        run = children["trial-0003"]
        assert [step for step, _ in curve(recorded, run, "train/loss")] == [1, 2, 3, 4]
        assert [step for step, _ in curve(recorded, run, "train/grad_norm")] == [1, 2, 3, 4, 5]
        assert run.data.tags["plait.diverged"] == "step 5: train/loss=nan"
        assert "objective" not in run.data.metrics

    def test_the_parent_has_totals_best_and_facts(self, recorded: TrackingSettings, tmp_path: Path) -> None:
        parent, _ = runs_of(recorded)
        metrics = parent.data.metrics
        assert metrics["train/tokens"] == 4 * 100 * STEPS
        assert metrics["cost/device_seconds"] == pytest.approx(4 * 0.25 * STEPS)
        assert (metrics["search/best"], metrics["search/best_trial"]) == (1.5, 1)
        assert (metrics["search/ended"], metrics["search/failed"]) == (4, 1)
        assert metrics["group/fill"] == pytest.approx(0.75)
        fills = curve(recorded, parent, "group/fill")
        assert [step for step, _ in fills] == list(range(1, STEPS + 1))
        assert parent.data.tags["mlflow.note.content"] == "Best so far: trial-0001, objective 1.5"
        assert parent.data.params["search.trials"] == "4"
        assert artifact(recorded, parent, "config.yaml", tmp_path) == "adapter:\n  rank: 8\n"
        assert json.loads(artifact(recorded, parent, "plan.json", tmp_path)) == {"groups": 1}
        assert "mlflow==" in artifact(recorded, parent, "packages.txt", tmp_path)
        board = json.loads(artifact(recorded, parent, "leaderboard.json", tmp_path))
        assert [row[:3] for row in board["data"]] == [
            [1, "finished", 1.5],
            [0, "finished", 2.0],
            [2, "pruned", 1.0],
            [3, "failed", None],
        ]
        tables = [item["path"] for item in json.loads(parent.data.tags["mlflow.loggedArtifacts"])]
        assert sorted(tables) == ["group_steps.json", "leaderboard.json"]

    def test_a_recorded_search_is_read_as_a_leaderboard_and_exported(
        self, recorded: TrackingSettings, tmp_path: Path
    ) -> None:
        result = load_search(recorded)
        assert (result.name, result.state, result.objectives[0].metric) == ("demo", "finished", "eval/loss")
        assert [item.trial for item in result.records] == [1, 0, 2, 3]
        best = result.best
        assert best is not None
        assert (best.trial, best.step, best.tokens) == (1, STEPS, 100 * STEPS)
        assert best.parameters["adapter.rank"] == 4
        record, folder = export(recorded, "demo", tmp_path / "out")
        assert (record.trial, folder) == (1, tmp_path / "out")
        assert (folder / "adapter_model.safetensors").read_bytes() == bytes(range(256))
        assert (folder / "adapter_config.json").read_text() == '{"r": 2}'
        record, folder = export(recorded, best.run_id, tmp_path / "by_id")
        assert record.trial == 1
        with pytest.raises(SearchError, match="trial-0003 \\(failed\\) has no adapter"):
            export(recorded, None, tmp_path / "none", trial=3)
        with pytest.raises(SearchError, match=r"It has 0 \(finished\), 1 \(finished\), 2 \(pruned\)"):
            export(recorded, None, tmp_path / "none", trial=9)
        with pytest.raises(StorageError, match="does not overwrite"):
            export(recorded, "demo", tmp_path / "out")
        (tmp_path / "file").write_text("x")
        with pytest.raises(StorageError, match="cannot be written there") as unwritable:
            export(recorded, "demo", tmp_path / "file" / "in" / "it")
        assert str(tmp_path / "file" / "in" / "it") in unwritable.value.value

    def test_an_adapter_that_a_disk_has_no_room_for_is_not_fetched(
        self, recorded: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200))
        with pytest.raises(StorageError, match=r"out: 200 bytes are free on its disk\nThe adapter has 264\."):
            export(recorded, "demo", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_the_run_of_a_job_means_its_search(self, recorded: TrackingSettings) -> None:
        found = load_search(recorded, "demo")
        assert load_search(recorded, found.records[0].run_id) == found

    def test_an_export_that_is_refused_leaves_no_folder(
        self, recorded: TrackingSettings, tmp_path: Path
    ) -> None:
        before = set(tmp_path.iterdir())
        with pytest.raises(SearchError, match="nosuch"):
            export(recorded, "nosuch", tmp_path / "new" / "out")
        assert set(tmp_path.iterdir()) == before

    def test_a_cache_that_cannot_be_written_is_named(
        self, recorded: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = load_search(recorded, "demo")
        assert found.best is not None
        (tmp_path / "file").touch()
        monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "file"))
        with pytest.raises(StorageError, match="name another folder for it: PLAIT_CACHE"):
            trained.adapter_folder(found, found.best, recorded)

    def test_a_damaged_adapter_in_the_cache_is_fetched_again(
        self, recorded: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = load_search(recorded, "demo")
        assert found.best is not None
        monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
        weights = trained.adapter_folder(found, found.best, recorded) / "adapter_model.safetensors"
        save_file({"a": torch.zeros(8)}, weights)
        kept = weights.read_bytes()
        trained.adapter_folder(found, found.best, recorded)
        assert weights.read_bytes() == kept  # as nothing is wrong with it
        weights.write_bytes(kept[:-1])
        trained.adapter_folder(found, found.best, recorded)
        assert weights.read_bytes() == bytes(range(256))

    def test_an_unknown_search_is_an_error_that_lists_the_others(self, tracking: TrackingSettings) -> None:
        with pytest.raises(SearchError, match="Start one with `plait sweep`"):
            load_search(tracking)
        whole_search(tracking)
        with pytest.raises(SearchError, match=r"(?s)search 'other' is not in.*Available: demo\."):
            load_search(tracking, "other")


class TestGoingOn:
    @pytest.fixture(autouse=True)
    def _patient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is checked here is what the store receives, however slow the machine is at it."""
        monkeypatch.setattr("plait.tracking.tracker.LAST_SECONDS", 60.0)

    def interrupt(self, tracking: TrackingSettings) -> None:
        """Trial 0 finishes, trial 1 is at step 7 when the process is interrupted."""
        with pytest.raises(KeyboardInterrupt):
            self.begin(tracking)

    def begin(self, tracking: TrackingSettings) -> None:
        with Tracker(tracking) as tracker:
            tracker.start_search(facts(tracking))
            for trial in range(2):
                tracker.start_job(job(trial), trial)
                tracker.handle(JobAdmitted(job(trial), 0, STEPS, "g0"))
            for step in range(1, 8):
                tracker.handle(progress("trial-0000", step))
                tracker.handle(progress("trial-0001", step))
                tracker.handle(group_step(step, ("trial-0000", "trial-0001")))
            tracker.handle(ended("trial-0000", "finished", None, values=(1.0,)))
            raise KeyboardInterrupt

    def test_an_interrupted_search_leaves_no_run_behind_that_seems_to_run(
        self, tracking: TrackingSettings
    ) -> None:
        self.interrupt(tracking)
        parent, children = runs_of(tracking)
        assert (parent.info.status, parent.data.tags["plait.state"]) == ("SCHEDULED", "paused")
        assert children["trial-0001"].info.status == "SCHEDULED"
        assert children["trial-0001"].data.tags["plait.state"] == "paused"
        assert children["trial-0000"].info.status == "FINISHED"

    def test_a_resumed_search_uses_the_same_runs_and_counts_no_step_twice(
        self, tracking: TrackingSettings
    ) -> None:
        self.interrupt(tracking)
        before, _ = runs_of(tracking)
        with Tracker(tracking) as tracker:
            assert tracker.start_search(facts(tracking)) == before.info.run_id
            assert tracker.board.jobs["trial-0000"].objective == 1.0
            resumed: list[Event] = [JobAdmitted(job(1), 5, STEPS, "g0")]
            resumed += [progress("trial-0001", step) for step in range(6, STEPS + 1)]
            tracker.start_job(job(1), 1)
            for event in resumed:
                tracker.handle(event)
            tracker.handle(group_step(1, ("trial-0001",)))
            tracker.handle(ended("trial-0001", "finished", None, values=(0.5,)))
        parent, children = runs_of(tracking)
        assert set(children) == {"trial-0000", "trial-0001"}
        assert (parent.info.status, children["trial-0001"].info.status) == ("FINISHED", "FINISHED")
        losses = curve(tracking, children["trial-0001"], "train/loss")
        assert losses == [(step, 3.0 / step) for step in range(1, STEPS + 1)]
        assert parent.data.metrics["train/tokens"] == 2 * 100 * STEPS
        assert parent.data.metrics["search/best"] == 0.5
        steps = [step for step, _ in curve(tracking, parent, "group/fill")]
        assert steps == sorted(set(steps))
        assert len(steps) == 8

    def test_two_processes_of_a_search_write_one_run_and_the_last_one_knows_all(
        self, tracking: TrackingSettings, tmp_path: Path
    ) -> None:
        first = [True]  # writes the search's own curves
        workers = [Tracker(tracking), Tracker(tracking, writes_curves=lambda: not first)]
        run_ids = {worker.start_search(facts(tracking)) for worker in workers}
        assert len(run_ids) == 1
        for trial, worker in enumerate(workers):
            name = job(trial).name
            worker.start_job(job(trial), trial)
            worker.handle(JobAdmitted(job(trial), 0, STEPS, "g0"))
            for step in range(1, STEPS + 1):
                worker.handle(progress(name, step))
            worker.handle(ended(name, "finished", None, values=(2.0 - trial,)))
        for worker in workers:
            worker.end_search()
            worker.close()
            first.clear()
        parent, children = runs_of(tracking)
        assert set(children) == {"trial-0000", "trial-0001"}
        for child in children.values():
            losses = curve(tracking, child, "train/loss")
            assert losses == [(step, 3.0 / step) for step in range(1, STEPS + 1)]
        board = json.loads(artifact(tracking, parent, "leaderboard.json", tmp_path))
        assert [row[:3] for row in board["data"]] == [[1, "finished", 1.0], [0, "finished", 2.0]]
        assert parent.data.metrics["train/tokens"] == 2 * 100 * STEPS

    def test_a_fresh_search_of_the_same_name_starts_again(self, tracking: TrackingSettings) -> None:
        self.interrupt(tracking)
        with Tracker(tracking) as tracker:
            first = load_search(tracking).run_id
            assert tracker.start_search(facts(tracking, study="again")) != first
            tracker.start_job(job(0), 0)
        result = load_search(tracking, "demo")
        assert result.run_id != first
        assert [item.trial for item in result.records] == [0]

    def test_a_deleted_run_is_reported_and_the_others_are_written(self, tracking: TrackingSettings) -> None:
        tracker = Tracker(tracking)
        tracker.start_search(facts(tracking))
        for trial in range(2):
            tracker.start_job(job(trial), trial)
        tracker.flush()
        _, children = runs_of(tracking)
        client(tracking).delete_run(children["trial-0000"].info.run_id)
        for name in ("trial-0000", "trial-0001"):
            tracker.handle(progress(name, 1))
        tracker.close()
        (told,) = tracker.notices
        assert "refused; the first: trial-0000" in told
        assert curve(tracking, children["trial-0001"], "train/loss") == [(1, 3.0)]


def test_a_clock_that_is_set_back_makes_no_time_negative(sqlite: str, tmp_path: Path) -> None:
    """By a day between two steps, and by another before the search continues."""
    tracking = TrackingSettings(uri=sqlite, root=tmp_path, experiment="clocks")
    wall, rising = 2_000_000_000.0, 10.0

    def process(first: int, last: int) -> None:
        nonlocal wall, rising
        with Tracker(tracking, clock=lambda: wall, rising=lambda: rising) as tracker:
            tracker.start_search(facts(tracking))
            tracker.start_job(job(0), 0)
            tracker.handle(JobAdmitted(job(0), first - 1, STEPS, "g0"))
            for step in range(first, last + 1):
                wall, rising = wall - (86_400.0 if step == first else 0.0), rising + 10.0
                tracker.handle(progress("trial-0000", step))
                tracker.handle(group_step(step, ("trial-0000",)))
            if last == STEPS:
                tracker.handle(ended("trial-0000", "finished", None, values=(1.0,)))

    process(1, STEPS // 2)
    process(STEPS // 2 + 1, STEPS)
    parent, children = runs_of(tracking)
    for run in (parent, *children.values()):
        assert run.info.end_time >= run.info.start_time
    seconds = [value for _, value in sorted(curve(tracking, parent, "search/seconds"))]
    assert seconds == sorted(seconds)
    assert seconds[-1] == 10.0 * STEPS
    steps = sorted(step for step, _ in curve(tracking, children["trial-0000"], "train/loss"))
    assert steps == list(range(1, STEPS + 1))


def test_a_vanished_adapter_folder_is_reported(tmp_path: Path, new_store: Callable[[], Path]) -> None:
    settings = TrackingSettings(root=new_store())
    tracker = Tracker(settings)
    tracker.start_search(facts(settings))
    tracker.start_job(job(0), 0)
    tracker.handle(ended("trial-0000", "finished", tmp_path / "gone"))
    tracker.close()
    (told,) = tracker.notices
    assert "gone does not exist, so it cannot be kept as adapter" in told


def test_what_a_moved_folder_lacks_is_explained(tmp_path: Path, new_store: Callable[[], Path]) -> None:
    settings = TrackingSettings(root=new_store())
    with Tracker(settings) as tracker:
        tracker.start_search(facts(settings))
        tracker.start_job(job(0), 0)
        tracker.handle(ended("trial-0000", "finished", adapter_folder(tmp_path)))
    shutil.move(settings.root, tmp_path / "new")
    moved = TrackingSettings(root=tmp_path / "new")
    with pytest.raises(StorageError, match="moved or copied from"):
        export(moved, "demo", tmp_path / "out", trial=0)
    with pytest.raises(StorageError, match="moved or copied from"):
        recorded_text(load_search(moved, "demo"), moved, "config.yaml")
    said: list[str] = []
    assert search_address(moved, "demo", "http://here", said.append).startswith("http://here/#/")
    (words,) = said
    assert "moved or copied from" in words
    assert "ln -s" in words


@pytest.mark.slow
def test_a_server_that_restarts_during_a_search_misses_nothing(
    tmp_path: Path, new_store: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.tracking.writer.FIRST_DELAY", FIRST_DELAY / 10)
    server = MlflowServer(new_store())
    server.start()
    settings = TrackingSettings(uri=server.url, root=tmp_path, experiment="tests", flush_seconds=0.05)
    tracker = Tracker(settings)
    tracker.start_search(facts(settings))
    tracker.start_job(job(0), 0)
    tracker.handle(progress("trial-0000", 1))
    tracker.flush()
    server.stop()
    for step in range(2, STEPS + 1):
        tracker.handle(progress("trial-0000", step))
    tracker.start_job(job(1), 1)
    tracker.handle(progress("trial-0001", 1))
    with pytest.raises(StorageError, match="have not been sent to"):
        tracker.flush()
    server.start()
    try:
        tracker.end_search()
        tracker.close()
        assert tracker.notices == []
        _, children = runs_of(settings)
        losses = curve(settings, children["trial-0000"], "train/loss")
        assert losses == [(step, 3.0 / step) for step in range(1, STEPS + 1)]
        assert curve(settings, children["trial-0001"], "train/loss") == [(1, 3.0)]
    finally:
        server.stop()


class LoginProxy(BaseHTTPRequestHandler):
    """Hands requests on to a server, those with the right user name and password alone."""

    server_port: ClassVar[int]
    wanted: ClassVar[str]

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != self.wanted:
            self.send_error(401)
            return
        asked = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=60)
        kept = {key: value for key, value in self.headers.items() if key not in ("Host", "Authorization")}
        asked.request(self.command, self.path, body, kept)
        answer = asked.getresponse()
        text = answer.read()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_wants_a_password_gets_it_from_the_address(server: str, tmp_path: Path) -> None:
    """Runs, curves and artifacts; the password is neither shown nor recorded."""
    login = base64.b64encode(b"me:p@ss/word").decode()
    LoginProxy.server_port, LoginProxy.wanted = int(server.rpartition(":")[2]), f"Basic {login}"
    with ThreadingHTTPServer(("127.0.0.1", 0), LoginProxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{proxy.server_port}"
        settings = TrackingSettings(
            uri=f"http://me:p%40ss%2Fword@{address}", root=tmp_path, experiment=f"tests {tmp_path.name}"
        )
        whole_search(settings)
        found = load_search(settings, "demo")
        record, folder = export(settings, "demo", tmp_path / "exported", trial=0)
        with pytest.raises(StorageError):
            load_search(replace(settings, uri=f"http://me:wrong@{address}"), "demo")
        proxy.shutdown()
    assert sorted(item.state for item in found.records) == ["failed", "finished", "finished", "pruned"]
    assert (folder / "adapter_config.json").read_text() == '{"r": 2}'
    assert str(found.location) == f"http://me:***@{address}"
    parent, children = runs_of(replace(settings, uri=server))
    assert len(curve(replace(settings, uri=server), children[record.name], "train/loss")) == STEPS
    assert parent.data.params["tracking.uri"] == f"http://me:***@{address}"


@pytest.mark.parametrize("name", ["it's", "both ' and \"", "a\\'b", "x' OR '1'='1"])
def test_a_search_is_found_by_any_name(sqlite: str, tmp_path: Path, name: str) -> None:
    settings = TrackingSettings(uri=sqlite, root=tmp_path, experiment=f"tests {tmp_path.name}")
    for each in (name, name.replace("'", "_")):
        with Tracker(settings) as tracker:
            tracker.start_search(facts(settings, each))
    assert load_search(settings, name).name == name
    with Tracker(settings) as tracker:
        assert tracker.start_search(facts(settings, name)) == load_search(settings, name).run_id
    assert len(open_store(locate(settings), settings.experiment).searches()) == 2
