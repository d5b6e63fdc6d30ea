"""The content of one checkpoint: whole tensors under PEFT's names, independent of the layout of devices.

A checkpoint is a folder with ``checkpoint.safetensors`` (weights and both moments, float32) and
``checkpoint.json`` (job, model, data, cursor, and digests of both). It is complete or absent: it is written
under a temporary name and renamed, and read only if the digests match. It contains no random state, because
data order and dropout masks depend only on seed and step.

A seam: every worker writes and reads these files; :mod:`plait.engine.checkpoints` decides when and where,
without torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.adapters.facts import WEIGHTS
from plait.adapters.slices import AdapterSlices
from plait.adapters.variants import WHOLE
from plait.core.errors import CheckpointError, StorageError
from plait.core.jobs import JobSpec
from plait.core.messages import Cursor
from plait.engine.checkpoints import HEADER, checkpoints
from plait.utils.files import new_folder

VERSION = 3
TENSORS = "checkpoint.safetensors"
_ORDER = ("seed", "batch_size", "accumulation")  # fields of TrainSpec that determine a step's samples


class OriginError(CheckpointError):
    """The checkpoint is complete, but belongs to another adapter, data order, model or data."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a checkpoint belongs to. A job may only resume from a checkpoint of the same origin."""

    adapter: dict[str, Any]
    order: dict[str, Any]
    model: str
    data: str

    @classmethod
    def of(cls, job: JobSpec, *, model: str, data: str) -> Origin:
        """The origin of a job's checkpoints."""
        adapter = json.loads(json.dumps(asdict(job.adapter)))
        return cls(adapter, {key: getattr(job.train, key) for key in _ORDER}, model, data)


def write_checkpoint(directory: Path, origin: Origin, cursor: Cursor, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint so that ``directory`` is never partial; an older one is replaced by renaming.

    Raises:
        StorageError: the folder cannot be written.
    """
    try:
        with new_folder(directory) as folder:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
            header = {
                "version": VERSION,
                "origin": asdict(origin),
                "cursor": asdict(cursor),
                "tensors": _digest(folder / TENSORS),
            }
            sealed = header | {"sha256": _seal(header)}
            (folder / HEADER).write_text(json.dumps(sealed, indent=2, sort_keys=True))
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{directory}: {getattr(error, 'strerror', None) or error}",
            "A checkpoint must be written completely.",
            "Free some space, or set tracking.root to a writable folder.",
        ) from error


def read_checkpoint(directory: Path, origin: Origin) -> tuple[Cursor, dict[str, Tensor]]:
    """The cursor and tensors of a complete checkpoint of exactly this origin.

    Raises:
        OriginError: it is of another job, model or data.
        CheckpointError: it is missing, incomplete or altered.
    """
    try:
        header = json.loads((directory / HEADER).read_text())
        if header["version"] != VERSION:
            raise _damaged(directory, f"version {header['version']}; this release reads {VERSION}")
        seal = header.pop("sha256")
        found = Origin(**header["origin"])
        cursor = Cursor(**header["cursor"])
        for name, is_right in (
            (HEADER, seal == _seal(header)),
            (TENSORS, header["tensors"] == _digest(directory / TENSORS)),
        ):
            if not is_right:
                raise _damaged(directory, f"{name} is not as it was written")
    except OSError as error:
        raise _damaged(directory, f"{Path(error.filename or HEADER).name}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(directory, f"{HEADER} is not as it was written") from error
    if found != origin:
        raise OriginError(
            f"{directory}: {_difference(found, origin)}",
            "A checkpoint can only be resumed with the same adapter, data order, model and data.",
            "Use the same settings, or start the job from the beginning.",
        )
    return cursor, load_file(directory / TENSORS)


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint that was found, and what was wrong with newer ones.

    If there is none, ``directory`` is None and there are no tensors, and the job starts from scratch.
    """

    directory: Path | None
    cursor: Cursor
    tensors: Mapping[str, Tensor]
    troubles: tuple[str, ...]


def newest_checkpoint(path: Path | None, origin: Origin) -> Found:
    """The newest complete checkpoint at a path, which is a checkpoint or a folder of them.

    Raises:
        OriginError: a checkpoint is complete, but of another job, model or data.
    """
    troubles: list[str] = []
    for directory in checkpoints(path) if path is not None else ():
        try:
            cursor, tensors = read_checkpoint(directory, origin)
        except OriginError:
            raise
        except CheckpointError as error:
            troubles.append(error.value)
        else:
            return Found(directory, cursor, tensors, tuple(troubles))
    return Found(None, Cursor(), {}, tuple(troubles))


def warm_start(path: Path, weights: Mapping[str, Tensor], slices: AdapterSlices = WHOLE) -> None:
    """Fill an adapter's weights from a saved adapter or checkpoint.

    Args:
        weights: the adapter's weights by PEFT's names, to be filled in place.
        slices: what they are of the whole ones.

    Raises:
        CheckpointError: it cannot be read, or its adapter has other modules or another rank.
    """
    file = next((path / name for name in (WEIGHTS, TENSORS) if (path / name).exists()), path / WEIGHTS)
    try:
        found = {name: slices.own(name, whole) for name, whole in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file}: {error}", "A warm start needs the weights of a saved adapter."
        ) from error
    for name, tensor in weights.items():
        if name not in found or found[name].shape != tensor.shape:
            raise CheckpointError(
                f"{file}: {name} is missing, or its shape is not {tuple(tensor.shape)}",
                "A warm start needs the same rank and the same target modules.",
            )
    for name, tensor in weights.items():
        tensor.copy_(found[name])


def _seal(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _damaged(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{directory}: {what}",
        "A checkpoint must be complete and unaltered.",
        "Use an earlier checkpoint, or start the job from the beginning.",
    )


def _difference(found: Origin, wanted: Origin) -> str:
    theirs, ours = asdict(found), asdict(wanted)
    keys = [key for key in ours if theirs[key] != ours[key]]
    return "; ".join(f"{key} was {theirs[key]}, is {ours[key]}" for key in keys)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
