"""Paths that a user gives, and the keys that other libraries call otherwise."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from plait.cli.main import main
from plait.config.build import JOB_SPECS, RUN_GROUPS
from plait.config.fields import ELSEWHERE
from plait.core.errors import StorageError
from plait.utils.paths import begun_name, cache_dir, conf_dir, search_folder, user_path
from plait.utils.spelling import did_you_mean


def test_a_missing_or_unreadable_file_is_a_valid_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("none/at/all") == Path("none/at/all")
    assert user_path("~/runs") == tmp_path / "runs"


def test_an_argument_that_is_an_address_is_refused_without_its_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in (
        ["forget", "x", "--root"],
        ["report", "--output"],
        ["export", "--to"],
        ["control", "--root"],
    ):
        assert main([*arguments, "mssql://u:secret@h/x"]) == 2
        said = capsys.readouterr().err
        assert "must be a path" in said
        assert "secret" not in said


def test_what_an_option_cannot_take_is_refused_without_its_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in (
        ["control", "x", "status", "--wait", "soon"],
        ["control", "x", "--wait"],
        ["launch", "slurm", "--partition"],
        ["export", "x", "--to", "y", "--trial"],
        ["leaderboard", "x", "y"],
        ["trace", "--nonsense"],
        ["export", "x", "--to", "a\0b"],
        ["launch", "slurm", "--to", "a\0b"],
    ):
        assert main([*arguments, "http://u:secret@h/x"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("plait: ")
        assert "  usage: plait" in said
        assert "secret" not in said


def test_text_that_cannot_be_a_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for path, said in (
        ("x" * 300, "File name too long"),
        (tmp_path / "a" / "runs", "symbolic links"),
        ("~nosuchuser/runs", "home directory"),
        ("a\0b", "null (byte|character)"),  # Python 3.11 to 3.13
    ):
        with pytest.raises(StorageError, match=said):
            user_path(path)
    with pytest.raises(StorageError, match="300 characters"):
        search_folder(tmp_path, "x" * 300)
    assert len(search_folder(tmp_path, "x" * 253).name) == 253


def test_without_a_home_folder_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "PLAIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_123_456)
    with pytest.raises(StorageError, match="home directory"):
        cache_dir()


def test_names_of_other_libraries_mean_existing_keys() -> None:
    own = {f"{group}.{each.name}" for group, spec in JOB_SPECS.items() for each in fields(spec)}
    own |= {"data.path", "data.validation_path"}
    files = (conf_dir() / "data").glob("*.yaml")
    of_data = {f"data.{key}" for file in files for key in yaml.safe_load(file.read_text("utf-8"))}
    for name, key in ELSEWHERE.items():
        assert key in own | of_data or key.partition(".")[0] in RUN_GROUPS
        assert name not in {each.rpartition(".")[2] for each in own}, "it would hide a key of Plait's own"


def test_an_endless_word_is_not_looked_up() -> None:
    assert did_you_mean("x" * 100_000, ["train.lr"]) == ""


def test_a_search_may_be_named_by_its_beginning() -> None:
    names = ("search-12ab", "search-34cd", "mine", "mine-2")
    for given, meant in (("search-1", "search-12ab"), ("mine", "mine"), ("mine-", "mine-2")):
        assert begun_name(given, names) == meant
    for given in ("search-", "yours", ""):  # several, none, all
        assert begun_name(given, names) == given
