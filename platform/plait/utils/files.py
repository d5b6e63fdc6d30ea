"""Atomic writes of files and folders: written under a temporary name, synced to the disk, then renamed.

They raise OSError, which :func:`disk_errors` turns into a message.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

from plait.core.errors import StorageError

OWNER_ONLY = 0o600  # readable by its owner only


@contextmanager
def disk_errors(path: Path | str, rule: str, remedy: str = "") -> Iterator[None]:
    """Turn an OSError of the code inside into a StorageError about ``path``, with this rule and remedy."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}", rule, remedy) from error


def check_writable(folder: Path, value: str, rule: str, remedy: str, *, make: bool = False) -> Path:
    """Check that a file can be written into a folder.

    Args:
        value, rule, remedy: of the error; the system's reason follows ``value``.
        make: make the folder if it is not there; otherwise check the nearest folder above it that is.

    Returns:
        The folder that was checked.

    Raises:
        StorageError: it cannot be made or written, or its disk is full.
    """
    with disk_errors(value, rule, remedy):
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        there = next(each for each in (folder, *folder.parents) if each.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"plait")
    return there


def to_disk(path: Path) -> None:
    """Sync a file, or the entries of a folder, to the disk.

    Raises:
        OSError: the system cannot.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_file(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that replaces ``path`` when the context ends. If the context ends with an error, the new
    file is removed and ``path`` is unchanged.

    Args:
        path: its folder is made if it is missing.
        mode: permissions, less the process's umask.
        durable: whether it must survive a power failure; it survives the process's death in any case.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _beside(path)
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(handle)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    if durable:
        to_disk(path.parent)


def write_text(path: Path, text: str, *, mode: int = 0o666, durable: bool = True) -> None:
    """Write a text as :func:`new_file` does, in UTF-8."""
    with new_file(path, mode=mode, durable=durable) as file:
        file.write(text.encode())


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file that several processes extend. A partial line that a crash left spoils no other.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" + line if torn else line)  # in one call, so that lines of two processes do not mix


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder to fill, which replaces ``path`` and is synced to the disk when the context ends.

    An older folder is renamed first and removed afterwards, so a kill in between leaves one of the two on the
    disk. If the context ends with an error, the new folder is removed. Its files may be read and written by
    those who may read and write new folders, by the process's umask.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, older = _beside(path), _beside(path)
    try:
        draft.mkdir()
        yield draft
        for each in (*draft.rglob("*"), draft):
            if each.is_file():  # safetensors makes files that no other user can read
                each.chmod(draft.stat().st_mode & 0o666)
            to_disk(each)
        with suppress(FileNotFoundError):
            path.rename(older)
        draft.rename(path)
        to_disk(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(older, ignore_errors=True)


def _beside(path: Path) -> Path:
    """A hidden name in the same folder, unique to this attempt."""
    return path.with_name(f".{path.name}.{uuid4().hex[:12]}")


def keep_newest(folder: Path, most: int, spare: float) -> None:
    """Remove the oldest folders in a folder, so that at most ``most`` are left, and those that were changed
    within the last ``spare`` seconds."""
    ages = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process has just removed it
            if path.is_dir():
                ages[path] = path.stat().st_mtime
    by_age = sorted(ages, key=ages.__getitem__)
    for path in by_age[: max(0, len(by_age) - most)]:
        if ages[path] < time.time() - spare:
            shutil.rmtree(path, ignore_errors=True)
