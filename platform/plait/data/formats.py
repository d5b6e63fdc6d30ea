"""Formats of data files: parses a file's bytes into rows, each with its place.

A seam: the only module that parses files. Its only library is pyarrow, for Parquet.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from plait.core.errors import DataError
from plait.data.examples import Row, csv_row, shortened, shown
from plait.utils.counts import counted

# Makes rows from a file's content; places and errors contain the file's name.
Parser = Callable[[bytes, str], Iterator[tuple[str, Row]]]
Placed = tuple[str, Row]


def parse_json(content: bytes, name: str) -> Iterator[Placed]:
    """One object per line, or one array of objects, depending on the first character.

    Raises:
        DataError: not UTF-8, not JSON, or not objects.
    """
    text = _decode(content, name)
    if text.lstrip().startswith("["):
        for number, row in enumerate(_load(text, name, whole=True), start=1):
            yield _object(row, f"{name}, element {number}")
        return
    # Not splitlines(): JSON text may contain U+2028 and the like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            yield _object(_load(line, where), where)


def parse_csv(content: bytes, name: str, delimiter: str = ",") -> Iterator[Placed]:
    """Rows of text after a header with the names of the fields.

    Raises:
        DataError: not UTF-8, no header, a row with too many or too few fields, or wrong quotes.
    """
    before = csv.field_size_limit(sys.maxsize)
    try:
        reader = csv.reader(io.StringIO(_decode(content, name), newline=""), delimiter=delimiter, strict=True)
        header: list[str] | None = None
        for fields in filter(None, reader):
            where = f"{name}, line {reader.line_num}"
            if header is None:
                header = _header(fields, where, delimiter)
            else:
                yield where, _csv_row(header, fields, where)
    except csv.Error as error:
        raise DataError(
            f"{name}, line {reader.line_num}: {error}",
            "A CSV file has one row a line; fields with a comma, a quote or a line break must be quoted.",
            "Correct the file, or save it again from a program that quotes such fields.",
        ) from error
    finally:
        csv.field_size_limit(before)


def parse_parquet(content: bytes, name: str) -> Iterator[Placed]:
    """The rows of a Parquet file.

    Raises:
        DataError: it is not a Parquet file, or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file: Any = pq.ParquetFile(pa.BufferReader(content))
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{name}, row {number}", row
                number += 1
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{name}: {shortened(str(error))}",
            "The file cannot be read as Parquet.",
            "Write or copy it again: it may be incomplete.",
        ) from error


PARSERS: dict[str, Parser] = {
    "json": parse_json,
    "csv": parse_csv,
    "tsv": partial(parse_csv, delimiter="\t"),
    "parquet": parse_parquet,
}
SEPARATORS = ",;\t|"
PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
SUFFIXES = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        packed = next((kind for start, kind in PACKED.items() if content.startswith(start)), None)
        if packed is not None:
            rule = "Plait reads unpacked files only."
            raise DataError(f"{name}: packed by {packed}", rule, "Unpack it.") from error
        raise DataError(
            f"{name}: byte {error.start} is not UTF-8", "A text file must be UTF-8.", "Convert the file."
        ) from error


def _load(text: str, where: str, *, whole: bool = False) -> Any:
    """The value of a line, or of a whole file."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:  # also for endless numbers and endless nesting
        place = str(error)
        if isinstance(error, json.JSONDecodeError):
            line = f"line {error.lineno}, " if whole else ""  # else ``where`` names it
            place = f"{error.msg.removesuffix(' at')} at {line}column {error.colno}"
        raise DataError(
            f"{where}: not JSON ({place})",
            "A JSON file holds one object per line, or one array of objects.",
            "Correct it.",
        ) from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these fields. Python would keep the last of two that are called the same.

    Raises:
        ValueError: two are.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(name for name in names if names.count(name) > 1)!r} comes twice")
    return found


def _object(row: object, where: str) -> Placed:
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: {type(row).__name__} instead of an object",
            "Each row must be one JSON object.",
            "Write one object per line, or one array of objects.",
        )
    return where, row


def _header(fields: list[str], where: str, delimiter: str) -> list[str]:
    others = [mark for mark in SEPARATORS if mark != delimiter and mark in fields[0]]
    if len(fields) == 1 and others:  # no format has such a field
        raise DataError(
            f"{where}: one field, called {shown(fields[0])}",
            f"The fields of this format are separated by {delimiter!r}, not by {others[0]!r}.",
            "Save it again with that separator, or set data.format (csv: commas, tsv: tabs).",
        )
    if len(set(fields)) < len(fields):
        (twice, _), *_ = Counter(fields).most_common(1)
        raise DataError(
            f"{where}: two fields are called {shown(twice)}",
            "The first line of a CSV file names its fields.",
            "Add that line, or give each field its own name.",
        )
    return fields


def _csv_row(header: list[str], fields: list[str], where: str) -> Row:
    if len(fields) != len(header):
        raise DataError(
            f"{where}: {counted(len(fields), 'field')}",
            f"The first line names {len(header)}.",
            "Correct the row; a field with a comma or a line break must be quoted.",
        )
    return csv_row(dict(zip(header, fields, strict=True)))
