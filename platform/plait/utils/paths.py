"""The locations of Plait's own files: configuration, named searches (checkout or wheel), and the cache."""

from __future__ import annotations

import errno
import os
import shlex
from argparse import ArgumentTypeError
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from plait.core.errors import SearchError, StorageError, choices
from plait.core.settings import TrackingSettings
from plait.utils.counts import listed
from plait.utils.spelling import did_you_mean

PACKAGE = Path(__file__).resolve().parents[1]
LONGEST_NAME = 255  # bytes of a file's name in common file systems
MOST_NAMES = 20  # of searches listed in an error


def user_path(path: str | Path) -> Path:
    """A path given by the user, with ``~`` expanded. Every such path passes through here.

    Raises:
        StorageError: an unknown user, no home folder, a name that is too long, or a loop of links.
    """
    try:
        found = Path(path).expanduser()
        found.stat()
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            return found  # missing or not readable: the caller reports it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StorageError(f"{path}: {reason}", "No such file or folder can exist.") from error
    return found


def as_path(text: str) -> Path:
    """The path that an argument of the command line gives; an address, which may hold a password, is none.

    Raises:
        ArgumentTypeError: it is an address, or no file can have this name.
    """
    if "://" in text:
        raise ArgumentTypeError("it must be a path, not an address")
    try:
        return user_path(text)
    except StorageError as error:
        raise ArgumentTypeError(error.value) from error


def _shipped(name: str) -> Path:
    """The folder ``name``: next to the package in a wheel, at the repository's root in a checkout."""
    beside = PACKAGE / name
    return beside if beside.is_dir() else PACKAGE.parents[1] / name


def conf_dir() -> Path:
    """Hydra's config tree."""
    return _shipped("conf")


def sweeps_dir() -> Path:
    """The folder of named searches and benchmarks."""
    return _shipped("sweeps")


def cache_dir() -> Path:
    """The folder of converted models and tokenised data: ``PLAIT_CACHE``, else ``plait`` in the user's cache
    folder."""
    if chosen := os.environ.get("PLAIT_CACHE"):
        return user_path(chosen).absolute()
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").absolute() / "plait"


def search_folder(root: Path, name: str) -> Path:
    """The folder in which the search ``name`` keeps its files, below ``tracking.root``."""
    return user_path(root).absolute() / "searches" / file_name(name)


def file_name(name: str) -> str:
    """The name of a search as a file name: characters that a file system would read as a path become %XX.

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
    """The names of the searches that have a folder below ``tracking.root``, sorted."""
    folder = user_path(root).absolute() / "searches"
    return sorted(unquote(path.name) for path in folder.glob("*") if path.is_dir())


def begun_name(name: str, names: Iterable[str]) -> str:
    """Which of ``names`` is meant by ``name``: itself, or the only one that begins so; if none, ``name``."""
    there = set(names)
    begun = [each for each in there if name and each.startswith(name)]
    return begun[0] if name not in there and len(begun) == 1 else name


def command_on(root: Path, verb: str, *words: str) -> str:
    """A command of Plait's on the searches in ``root``, from the present folder."""
    own = [] if root == TrackingSettings().root else [f"tracking.root={root}"]
    return shlex.join(["plait", verb, *words, *own])


def no_such_search(name: str, where: object, there: Sequence[str]) -> SearchError:
    """The error for a name that none of the searches ``there`` has; ``where``: in which folder or store."""
    begun = [each for each in there if each.startswith(name)]
    meant = f"Several names begin with it: {choices(begun)}. " if begun[1:] else did_you_mean(name, there)
    return SearchError(
        f"search {name!r} is not in {where}",
        f"{meant}Available: {listed(there, MOST_NAMES) or 'none'}.",
        "Are its runs in another folder? Add tracking.root=FOLDER.",
    )
