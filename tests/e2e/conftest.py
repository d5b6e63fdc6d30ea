"""Whole searches on a tiny model: where they run, and how to read what they leave behind."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
import pytest
from mlflow_server import MlflowServer

from plait.cli.main import main
from plait.search import launch
from plait.search.storage import open_storage

Trials = Callable[..., list[optuna.trial.FrozenTrial]]
Leaderboard = Callable[[], list[dict[str, Any]]]
SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "take_pictures.py"
TASK = ("model=tiny", "data.task=chain_sum", "data.size=24", "data.validation=4", "train.batch_size=2")


@pytest.fixture(scope="session")
def short() -> tuple[str, ...]:
    """Overrides of a search that takes a moment."""
    return (*TASK, "train.steps=3", "engine.threads=1")


@pytest.fixture(scope="session")
def plait_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is tokenised stays for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _environment(plait_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing from outside: the cache is the tests' own, and no address comes from the environment."""
    monkeypatch.setenv("PLAIT_CACHE", str(plait_cache))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def folder(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: one for this test alone, with an empty store."""
    (tmp_path / "plait-runs").mkdir()
    shutil.copy(empty_store, tmp_path / "plait-runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def place(tmp_path: Path, empty_store: Path) -> Callable[[str], Path]:
    """Makes a folder with an empty store."""

    def make(name: str) -> Path:
        (tmp_path / name / "plait-runs").mkdir(parents=True)
        shutil.copy(empty_store, tmp_path / name / "plait-runs")
        return tmp_path / name

    return make


@pytest.fixture(scope="session")
def trials() -> Trials:
    """The trials of the only study in a storage; by default, of the searches of a folder."""

    def read(folder: Path, storage: str | None = None) -> list[optuna.trial.FrozenTrial]:
        opened = open_storage(storage, folder / "plait-runs")
        (name,) = optuna.get_all_study_names(opened)
        return optuna.load_study(study_name=name, storage=opened).get_trials()

    return read


@pytest.fixture
def leaderboard(capsys: pytest.CaptureFixture[str]) -> Leaderboard:
    """What `plait leaderboard` says of the newest search, with any further arguments."""

    def read(*arguments: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main(["leaderboard", "--format", "json", *arguments]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert isinstance(rows, list)
        return rows

    return read


@pytest.fixture
def server(new_store: Callable[[], Path]) -> Iterator[MlflowServer]:
    """A running MLflow server."""
    made = MlflowServer(new_store())
    made.start()
    yield made
    made.kill()


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the model is an error: for commands that must not get so far."""

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(launch, "build_coordinator", loaded)


@pytest.fixture(scope="session")
def finished_search(
    tmp_path_factory: pytest.TempPathFactory, plait_cache: Path, short: Sequence[str]
) -> tuple[Path, list[str]]:
    """The folder of a finished search called "mine", and its command; begun in an empty folder."""
    folder = tmp_path_factory.mktemp("finished")
    command = ["sweep", *short, "adapter.rank=1,2", "search.sampler=grid", "search.name=mine"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PLAIT_CACHE", str(plait_cache))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        assert main(command) == 0
    return folder, command


@pytest.fixture(scope="session")
def pictures() -> ModuleType:
    """The script that takes the README's pictures: the tests look at the pages through its browser."""
    pytest.importorskip("selenium", reason="selenium is not installed")
    spec = importlib.util.spec_from_file_location("take_pictures", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    missing = [str(path) for path in (module.CHROMIUM, module.DRIVER) if not path.exists()]
    if missing:
        pytest.skip(f"Debian's packages chromium and chromium-driver are not installed: {missing}")
    return module
