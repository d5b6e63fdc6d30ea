"""Saved states of jobs: whole tensors under PEFT's names, so that no layout of devices is baked in.

A state is a folder with ``state.safetensors`` (weights and both moments, float32) and ``state.json``
(job, model, data, cursor, and the digest of the tensor file). It is complete or absent: it is written
beside its place and renamed into it, and read only when the digest agrees.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.engine.messages import Cursor
from plait.errors import CheckpointError, StorageError
from plait.jobs import JobSpec

VERSION = 1
TENSORS = "state.safetensors"
HEADER = "state.json"
_ORDER = ("seed", "batch_size", "accumulation")  # of TrainSpec: what gives a step its samples


@dataclass(frozen=True, slots=True)
class Origin:
    """What a state belongs to: going on is only right with the same.

    Attributes:
        adapter: the AdapterSpec as a mapping.
        order: seed and sizes that give a step its samples.
        model: digest of the base model.
        data: digest of the data.
    """

    adapter: dict[str, Any]
    order: dict[str, Any]
    model: str
    data: str

    @classmethod
    def of(cls, job: JobSpec, *, model: str, data: str) -> Origin:
        """The origin of a job's state."""
        adapter = json.loads(json.dumps(asdict(job.adapter)))
        return cls(adapter, {key: getattr(job.train, key) for key in _ORDER}, model, data)


def write_state(directory: Path, origin: Origin, cursor: Cursor, tensors: Mapping[str, Tensor]) -> None:
    """Write a state so that ``directory`` never holds part of one; an older one is replaced by renaming.

    Raises:
        StorageError: the folder cannot be written.
    """
    beside = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, beside / TENSORS)
        header = {
            "version": VERSION,
            "origin": asdict(origin),
            "cursor": asdict(cursor),
            "sha256": _digest(beside / TENSORS),
        }
        (beside / HEADER).write_text(json.dumps(header, indent=2, sort_keys=True))
        for path in (beside / TENSORS, beside / HEADER, beside):
            _to_disk(path)
        replaced = directory.with_name(f".{directory.name}.replaced-{os.getpid()}")
        shutil.rmtree(replaced, ignore_errors=True)
        if directory.exists():  # renamed, not removed: a kill in between must leave one whole state on disk
            directory.rename(replaced)
        beside.rename(directory)
        _to_disk(directory.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise StorageError(
            f"{directory}: {error}",
            "A job's state must be written whole.",
            "Free space or give a writable folder (tracking.root).",
        ) from error


def read_state(directory: Path, origin: Origin) -> tuple[Cursor, dict[str, Tensor]]:
    """The cursor and tensors of a complete state of this very origin.

    Raises:
        CheckpointError: missing, cut short, altered, or of another job, model or data.
    """
    try:
        header = json.loads((directory / HEADER).read_text())
        found = Origin(**header["origin"])
        cursor = Cursor(**header["cursor"])
        version, expected = header["version"], header["sha256"]
        actual = _digest(directory / TENSORS)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(directory, f"{type(error).__name__}: {error}") from error
    if version != VERSION:
        raise _damaged(directory, f"version {version}; this release reads {VERSION}")
    if actual != expected:
        raise _damaged(directory, f"{TENSORS} is not what was written")
    if found != origin:
        raise CheckpointError(
            f"{directory}: {_difference(found, origin)}",
            "A job goes on only with the adapter, data order, model and data that it was saved with.",
            "Give the same settings, or start the job afresh.",
        )
    return cursor, load_file(directory / TENSORS)


def _damaged(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{directory}: {what}",
        "A saved state must be complete and unaltered.",
        "Use an earlier state, or start the job afresh.",
    )


def _difference(found: Origin, wanted: Origin) -> str:
    theirs, ours = asdict(found), asdict(wanted)
    keys = [key for key in ours if theirs[key] != ours[key]]
    return "; ".join(f"{key} was {theirs[key]}, is {ours[key]}" for key in keys)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    """Ask the system to write a file or folder through."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
