"""`plait forget`: what goes, what stays, and who is not let go."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from held_lock import held_elsewhere
from made_up_search import make_up
from mlflow import MlflowClient
from mlflow.entities import ViewType

from plait.cli.main import main
from plait.core.settings import TrackingSettings
from plait.search.recorded import RecordedCommand, write_command
from plait.search.storage import open_storage
from plait.tracking.location import sqlite_in
from plait.tracking.results import fetched_folder
from plait.utils.paths import search_folder

Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Said:
    def say(*words: str, status: int = 0) -> str:
        capsys.readouterr()
        assert main(["forget", *words, "--root", str(tmp_path)]) == status
        shown = capsys.readouterr()
        return shown.out if status == 0 else shown.err

    return say


def runs(root: Path, view: int = ViewType.ACTIVE_ONLY) -> int:
    client = MlflowClient(sqlite_in(root))
    return len(client.search_runs([each.experiment_id for each in client.search_experiments()], "", view))


def studies(root: Path, storage: str | None) -> list[str]:
    return optuna.get_all_study_names(open_storage(storage, root))


@pytest.fixture(scope="module")
def made(new_store: Callable[[], Path]) -> Path:
    """A folder of runs with a search of two trials."""
    root = new_store()
    make_up(TrackingSettings(root=root), "mine", 2, 4)
    return root


def make(made: Path, root: Path, storage: str | None = None) -> Path:
    """A search of two trials in MLflow, its study in a journal or in SQLite; the folder of one adapter."""
    shutil.copytree(made, root, dirs_exist_ok=True)
    if storage is not None:
        optuna.create_study(study_name="mine", storage=open_storage(storage, root)).ask()
    folder = search_folder(root, "mine")
    write_command(folder, RecordedCommand("mine", "sweep", ("model=tiny",), str(root), storage=storage))
    (folder / "checkpoints" / "token").mkdir(parents=True)
    adapter = folder / "adapters" / "trial-0000"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    return adapter


@pytest.mark.parametrize("kind", ["journal", "SQLite"])
def test_a_search_that_is_forgotten_is_nowhere_but_in_mlflows_bin(
    made: Path, tmp_path: Path, said: Said, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = None if kind == "journal" else str(tmp_path / "study.db")
    adapter = make(made, tmp_path, storage)
    assert "search 'mein' is not in" in said("mein", "--yes", status=2)
    assert "Did you mean mine?" in said("mein", "--yes", status=2)
    assert "Confirm with --yes" in said("mine", status=2)  # no terminal
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: "")
    shown = said("mine")
    assert "1 exported adapter (--keep-adapters keeps them)" in shown
    assert f"its study, {'2 trials' if kind == 'journal' else '1 trial'}\n" in shown
    assert "3 MLflow runs in" in shown
    assert "Nothing was deleted." in shown
    assert (adapter.is_dir(), runs(tmp_path), studies(tmp_path, storage)) == (True, 3, ["mine"])
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    client = MlflowClient(sqlite_in(tmp_path))
    (one, *_) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    for run_id in (one.info.run_id, "of another search"):
        fetched_folder(run_id).mkdir(parents=True)
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert "mine was deleted." in said("mine", *(["--keep-adapters"] if kind == "SQLite" else []))
    assert (runs(tmp_path), runs(tmp_path, ViewType.DELETED_ONLY)) == (0, 3)
    assert [path.name for path in fetched_folder("").iterdir()] == ["of another search"]
    (experiment,) = MlflowClient(sqlite_in(tmp_path)).search_experiments(filter_string="name = 'plait'")
    assert not [key for key in experiment.tags if "sharedViewState" in key]
    assert studies(tmp_path, storage) == []
    folder = search_folder(tmp_path, "mine")
    assert [path.name for path in folder.glob("*")] == (["adapters"] if kind == "SQLite" else [])
    assert adapter.is_dir() == (kind == "SQLite")
    if kind == "SQLite":  # what is left goes as well, when it is asked for
        assert "mine was deleted." in said("mine", "--yes")
    assert not folder.exists()


def test_a_search_whose_command_is_damaged_is_not_forgotten_in_part(
    made: Path, tmp_path: Path, said: Said
) -> None:
    """Only the command says where its study and its runs are."""
    storage = str(tmp_path / "study.db")
    make(made, tmp_path, storage)
    file = search_folder(tmp_path, "mine") / "command.json"
    file.write_text("garbage")
    shown = said("mine", "--yes", status=2)
    assert f"{file}: the file is damaged" in shown
    assert "Give the `plait sweep` command again" in shown
    assert file.exists()
    assert studies(tmp_path, storage) == ["mine"]


def test_a_search_in_training_cannot_be_forgotten(tmp_path: Path, said: Said) -> None:
    folder = search_folder(tmp_path, "mine")
    taking = "from plait.search.locks import LifeLock; lock = LifeLock(path)"
    with held_elsewhere(taking, folder / "workers" / "4711-a"):
        text = said("mine", "--yes", status=2)
    assert "is being trained by process 4711" in text
    assert folder.is_dir()


def test_in_a_shared_store_only_the_searchs_own_runs_are_deleted(
    made: Path, tmp_path: Path, said: Said
) -> None:
    """Somebody else may have a search of this name there; a store that is unavailable lets nothing go."""
    make(made, tmp_path)
    here = search_folder(tmp_path, "mine")
    other = tmp_path / "other"
    store = sqlite_in(tmp_path)
    command = RecordedCommand("mine", "sweep", (), str(tmp_path), store=store)
    write_command(search_folder(other, "mine"), command)
    assert main(["forget", "mine", "--yes", "--root", str(other)]) == 0
    assert runs(tmp_path) == 3
    write_command(here, RecordedCommand("mine", "sweep", (), str(tmp_path), store="http://127.0.0.1:1"))
    assert "127.0.0.1:1" in said("mine", "--yes", status=2)
    assert studies(tmp_path, None) == ["mine"]
    assert here.is_dir()
