"""Reads folders saved by the library `datasets`, and data sets of the hub. Only this module imports it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plait.core.errors import ConfigError, DataError, choices
from plait.data.examples import Row, shortened
from plait.utils.spelling import did_you_mean

SPLIT = "train"  # the default split
STATE = ("state.json", "dataset_info.json")  # files that mark a saved folder of one split
SPLITS = "dataset_dict.json"  # the file that marks a folder of several splits


def is_saved(folder: Path) -> bool:
    """Whether the library saved this folder."""
    return all((folder / name).is_file() for name in STATE) or (folder / SPLITS).is_file()


def split_folder(folder: Path, split: str | None, key: str) -> Path:
    """The folder of a split in a saved folder.

    Args:
        key: the config key that chooses the split.

    Raises:
        DataError: there is no such split.
    """
    if not (folder / SPLITS).is_file():
        if split is None:
            return folder
        raise DataError(f"{key}={split!r}", f"{folder} has no splits.", f"Leave {key} out.")
    try:
        splits = [str(each) for each in json.loads((folder / SPLITS).read_text(encoding="utf-8"))["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from error
    wanted = SPLIT if split is None else split
    if wanted not in splits:
        raise DataError(
            f"{key}={wanted!r}",
            f"{folder} has no such split.",
            f"{did_you_mean(wanted, splits)}Available: {choices(splits)}.",
        )
    return folder / wanted


def files_of(folder: Path) -> list[Path]:
    """The files of a saved split.

    Raises:
        DataError: the folder is missing.
    """
    try:
        return sorted(each for each in folder.iterdir() if each.is_file())
    except OSError as error:
        raise _damaged(folder, error) from error


def read_saved(folder: Path, limit: int | None) -> Sequence[Row]:
    """The first ``limit`` rows of a saved split.

    Raises:
        ConfigError: the library is missing.
        DataError: the folder is damaged.
    """
    library = _library(f"data.path={str(folder)!r}")
    try:
        return _rows(library.load_from_disk(str(folder)), limit)
    except Exception as error:  # any of the library's, Arrow's or the system's
        raise _damaged(folder, error) from error


def read_hub(
    repository: str, *, name: str | None, revision: str | None, split: str, limit: int | None
) -> Sequence[Row]:
    """The first ``limit`` rows of a split of a data set on the hub.

    Raises:
        ConfigError: the library is missing.
        DataError: there is no such data set, or it cannot be reached.
    """
    library = _library(f"data.id={repository!r}")
    try:
        with _errors_only():
            return _rows(library.load_dataset(repository, name, split=split, revision=revision), limit)
    except Exception as error:  # any of the library's, the hub client's or the network's
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"data.id={repository!r}, data.split={split!r}: {said[0]}",
            "Plait reads this data set from the Hugging Face hub with the library `datasets`.",
            "Check data.id, data.name and data.split, the network, and HF_TOKEN if it is private. To read "
            "your own files, use data=file data.path=PATH.",
        ) from error


def _library(asked: str) -> Any:
    try:
        import datasets as library
    except ImportError as error:
        raise ConfigError(
            asked,
            "This needs the library `datasets`.",
            "Install it: pip install 'plait[data]' (or pip install datasets).",
        ) from error
    library.disable_progress_bars()
    return library


@contextmanager
def _errors_only() -> Iterator[None]:
    """Hide warnings of the hub's client about every failed attempt; the last failure is an error anyway."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _rows(dataset: Any, limit: int | None) -> Sequence[Row]:
    few = dataset if limit is None or limit >= len(dataset) else dataset.select(range(limit))
    rows: list[Row] = few.to_list()
    return rows


def _damaged(folder: Path, error: Exception) -> DataError:
    return DataError(
        f"{folder}: {shortened(str(error) or type(error).__name__)}",
        "This folder was saved by the library `datasets`, but it cannot be read.",
        "Save it again with save_to_disk, or copy it again: it may be incomplete.",
    )
