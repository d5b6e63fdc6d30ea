"""What bad input leaves behind: nothing that the run made, and everything else as it was."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from plait.cli.traces import NoteFolder, keep, without_traces
from plait.core.errors import ConfigError, PlaitError
from plait.utils.paths import conf_dir

Act = Callable[[Path], object]


def run(folder: Path, act: Act = lambda _: None, error: PlaitError | None = None) -> Path:
    """Hydra's first acts in a run: the callback, then folder, configuration and an empty log; then ``act``
    on the run's folder, and an error, by default one of bad input."""
    own = folder / "outputs" / "today" / "now"
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("config", [f"hydra.run.dir={own}"], return_hydra_config=True)
    error = error or ConfigError("wrong")
    with pytest.raises(type(error)), without_traces():
        _begin(own, config, act, error)
    return own


def _begin(own: Path, config: DictConfig, act: Act, error: PlaitError) -> None:
    NoteFolder().on_run_start(config)
    (own / ".hydra").mkdir(parents=True, exist_ok=True)
    (own / ".hydra" / "config.yaml").write_text("a: 1\n")
    (own / "plait.log").touch()
    act(own)
    raise error


def test_nothing_of_the_run_stays(tmp_path: Path) -> None:
    run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "outputs" / "yesterday").mkdir(parents=True)
    run(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["outputs", "yesterday"]


def test_a_folder_that_was_there_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "outputs" / "today" / "now").mkdir(parents=True)
    assert (run(tmp_path) / ".hydra" / "config.yaml").exists()


@pytest.mark.parametrize("name", ["optimization_results.yaml", "0/adapter.safetensors"])
def test_a_run_that_wrote_something_stays_whole(name: str, tmp_path: Path) -> None:
    def write(own: Path) -> None:
        (own / name).parent.mkdir(exist_ok=True)
        (own / name).touch()

    left = {path.name for path in run(tmp_path, write).rglob("*") if path.is_file()}
    assert left == {"config.yaml", "plait.log", Path(name).name}


def test_a_log_with_words_stays(tmp_path: Path) -> None:
    assert (run(tmp_path, lambda own: (own / "plait.log").write_text("a warning\n")) / "plait.log").exists()


def test_another_run_beside_it_stays(tmp_path: Path) -> None:
    own = run(tmp_path, lambda own: (own.parent / "later").mkdir())
    assert (own.parent / "later").is_dir()
    assert not own.exists()


def test_what_began_to_train_or_failed_otherwise_stays(tmp_path: Path) -> None:
    assert (run(tmp_path / "one", lambda _: keep()) / ".hydra").is_dir()
    assert (run(tmp_path / "two", error=PlaitError("no bad input")) / ".hydra").is_dir()
