"""Files and folders that are whole or absent: written beside their place, through to the disk, then renamed.

They raise OSError; the caller says in its own words what is wrong.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

PRIVATE = 0o600  # may be read by its owner alone


def to_disk(path: Path) -> None:
    """Have the system write a file, or the entries of a folder, through to the disk.

    Raises:
        OSError: it cannot.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_file(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of ``path`` when the context ends. Of one that ends with an
    error nothing stays, and what was at ``path`` is as it was.

    Args:
        path: its folder is made if it is missing.
        mode: permissions, less those that the process withholds.
        durable: whether it is to outlive a loss of power; the process's own death it outlives always.

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


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of ``path``, through to the disk, when the context ends.

    An older one is renamed first and removed afterwards: a kill in between leaves one of both on the disk. Of
    a context that ends with an error nothing stays.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, older = _beside(path), _beside(path)
    try:
        draft.mkdir()
        yield draft
        for each in (*draft.rglob("*"), draft):
            to_disk(each)
        with suppress(FileNotFoundError):
            path.rename(older)
        draft.rename(path)
        to_disk(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(older, ignore_errors=True)


def _beside(path: Path) -> Path:
    """A hidden name in the same folder, of this attempt alone."""
    return path.with_name(f".{path.name}.{uuid4().hex[:12]}")
