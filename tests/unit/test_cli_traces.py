"""What `plait train` leaves in the folder of a run: nothing after bad input, and no password ever."""

from pathlib import Path

import pytest
import yaml

from plait.cli.main import main
from plait.search.results import SearchEnd
from plait.search.trials import SearchCommand, Trial


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def began(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Path:
    """The folder of a run whose job is made, and not trained."""
    folders: list[Path] = []

    def run(command: SearchCommand, _: object) -> SearchEnd:
        folders.append(command.directory)
        assert not command.directory.exists(), "nothing is written before training begins"
        command.make_job(Trial(0, {}))
        return SearchEnd(())

    monkeypatch.setattr("plait.search.start.run_training", run)
    assert main(["train", "model=tiny", *arguments]) == 0
    return folders[0]


@pytest.mark.parametrize("wrong", ["adapter.rank=0", "adapter.rank=1,2", "+nothing=1", "hydra/sweeper=basic"])
def test_bad_input_leaves_nothing(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "outputs" / "yesterday").mkdir(parents=True)
    assert main(["train", wrong]) == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["outputs", "yesterday"]


def test_a_run_has_hydras_files_in_the_usual_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = began(monkeypatch, "hydra.run.dir=here/now", "adapter.rank=3")
    assert own == tmp_path / "here" / "now"
    written = {path.stem: yaml.safe_load(path.read_text()) for path in (own / ".hydra").iterdir()}
    assert set(written) == {"config", "hydra", "overrides"}
    assert written["config"]["adapter"]["rank"] == 3
    assert "hydra" not in written["config"]
    assert written["overrides"] == ["model=tiny", "adapter.rank=3"]
    assert written["hydra"]["hydra"]["runtime"]["output_dir"] == str(own)


def test_the_folder_of_the_run_is_known_to_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    own = began(monkeypatch, "description=${hydra:runtime.output_dir}")
    assert yaml.safe_load((own / ".hydra" / "config.yaml").read_text())["description"].startswith("${hydra:")


def test_hydras_folder_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not (began(monkeypatch, "hydra.output_subdir=null") / ".hydra").exists()


def test_no_password_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began(monkeypatch, "search.storage=postgresql://me:sEcret@host/db")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if "sEcret" in path.read_text()]
