"""Where Plait's own files are: configuration, named searches (checkout or wheel), and the cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from urllib.parse import quote, unquote

from plait.core.errors import StorageError

PACKAGE = Path(__file__).resolve().parents[1]


LONGEST_NAME = 255  # bytes of a file's name in the usual file systems


def user_path(path: str | Path) -> Path:
    """A path that a user gave, ``~`` replaced: the one gate for such paths.

    Raises:
        StorageError: no such user, no home folder, a name that is too long, or links in a circle.
    """
    try:
        found = Path(path).expanduser()
        found.stat()
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            return found  # missing or not readable: the caller says so
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StorageError(f"{path}: {reason}", "There can be no such file or folder.") from error
    return found


def _shipped(name: str) -> Path:
    """The folder ``name``: beside the package in a wheel, at the repository's root in a checkout."""
    beside = PACKAGE / name
    return beside if beside.is_dir() else PACKAGE.parents[1] / name


def conf_dir() -> Path:
    """Hydra's config tree."""
    return _shipped("conf")


def sweeps_dir() -> Path:
    """Named searches and benchmarks."""
    return _shipped("sweeps")


def cache_dir() -> Path:
    """Converted models and tokenised data: ``PLAIT_CACHE``, else ``plait`` in the user's cache folder."""
    if chosen := os.environ.get("PLAIT_CACHE"):
        return user_path(chosen).absolute()
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").absolute() / "plait"


def search_folder(root: Path, name: str) -> Path:
    """Where a search keeps what it must find again: below ``tracking.root``, one folder for each name."""
    return user_path(root).absolute() / "searches" / file_name(name)


def file_name(name: str) -> str:
    """The name of a search as that of a file: what a file system would read as a path is written as %XX.

    Raises:
        StorageError: the name is too long.
    """
    quoted = quote(name, safe=" +=,@()[]{}!")
    if len(quoted) > LONGEST_NAME - 2:
        raise StorageError(
            f"the search's name has {len(name)} characters",
            f"Its folder is named after it: at most {LONGEST_NAME - 2} bytes, other letters written as %XX.",
            "Choose a shorter search.name.",
        )
    return quoted if quoted.strip(".") else f"%2E{quoted[1:]}"


def search_names(root: Path) -> list[str]:
    """The names of the searches that have a folder below ``tracking.root``, in order."""
    folder = user_path(root).absolute() / "searches"
    return sorted(unquote(path.name) for path in folder.glob("*") if path.is_dir())
