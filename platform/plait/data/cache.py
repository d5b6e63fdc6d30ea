"""The cache of tokenised data: one file for each combination of rows, options and tokeniser.

A seam: only this module knows the format on disk and how to tell whether a file is complete.
"""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from plait.core.samples import RowCounts, Share, Split, TokenisedData
from plait.utils.files import disk_errors, new_file

UNUSED_SECONDS = 30 * 86_400.0  # after which a file is removed
_FIELDS = ("tokens", "labels", "offsets", "rows")  # the arrays of a split


def content_digest(train: Split, validation: Split) -> str:
    """Digest of both splits' samples, of the rows they came from, and of a mixture's weights."""
    state = hashlib.sha256()
    for split in (train, validation):
        for name in _FIELDS:
            array = np.ascontiguousarray(getattr(split, name))
            state.update(f"{name}:{array.dtype.str}:{array.size};".encode())
            state.update(array.tobytes())
        if split.shares:
            state.update(repr([tuple(share) for share in split.shares]).encode())
    return state.hexdigest()


def read_cached(path: Path) -> TokenisedData | None:
    """The data at ``path``; None if there is no file, or one that is truncated or altered."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            train, validation = (_split(archive, f"{part}.") for part in ("train", "validation"))
            digest = str(archive["digest"])
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile):
        return None
    if digest != content_digest(train, validation):
        return None
    with suppress(OSError):  # it may be another user's
        os.utime(path)  # it was used just now
    return TokenisedData(digest, train, validation)


def write_cached(path: Path, data: TokenisedData) -> None:
    """Write ``data`` to ``path``, completely or not at all, and remove files beside it that were not used for
    ``UNUSED_SECONDS``.

    Raises:
        StorageError: the folder cannot be written, or the disk is full.
    """
    arrays = {f"train.{name}": array for name, array in _arrays(data.train).items()}
    arrays |= {f"validation.{name}": array for name, array in _arrays(data.validation).items()}
    rule = "Plait keeps tokenised data in a cache folder."
    remedy = "Make the folder writable, free space on its disk, or choose another folder with PLAIT_CACHE."
    with disk_errors(path.parent, rule, remedy), new_file(path) as file:
        np.savez(file, digest=np.array(data.digest), **arrays)
    for each in path.parent.glob("[0-9a-f]" * len(path.stem) + path.suffix):  # no file of the user's own
        with suppress(OSError):  # another process may have removed it
            if each.stat().st_mtime < time.time() - UNUSED_SECONDS:
                each.unlink()


def _arrays(split: Split) -> dict[str, Any]:
    arrays = {name: getattr(split, name) for name in _FIELDS}
    counts, shares = np.array(astuple(split.counts), np.int64), np.array(split.shares, np.float64)
    return arrays | {"counts": counts, "shares": shares.reshape(-1, 2)}


def _split(arrays: Mapping[str, Any], prefix: str) -> Split:
    counts = RowCounts(*(int(each) for each in arrays[f"{prefix}counts"]))
    shares = tuple(Share(int(samples), float(weight)) for samples, weight in arrays[f"{prefix}shares"])
    own = {name: arrays[f"{prefix}{name}"] for name in _FIELDS}
    return Split(**own, counts=counts, shares=shares)
