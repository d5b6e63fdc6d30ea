"""A search over several processes: the same losses as over one, and what happens if one of them dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_models import one_phase
from processes import ForkedProcess
from trace_files import overlaps, tracks_of

from plait.cli.main import main
from plait.core.messages import RunSchedule
from plait.core.settings import ClusterSettings, EngineSettings, ModelSettings, RunSettings
from plait.cost.profile_store import Profile, ProfileKey, save_profile
from plait.cost.time import HeadTime, LayerTime, TimeModel
from plait.distributed import launch
from plait.distributed.fleet import Fleet
from plait.engine.build import free_memory
from plait.engine.devices import device_kind
from plait.models.load import inspect_model
from plait.utils.paths import cache_dir
from plait_kernels.loss import chunk_rows

SEARCH = ("adapter.rank=1,2,3", "search.sampler=grid", "search.name=mine", "adapter.dropout=0.1")


def objectives(leaderboard: Any) -> dict[str, float]:
    return {row["trial"]: row["objective"] for row in leaderboard()}


def test_two_processes_train_what_one_does(
    folder: Path, short: tuple[str, ...], leaderboard: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", *short, *SEARCH, "train.eval_every=1"]
    assert main(command) == 0
    alone = objectives(leaderboard)
    shutil.rmtree(folder / "plait-runs" / "searches")
    assert main([*command, "search.fresh=true", "cluster.processes=2"]) == 0
    assert "2 processes" in capsys.readouterr().out
    assert objectives(leaderboard) == pytest.approx(alone, rel=1e-5)
    assert len(alone) == 3
    assert main(["trace", "mine"]) == 0
    tracks = tracks_of((folder / "mine-trace.json").read_text())
    assert [overlaps(spans) for spans in tracks.values()] == [[]] * 4  # two threads of each process
    assert list((folder / "plait-runs" / "searches" / "mine" / "processes").iterdir()) == []
    with closing(sqlite3.connect(folder / "plait-runs" / "mlflow.db")) as store:
        found = {key for (key,) in store.execute("SELECT key FROM latest_metrics")}
    measured = ("busy_seconds", "waited_seconds", "tokens", "received_bytes")
    assert found >= {f"replica/{replica}/{each}" for replica in range(2) for each in measured}
    capsys.readouterr()
    assert main(["plan", *command[1:], "cluster.processes=2", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["processes"]
    trained = [
        sum(span["args"]["tokens"] for span in spans if span["cat"] == "microbatch")
        for (_, thread), spans in tracks.items()
        if thread == 1
    ]
    assert [each["tokens"] for each in planned] == trained


def store_profile(settings: RunSettings, capacity: int) -> None:
    """A profile by which a microbatch is too large for a process with the whole model, not for a stage."""
    model = inspect_model(settings.model, cache=cache_dir())
    key = ProfileKey.of(model.digest, "float32", device_kind("cpu"), settings.engine, on_cpu=True)
    room = settings.planner.memory_share * free_memory(settings)
    memory = one_phase(token=1.35 * room / capacity)
    memory = replace(memory, logit_rows=chunk_rows(model.vocabulary))  # of a loss that is not fused
    time = TimeModel(model.layer_count, {1: LayerTime(1e-3, 1e-6)}, {1: HeadTime(0.0, 1e-6)})
    names = tuple({each.name.rpartition(".")[2] for each in model.linears})
    save_profile(
        Profile(key, "tiny", memory, time, capacity, (), names, "measured", 0.0, 0.1), cache=cache_dir()
    )


def test_the_replicas_that_are_chosen_train_what_one_process_does(
    folder: Path,
    short: tuple[str, ...],
    leaderboard: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the plan and the search alike; a search that resumes keeps its own."""
    monkeypatch.setattr(launch, "start_process", ForkedProcess)
    command = ["sweep", *short, *SEARCH, "model.dtype=float32", "engine.capacity=512", "train.eval_every=1"]
    assert main(command) == 0
    alone = objectives(leaderboard)
    monkeypatch.setenv("PLAIT_CACHE", str(folder / "cache"))
    two = ClusterSettings(processes=2)
    model = ModelSettings(kind="tiny", dtype="float32")
    store_profile(RunSettings(model=model, engine=EngineSettings(threads=1), cluster=two), 512)
    auto = [*command, "search.fresh=true", "cluster.processes=2", "cluster.deployment=auto"]
    capsys.readouterr()
    assert main(["plan", *auto[1:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    whole, stages, slices, sharded = plan["candidates"]
    assert "one job needs about" in whole["why"]
    assert slices["jobs"] == sharded["jobs"] == 0
    assert (stages["replicas"], stages["why"], stages["jobs"]) == ("⟨1,2⟩ ×1", "", 3)
    assert plan["predicted_seconds"] > 3 * stages["step_seconds"] > 0
    assert [(each["pp"], each["layer_split"]) for each in plan["replicas"]] == [(2, [2, 2])]
    shutil.rmtree(folder / "plait-runs" / "searches")
    assert main(auto) == 0
    assert "⟨1,2⟩ ×1, with the fewest predicted seconds of 4 candidates" in capsys.readouterr().out
    assert objectives(leaderboard) == pytest.approx(alone, rel=1e-5)
    kept = json.loads((folder / "plait-runs" / "searches" / "mine" / "plan.json").read_text())
    assert kept["choices"]["deployment"] == "1 2 0 2 2,2"
    assert [each["pp"] for each in kept["replicas"]] == [2]


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 1 is killed before the second schedule of the run."""
    started: list[ForkedProcess] = []

    def start(*given: Any) -> ForkedProcess:
        started.append(ForkedProcess(*given))
        return started[-1]

    monkeypatch.setattr(launch, "start_process", start)
    run, runs = Fleet.execute, iter(range(100))

    def execute(fleet: Fleet, command: Any) -> Any:
        if isinstance(command, RunSchedule) and next(runs) == 1:
            os.kill(started[1].pid, signal.SIGKILL)
        return run(fleet, command)

    monkeypatch.setattr(Fleet, "execute", execute)


@pytest.mark.usefixtures("folder", "fragile")
def test_a_process_that_dies_ends_the_run_if_none_may_and_the_same_command_resumes(
    short: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", *short, *SEARCH, "cluster.processes=2", "engine.checkpoint_steps=1"]
    assert main([*command, "cluster.restarts=0"]) == 2
    said = capsys.readouterr().err
    assert "process 1" in said
    assert "died with status -9 while training" in said
    assert "same command" in said
    assert main(command) == 0
    assert "resuming 3" in capsys.readouterr().out


@pytest.mark.parametrize("stages", [1, 2])
def test_a_search_makes_up_for_a_process_that_dies(
    stages: int,
    folder: Path,
    short: tuple[str, ...],
    leaderboard: Any,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["sweep", *short, *SEARCH, "train.eval_every=1", "engine.checkpoint_steps=1"]
    assert main(command) == 0
    alone = objectives(leaderboard)
    shutil.rmtree(folder / "plait-runs" / "searches")
    request.getfixturevalue("fragile")
    processes = ["cluster.processes=2", f"cluster.pipeline={stages}"]
    assert main([*command, "search.fresh=true", *processes]) == 0
    said = capsys.readouterr().out
    assert ("2 processes as the stages of a pipeline" in said) == (stages > 1)
    assert "died with status -9 while training. Restarting with the processes that come back" in said
    assert "2 processes train again after" in said
    assert "1 restart after lost processes" in said
    assert objectives(leaderboard) == pytest.approx(alone, rel=1e-5)
