"""The command that a search keeps, and `plait resume` by name."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from plait.cli.main import main
from plait.cli.resume import main as resume
from plait.core.errors import ConfigError, SearchError, StorageError
from plait.core.settings import TrackingSettings
from plait.search.launch import another_host, another_store
from plait.search.recorded import (
    FILE,
    RecordedCommand,
    known_command,
    quoted,
    recorded_command,
    recorded_commands,
    write_command,
)
from plait.tracking.location import store_elsewhere
from plait.utils.paths import search_folder

ARGUMENTS = ("adapter.rank=1,2", "search.fresh=true", "search.trials=4", "+train.seed=3")


def kept(root: Path, name: str, **more: object) -> RecordedCommand:
    command = RecordedCommand(name, "sweep", ARGUMENTS, str(root), **more)  # type: ignore[arg-type]
    write_command(search_folder(root, name), command)
    return command


def test_a_recorded_command_is_found_and_private(tmp_path: Path) -> None:
    command = kept(tmp_path, "a/b")
    assert recorded_command(tmp_path, "a/b") == command
    assert recorded_commands(tmp_path) == [command]
    mode = (search_folder(tmp_path, "a/b") / FILE).stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


def test_resuming_keeps_the_name_and_does_not_restart(tmp_path: Path) -> None:
    command = kept(tmp_path, "it's")
    assert command.words() == [
        "sweep", "adapter.rank=1,2", "search.trials=4", "+train.seed=3", "search.name='it\\'s'",
    ]  # fmt: skip
    assert command.words(["search.trials=9", "engine.threads=1"])[1:5] == [
        "adapter.rank=1,2", "+train.seed=3", "search.trials=9", "engine.threads=1",
    ]  # fmt: skip


def test_going_on_is_in_the_same_store(tmp_path: Path) -> None:
    """Wherever its address came from; what is given now goes before."""
    command = kept(tmp_path, "one", store="http://host:5000")
    assert recorded_command(tmp_path, "one") == command
    assert command.words()[-2:] == ["tracking.uri='http://host:5000'", "search.name=one"]
    elsewhere = command.words(["tracking.uri=http://other:1"])
    assert [word for word in elsewhere if "tracking.uri" in word] == ["tracking.uri=http://other:1"]
    assert not any("tracking.uri" in word for word in kept(tmp_path, "two").words())


def test_another_store_than_before_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracking = TrackingSettings(root=tmp_path)
    assert store_elsewhere(tracking) is None
    assert store_elsewhere(TrackingSettings(uri=f"sqlite:///{tmp_path}/mlflow.db", root=tmp_path)) is None
    here, there = kept(tmp_path, "one"), kept(tmp_path, "two", store="http://me:secret@host:5000")
    assert another_store(here, tracking) == []
    (line,) = another_store(there, tracking)
    assert line.startswith("This search has been recorded in http://me:***@host:5000 so far")
    assert f"in sqlite:///{tmp_path}/mlflow.db" in line
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@host:5000")
    assert another_store(there, tracking) == []
    assert len(another_store(here, tracking)) == 1


def test_a_host_that_records_apart_from_the_others_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    own, server = TrackingSettings(root=tmp_path), "http://me:***@host:5000"
    there = TrackingSettings(uri="http://me:secret@host:5000", root=tmp_path)
    assert another_host("", own) == another_host("", there) == another_host(server, there) == []
    (line,) = another_host(server, own)
    assert f"in {server} by" in line
    assert f"in sqlite:///{tmp_path}/mlflow.db." in line
    assert another_host("sqlite:////runs/mlflow.db", there)
    assert another_host(f"sqlite:///{tmp_path}/mlflow.db", own)  # the same path on another host


@pytest.mark.parametrize("text", ["search-29ab21fb8b7a", "/home/me/plait-runs", "runs/a_b.c"])
def test_a_plain_name_needs_no_quotes(text: str) -> None:
    assert quoted(text) == text
    assert OverridesParser.create().parse_override(f"search.name={text}").value() == text


@example("null")
@example("True")
@example("-inf")
@example("nan")
@example("e5")
@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1))
def test_any_text_is_a_value_that_hydra_reads_back(text: str) -> None:
    override = OverridesParser.create().parse_override(f"search.name={quoted(text)}")
    value = override.value()
    assert getattr(value, "text", value) == text


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20))
def test_every_name_has_a_folder_of_its_own_below_the_root(name: str) -> None:
    folder = search_folder(Path("/root-of-all"), name)
    assert folder.parent == Path("/root-of-all/searches")
    assert folder.name not in ("", ".", "..")
    assert (folder == search_folder(Path("/root-of-all"), "mine")) == (name == "mine")


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    kept(tmp_path, "one")
    kept(tmp_path, "two", finished=True)
    with pytest.raises(SearchError) as caught:
        known_command(tmp_path, "three")
    assert caught.value.value == f"search 'three' is not in {tmp_path}"
    assert caught.value.rule == "Available: one, two."
    assert known_command(tmp_path, "tw").name == "two"  # by its beginning
    with pytest.raises(SearchError, match=r"Available: none\."):
        known_command(tmp_path / "empty", "three")


@pytest.mark.parametrize("content", ['{"name": "one"', "[]", '{"name": "one", "arguments": 3}', ""])
def test_a_damaged_file_is_named_and_hides_no_other(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plait sweep` writes it again, so to that it is as if it were not there."""
    kept(tmp_path, "one")
    other = kept(tmp_path, "two")
    file = search_folder(tmp_path, "one") / FILE
    file.write_text(content)
    assert recorded_command(tmp_path, "one") is None
    assert recorded_commands(tmp_path) == [other]
    for name in ("one", "on"):
        with pytest.raises(StorageError) as caught:
            known_command(tmp_path, name)
        assert caught.value.value == f"{file}: the file is damaged"
        assert "`plait sweep`" in caught.value.remedy
    with pytest.raises(SearchError) as unknown:
        known_command(tmp_path, "three")
    assert unknown.value.rule == "Available: one, two."
    assert resume(["--root", str(tmp_path)]) == 0
    assert f"Cannot be read: {file}" in capsys.readouterr().out


