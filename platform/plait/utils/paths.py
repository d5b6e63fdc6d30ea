"""Where Plait's own files are: configuration, named searches (checkout or wheel), and the cache."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, unquote

PACKAGE = Path(__file__).resolve().parents[1]


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
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().absolute() / "plait"


def search_folder(root: Path, name: str) -> Path:
    """Where a search keeps what it must find again: below ``tracking.root``, one folder for each name."""
    return root.expanduser().absolute() / "searches" / file_name(name)


def file_name(name: str) -> str:
    """The name of a search as that of a file: what a file system would read as a path is written as %XX."""
    quoted = quote(name, safe=" +=,@()[]{}!")
    return quoted if quoted.strip(".") else f"%2E{quoted[1:]}"


def search_names(root: Path) -> list[str]:
    """The names of the searches that have a folder below ``tracking.root``, in order."""
    folder = root.expanduser().absolute() / "searches"
    return sorted(unquote(path.name) for path in folder.glob("*") if path.is_dir())
