"""Where the saved states of jobs lie, which is the newest, and what may go. No tensor is touched here."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

HEADER = "state.json"  # written last: a folder with it is a state
PREFIX = "step-"


def state_folder(folder: Path, step: int) -> Path:
    """The state after ``step`` steps, in a job's folder of states."""
    return folder / f"{PREFIX}{step:08d}"


def states(place: Path) -> list[Path]:
    """The states of a place, newest first: the place itself, or what lies in a job's folder of states.

    They have been written, which does not say that they can still be read.
    """
    if (place / HEADER).exists():
        return [place]
    try:
        found = [path for path in place.iterdir() if _step(path) is not None]
    except OSError:  # not there, or no folder
        return []
    return sorted(found, key=lambda path: _step(path) or 0, reverse=True)


def newest_step(place: Path | None) -> int:
    """After how many steps the newest state of a place was written; 0 where there is none."""
    found = [] if place is None else states(place)
    return (_step(found[0]) or 0) if found else 0


def prune(folder: Path, keep: int, *, newest: int) -> None:
    """Remove all but ``keep`` states up to step ``newest``, and what a killed process left half written.

    A state beyond ``newest`` was passed over as damaged when the job went on from an earlier one. Nothing is
    raised: a state that cannot be removed takes room, and no more.
    """
    found = states(folder)
    beyond = [path for path in found if (_step(path) or 0) > newest]
    _remove([*beyond, *found[len(beyond) + keep :]])
    _remove(folder.glob(".*"))


def remove_states(folder: Path) -> None:
    """Remove all states of a job that is over; nothing is raised."""
    _remove([folder])


def _step(path: Path) -> int | None:
    digits = path.name.removeprefix(PREFIX)
    return int(digits) if path.name.startswith(PREFIX) and digits.isdecimal() else None


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
