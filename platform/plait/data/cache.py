"""Tokenised data on disk: written whole or not at all, checked when read."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np

from plait.core.errors import StorageError
from plait.core.samples import Split, TokenisedData
from plait.utils.files import new_file

_FIELDS = ("tokens", "labels", "offsets", "rows")


def content_digest(train: Split, validation: Split) -> str:
    """Digest of both splits' samples and of the rows they came from."""
    state = hashlib.sha256()
    for split in (train, validation):
        for name in _FIELDS:
            array = np.ascontiguousarray(getattr(split, name))
            state.update(f"{name}:{array.dtype.str}:{array.size};".encode())
            state.update(array.tobytes())
    return state.hexdigest()


def read_cached(path: Path) -> TokenisedData | None:
    """The data at ``path``; None where there is no file, or one that is cut short or altered."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            train, validation = (
                Split(**{name: archive[f"{part}.{name}"] for name in _FIELDS})
                for part in ("train", "validation")
            )
            digest = str(archive["digest"])
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return None
    if digest != content_digest(train, validation):
        return None
    return TokenisedData(digest, train, validation)


def write_cached(path: Path, data: TokenisedData) -> None:
    """Write ``data`` to ``path``, whole or not at all.

    Raises:
        StorageError: the folder cannot be written, or the disk is full.
    """
    arrays = {f"train.{name}": getattr(data.train, name) for name in _FIELDS}
    arrays |= {f"validation.{name}": getattr(data.validation, name) for name in _FIELDS}
    try:
        with new_file(path) as file:
            np.savez(file, digest=np.array(data.digest), **arrays)
    except OSError as error:
        raise StorageError(
            f"{path.parent}: {error.strerror}",
            "Tokenised data is kept in a cache folder.",
            "Make the folder writable, free space on its disk, or choose another folder.",
        ) from error
