"""The source "file": JSON, JSONL, CSV, TSV and Parquet files, folders of them, and folders of `datasets`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Literal

from plait.core.checks import NOT_EMPTY
from plait.core.errors import ConfigError, DataError, choices
from plait.data.datasets_library import files_of, is_saved, read_saved, split_folder
from plait.data.examples import Example, NamedFields, Row, read_example
from plait.data.formats import PARSERS, SUFFIXES
from plait.data.sources import GENERATION, SOURCES, FieldOptions, Rows, Source
from plait.utils.paths import user_path

PLACES = ("path", "validation_path", "split", "validation_split")
Format = Literal["json", "csv", "tsv", "parquet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(FieldOptions):
    """Options of files.

    Attributes:
        path: a file, a folder of files of one format, or a folder that `datasets` saved.
        format: the file's format; None: that of its name.
        split: the split to use of a folder that `datasets` saved with several; None: "train".
        validation_path: separate rows for validation; then none are split off ``path``, and ``validation``
            says how many of these to use.
        validation_split: the same, as a split of ``path``.
    """

    path: Annotated[str, NOT_EMPTY]
    format: Format | None = None
    split: str | None = None
    validation_path: str | None = None
    validation_split: str | None = None

    def __post_init__(self) -> None:
        FieldOptions.__post_init__(self)
        if self.validation_path is not None and self.validation_split is not None:
            raise ConfigError(
                f"data.validation_path={self.validation_path}, data.validation_split={self.validation_split}",
                "Both define where the validation rows come from.",
                "Leave one out.",
            )


@dataclass(frozen=True, slots=True)
class _Origin:
    """The location of rows: a path, with the config keys that name it and its split."""

    path: str
    key: str
    split: str | None
    split_key: str
    format: Format | None


def open_rows(options: FileOptions) -> Rows:
    """The rows at the path, and those for validation.

    Raises:
        DataError: a file is missing, not readable, or of an unknown format.
    """
    named, kind = options.named, options.format
    train = _Origin(options.path, "data.path", options.split, "data.split", kind)
    other = None
    if options.validation_path is not None:
        other = _Origin(options.validation_path, "data.validation_path", None, "data.split", kind)
    elif options.validation_split is not None:
        other = replace(train, split=options.validation_split, split_key="data.validation_split")
    separate = None if other is None else Rows(*_open(other, None, named))
    return Rows(*_open(train, options.size, named), separate)


SOURCES.add("file", Source(FileOptions, open_rows, no_effect=(*PLACES, *GENERATION)))


def _open(
    origin: _Origin, limit: int | None, named: NamedFields | None
) -> tuple[str, str, Callable[[], list[tuple[str, Example]]]]:
    """Name, digest and reader of an origin; paths are relative to the working directory."""
    path = user_path(origin.path)
    if not path.exists():
        raise DataError(
            f"{origin.key}={origin.path!r}: no such file",
            f"Plait looked for {path.resolve()}.",
            "Set the path of an existing file.",
        )
    if path.is_dir() and is_saved(path):
        folder = split_folder(path, origin.split, origin.split_key)
        contents = [(each, _bytes(each, origin)) for each in files_of(folder)]
        saved = partial(_saved, folder, limit)
        return path.name, _digest("datasets", contents), partial(_examples, saved, path.name, limit, named)
    if origin.split is not None:
        raise DataError(
            f"{origin.split_key}={origin.split!r}",
            f"{path} was not saved by `datasets`, so it has no splits.",
            f"Leave {origin.split_key} out; data.validation_path names another file for validation.",
        )
    if not path.is_dir() and not path.is_file():
        raise DataError(f"{origin.key}={origin.path!r}", "This is neither a file nor a folder.")
    files = _files_in(path, origin) if path.is_dir() else [path]
    kind = origin.format or _format(files, origin)
    contents = [(each, _bytes(each, origin)) for each in files]
    parsed = partial(_parsed, contents, kind)
    return path.name, _digest(kind, contents), partial(_examples, parsed, path.name, limit, named)


def _files_in(folder: Path, origin: _Origin) -> list[Path]:
    named = (each for each in folder.iterdir() if not each.name.startswith("."))  # not macOS's ._a.csv
    found = sorted(each for each in named if each.suffix.lower() in SUFFIXES and each.is_file())
    if not found:
        raise DataError(
            f"{origin.key}={origin.path!r}: this folder has no data files",
            f"Plait looked for names that end in {choices(SUFFIXES)}, and for data saved by `datasets`.",
            "Set the path of a file, or of a folder that has such files.",
        )
    return found


def _format(files: Sequence[Path], origin: _Origin) -> str:
    """The format given by the files' names."""
    formats = {SUFFIXES.get(each.suffix.lower(), "") for each in files}
    if len(formats) > 1:
        raise DataError(
            f"{origin.key}={origin.path!r}: files of the formats {choices(formats)}",
            "All files of a folder are read as one data set, in the order of their names.",
            "Name one file, or move the others.",
        )
    (kind,) = formats
    if not kind:
        raise DataError(
            f"{origin.key}={origin.path!r}: unknown format",
            f"The format is taken from the file's name: {choices(SUFFIXES)}.",
            f"Rename the file, or set data.format to one of {choices(PARSERS)}. "
            "A packed file must be unpacked.",
        )
    return kind


def _bytes(file: Path, origin: _Origin) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{origin.key}={origin.path!r}: {error.strerror}", "The file must be readable."
        ) from error


def _digest(kind: str, contents: Sequence[tuple[Path, bytes]]) -> str:
    """A digest of the files' content, in order, and of how it is read."""
    whole = hashlib.sha256(kind.encode())
    for _, content in contents:
        whole.update(hashlib.sha256(content).digest())
    return whole.hexdigest()


def _saved(folder: Path, limit: int | None) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(read_saved(folder, limit)):
        yield f"{folder.name}, row {number}", row


def _parsed(contents: Sequence[tuple[Path, bytes]], kind: str) -> Iterator[tuple[str, Row]]:
    parser = PARSERS[kind]
    return chain.from_iterable(parser(content, path.name) for path, content in contents)


def _examples(
    rows: Callable[[], Iterator[tuple[str, Row]]], name: str, limit: int | None, named: NamedFields | None
) -> list[tuple[str, Example]]:
    """The first ``limit`` rows as examples, each with its place.

    Raises:
        DataError: a row cannot be read or has no known format, or there is none.
    """
    examples = [(where, read_example(row, where, named)) for where, row in islice(rows(), limit)]
    if not examples:
        raise DataError(f"{name} is empty", "A data file must have at least one row.", "Check data.path.")
    return examples
