"""What bad input leaves behind: nothing that the run made, and everything else as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig

from plait.cli.main import main
from plait.core.errors import ConfigError, PlaitError

Act = Callable[[Path, Callable[[], None]], object]


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
    act: Act = lambda *_: None,
    error: PlaitError | None = None,
) -> Path:
    """Hydra begins a run and makes its folder; then ``act``, and an error, by default one of bad input."""
    folders: list[Path] = []

    def train(_config: Any, _words: Any, begin: Callable[[], None]) -> int:
        folders.append(Path(HydraConfig.get().runtime.output_dir))
        assert (folders[0] / ".hydra" / "config.yaml").exists()
        act(folders[0], begin)
        raise error or ConfigError("wrong")

    monkeypatch.setattr("plait.cli.sweeping.train", train)
    assert main(["train", *arguments]) != 0
    return folders[0]


def test_nothing_of_the_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch)
    assert not list(tmp_path.iterdir())


def test_what_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs" / "yesterday").mkdir(parents=True)
    run(monkeypatch)
    assert [path.name for path in tmp_path.rglob("*")] == ["outputs", "yesterday"]


def test_a_folder_that_the_user_chose_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = run(monkeypatch, "hydra.run.dir=here/now")
    assert own == tmp_path / "here" / "now"
    assert (own / ".hydra" / "config.yaml").exists()


@pytest.mark.parametrize("name", ["optimization_results.yaml", "0/adapter.safetensors"])
def test_a_run_that_wrote_something_stays_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(own: Path, _: object) -> None:
        (own / name).parent.mkdir(exist_ok=True)
        (own / name).touch()

    left = {path.name for path in run(monkeypatch, act=write).rglob("*") if path.is_file()}
    assert left == {"config.yaml", "hydra.yaml", "overrides.yaml", "plait.log", Path(name).name}


def test_a_log_with_words_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = run(monkeypatch, act=lambda own, _: (own / "plait.log").write_text("a warning\n"))
    assert (own / "plait.log").exists()


def test_another_run_beside_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = run(monkeypatch, act=lambda own, _: (own.parent / "later").mkdir())
    assert (own.parent / "later").is_dir()
    assert not own.exists()


def test_what_began_to_train_or_failed_otherwise_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (run(monkeypatch, act=lambda _, begin: begin()) / ".hydra").is_dir()
    assert (run(monkeypatch, error=PlaitError("no bad input")) / ".hydra").is_dir()
