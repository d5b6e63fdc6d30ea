"""The weights with which a warm clone begins: copied, since their trial may end and its states go."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from plait.core.errors import StorageError
from plait.engine.checkpoints import checkpoints
from plait.utils.files import new_folder

ADAPTER = "adapter_model.safetensors"
COPY = "warm-"


def keep_weights(places: Sequence[Path], keep: Path) -> Path | None:
    """Copy the first weights that there are.

    Args:
        places: PEFT folders or folders of states, best first.
        keep: where they are copied to; what is there already is taken as it is.

    Returns:
        ``keep``, or None where no place has weights.

    Raises:
        StorageError: they cannot be copied.
    """
    if keep.exists():
        return keep
    found = next((folder for place in places for folder in _weights(place)), None)
    if found is None:
        return None
    try:
        with new_folder(keep) as folder:
            shutil.copytree(found, folder, dirs_exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{keep}: {error.strerror or error}", "A warm clone keeps a copy of its first weights there."
        ) from error
    return keep


def copy_of(control: Path, request: str) -> Path:
    """Where the weights of a warm clone are kept, in a search's ``control/``."""
    return control / f"{COPY}{request}"


def remove_copy(control: Path, copy: Path | None) -> None:
    """Remove the weights that a trial began with, since it is over; whatever is no copy of this search stays.
    Nothing is raised."""
    if copy is not None and copy.parent == control.absolute() and copy.name.startswith(COPY):
        shutil.rmtree(copy, ignore_errors=True)


def _weights(place: Path) -> list[Path]:
    return [place] if (place / ADAPTER).exists() else checkpoints(place)
