"""A disk that is full when adapters are exported, a real one: the search says so, loses nothing, and goes on
when there is room again."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from laboratory import Recorder, random_data, random_texts
from optuna.trial import TrialState
from rung_bench import Notes
from safetensors.torch import load_file
from studies import study_of

from plait.config.overrides import read_request
from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.lifecycle import JobResult
from plait.core.messages import JobProgress, Notice
from plait.core.settings import EngineSettings, RunSettings, SearchSettings
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.engine.iteration import RETRY_SECONDS
from plait.engine.local_worker import LocalWorker
from plait.models.base import BaseModel
from plait.search.run import SearchLoop
from plait.search.trials import Trial

SPACE = read_request(["adapter.rank=2,3,4,5"], {}, {}).space
SEARCH = SearchSettings(trials=4, parallel=2, sampler="grid")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a megabyte, of which a file leaves next to nothing."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    folder = tmp_path / "adapters"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        (folder / "filler").write_bytes(bytes(2**20 - 3 * 4096))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def said(notes: Notes, words: str) -> list[str]:
    return [e.text for e in notes.events if isinstance(e, Notice) and words in e.text]


def make_job(trial: Trial) -> JobSpec:
    rank = trial.values["adapter.rank"]
    assert isinstance(rank, int)
    adapter = AdapterSpec(rank, target_modules=("q_proj", "v_proj"))
    train = TrainSpec(steps=3 + 3 * (trial.number % 2), batch_size=2)
    return JobSpec(trial.name, adapter, train, random_texts(7, 3, 12, train=8, validation=2))


def engine(model: BaseModel, folder: Path, **more: Any) -> tuple[Coordinator, Recorder]:
    torch.set_num_threads(1)
    settings = EngineSettings(kernels="reference", capacity=64)
    data = DataCatalogue(random_data)
    recorder = Recorder(LocalWorker(model, data, settings))
    run = RunSettings(engine=settings, search=SEARCH)
    return Coordinator(recorder, data, run, folder=folder, **more), recorder


def test_a_search_waits_for_room_for_its_adapters(
    tiny_model: Callable[[str], BaseModel], disk: Path, tmp_path: Path
) -> None:
    """One trial waits with its adapter, the others train; then another waits; then there is room."""
    seconds = itertools.count(0.0, RETRY_SECONDS / 8)
    made, recorder = engine(tiny_model("llama"), tmp_path, clock=lambda: next(seconds))
    storage, notes = optuna.storages.InMemoryStorage(), Notes()
    source = study_of(SPACE, SEARCH, storage)

    def make_room() -> bool:
        if len(said(notes, "could not be written")) == 2:
            (disk / "filler").unlink(missing_ok=True)
        return False

    result = SearchLoop(source, make_job, made, notes, SEARCH, stop=make_room).run()
    assert result.exit_status == 0
    trials = optuna.load_study(study_name=None, storage=storage).get_trials()
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 4
    first, second = said(notes, "could not be written")
    assert first.startswith("trial-0000: its adapter could not be written (")
    assert "No space left on device" in first
    assert second.startswith("trial-0001")
    assert len(said(notes, "has now been written")) == 2
    events = notes.events
    at = next(i for i, e in enumerate(events) if isinstance(e, Notice))
    assert any(isinstance(e, JobProgress) and e.job == "trial-0001" for e in events[at:])
    for trial in trials:
        name = f"trial-{trial.number:04d}"
        steps = [e.step for e in events if isinstance(e, JobProgress) and e.job == name]
        assert steps == list(range(1, 4 + 3 * (trial.number % 2)))
        assert sum(isinstance(e, JobResult) and e.job == name for e in events) == 1
        folder = disk / name
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == trial.params["adapter.rank"]
        weights = load_file(folder / "adapter_model.safetensors")
        for site, (a, b) in recorder.end[name].items():
            assert torch.equal(weights[f"base_model.model.{site}.lora_A.weight"], a)
            assert torch.equal(weights[f"base_model.model.{site}.lora_B.weight"], b)
    assert sorted(path.name for path in disk.iterdir()) == [f"trial-{n:04d}" for n in range(4)]