def test_resume_without_a_name_lists_the_unfinished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume([f"tracking.root={tmp_path}"]) == 0
    assert "There are no unfinished searches in" in capsys.readouterr().out
    kept(tmp_path, "one")
    kept(tmp_path, "two", finished=True)
    assert resume(["--root", str(tmp_path)]) == 0  # as other commands name it
    out = capsys.readouterr().out
    assert out.startswith("one\t0 adapters trained\tplait sweep adapter.rank=1,2")
    assert "two" not in out
    with pytest.raises(SystemExit):
        resume(["--help"])
    assert "lists the searches that can be resumed" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="name of one search"):
        resume(["one", "two"])


def test_resume_runs_the_kept_command_where_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[list[str], Path]] = []

    def record(words: list[str]) -> int:
        seen.append((words, Path.cwd()))
        return 130

    (tmp_path / "there").mkdir()
    root = tmp_path / "there" / "runs"
    write_command(search_folder(root, "one"), RecordedCommand("one", "train", (), str(tmp_path / "there")))
    write_command(search_folder(root, "two"), RecordedCommand("two", "sweep", (), str(tmp_path / "gone")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("plait.cli.main.main", record)
    assert resume(["one", "tracking.root=there/runs", "engine.threads=1"]) == 130
    assert resume(["two", "--root=there/runs"]) == 130
    assert seen == [
        (["train", f"tracking.root={root}", "engine.threads=1", "search.name=one"], tmp_path / "there"),
        (["sweep", "tracking.root=there/runs", "search.name=two"], tmp_path),
    ]
    assert "no longer exists" in capsys.readouterr().out

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")  # it was begun without
    assert resume(["one", "tracking.root=there/runs"]) == 130
    assert seen[-1][0][1:3] == [f"tracking.root={root}", f"tracking.uri='sqlite:///{root}/mlflow.db'"]
    assert resume(["one", "tracking.root=there/runs", "tracking.uri=http://other:1"]) == 130
    assert seen[-1][0][1:] == [f"tracking.root={root}", "tracking.uri=http://other:1", "search.name=one"]


def test_resume_names_the_folder_of_the_runs_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it prints for later names it, too: only where a short name is right, and not the usual one."""
    seen: list[str] = []
    monkeypatch.setattr("plait.cli.main.main", lambda words: seen.extend(words) or 130)
    monkeypatch.chdir(tmp_path)
    for folder in ("plait-runs", "my runs"):
        recorded = RecordedCommand("one", "sweep", ("tracking.root=elsewhere",), str(tmp_path))
        write_command(search_folder(tmp_path / folder, "one"), recorded)
    assert resume(["one"]) == 130
    assert seen == ["sweep", "tracking.root=plait-runs", "search.name=one"]
    seen.clear()
    assert resume(["one", "tracking.root='my runs'"]) == 130
    assert seen == ["sweep", "tracking.root='my runs'", "search.name=one"]


def test_the_command_of_another_user_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path, "one")
    monkeypatch.setattr("os.geteuid", lambda: (search_folder(tmp_path, "one") / FILE).stat().st_uid + 1)
    monkeypatch.setattr("plait.cli.main.main", lambda _: pytest.fail("it was run"))
    with pytest.raises(ConfigError, match="belongs to another user") as caught:
        resume(["one", f"tracking.root={tmp_path}"])
    assert "run it yourself: plait sweep adapter.rank=1,2" in caught.value.remedy


def test_the_command_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kept(tmp_path / "plait-runs", "mine")
    assert main(["resume", "yours"]) == 2
    assert "plait-runs\n  Available: mine." in capsys.readouterr().err
