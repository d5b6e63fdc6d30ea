"""Files and folders that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from plait.core.errors import DataError, StorageError
from plait.utils import files
from plait.utils.files import OWNER_ONLY, disk_errors, keep_newest, new_file, new_folder, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_replaces_an_older_one_atomically(tmp_path: Path) -> None:
    path = tmp_path / "below" / "file"
    write_text(path, "old")
    with new_file(path) as file:
        file.write(b"ne")
        assert path.read_text() == "old"
        file.write(b"w")
    assert path.read_text() == "new"
    assert names(path.parent) == ["file"]


def test_a_failed_one_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(ValueError, match="half"), new_file(path) as file:
        raise ValueError(f"{file.write(b'half')} bytes, half of it")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_text(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_files_with_a_secret_are_never_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with new_file(path, mode=OWNER_ONLY):
        (draft,) = tmp_path.iterdir()
        assert stat.S_IMODE(draft.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_text(tmp_path / "open", "for all")
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) & 0o444 == 0o444 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_folder_replaces_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for text in ("old", "new"):
        with new_folder(path) as folder:
            (folder / text).write_text(text)
            assert text not in (names(path) if path.exists() else [])
    assert names(path) == ["new"]
    assert names(tmp_path) == ["folder"]


def test_files_of_a_folder_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    with new_folder(tmp_path / "folder") as folder:
        (folder / "weights").touch(mode=0o600)  # as safetensors makes them
        (folder / "text").touch()
    weights, text = (tmp_path / "folder" / "weights", tmp_path / "folder" / "text")
    assert weights.stat().st_mode == text.stat().st_mode


def test_a_failed_folder_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder"
    with new_folder(path) as folder:
        (folder / "old").touch()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"), new_folder(path) as folder:
        (folder / "new").touch()
    assert names(path) == ["old"]
    assert names(tmp_path) == ["folder"]


def test_a_folder_that_another_process_removes_meanwhile_is_none_of_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("old", "new", ".export-theirs"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / "old", (1, 1))

    def is_dir(path: Path) -> bool:
        if path.name.startswith("."):
            path.rmdir()
        return True

    monkeypatch.setattr(Path, "is_dir", is_dir)
    keep_newest(tmp_path, 1, 10.0)
    assert names(tmp_path) == ["new"]


def test_an_error_of_the_system_says_path_rule_and_remedy_and_others_pass(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught, disk_errors(tmp_path, "It is read.", "Make it readable."):
        (tmp_path / "missing").read_bytes()
    found = caught.value
    assert (found.value, found.rule) == (f"{tmp_path}: No such file or directory", "It is read.")
    assert found.remedy == "Make it readable."
    with pytest.raises(StorageError, match="key=x: torn"), disk_errors("key=x", ""):
        raise OSError("torn")  # without a number, and so without the system's words
    with pytest.raises(DataError, match="its own"), disk_errors(tmp_path, ""):
        raise DataError("its own")
