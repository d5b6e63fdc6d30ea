"""The search that a command names."""

from __future__ import annotations

from pathlib import Path

from plait.core.errors import ConfigError, choices
from plait.utils.paths import search_names
from plait.utils.spelling import did_you_mean


def no_such_search(command: str, root: Path, name: str) -> ConfigError:
    """The error for a name that no search below ``root`` has; those there are, the likeliest first."""
    there = search_names(root)
    return ConfigError(
        f"{command} {name}: no search of this name below {root}",
        f"{did_you_mean(name, there)}There are: {choices(there) or 'none'}.",
        "Give the folder of its runs with --root FOLDER.",
    )
