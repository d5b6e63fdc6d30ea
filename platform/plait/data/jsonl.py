"""The source "jsonl": files with one JSON object a line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from plait.core.checks import NOT_EMPTY
from plait.core.errors import ConfigError, DataError
from plait.data.examples import Example, NamedFields, Row, read_example
from plait.data.sources import SOURCES, CommonOptions, Rows, Source
from plait.utils.paths import user_path


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlOptions(CommonOptions):
    """Options of a file with one JSON object a line.

    Attributes:
        validation_path: a separate file for validation; then nothing is split off ``path``, and
            ``validation`` says how many of this file's rows to take.
        prompt_field: the field that holds the prompt, where the rows have none of the known formats.
        completion_field: the field that holds the completion.
    """

    path: Annotated[str, NOT_EMPTY]
    validation_path: str | None = None
    prompt_field: str | None = None
    completion_field: str | None = None

    def __post_init__(self) -> None:
        CommonOptions.__post_init__(self)
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ConfigError(
                f"data.prompt_field={self.prompt_field}, data.completion_field={self.completion_field}",
                "Both fields must be named together.",
                "Set both or neither.",
            )

    @property
    def named(self) -> NamedFields | None:
        """The fields that hold prompt and completion, where they are named."""
        if self.prompt_field is None or self.completion_field is None:
            return None
        return NamedFields(self.prompt_field, self.completion_field)


def open_rows(options: JsonlOptions) -> Rows:
    """The rows of the file, and of the one for validation.

    Raises:
        DataError: a file is missing, not readable, or not UTF-8.
    """
    separate = options.validation_path
    return Rows(
        *_open(options.path, "data.path", options.size, options.named),
        None if separate is None else Rows(*_open(separate, "data.validation_path", None, options.named)),
    )


SOURCES.add("jsonl", Source(JsonlOptions, open_rows, no_effect=("path", "validation_path")))


def _open(
    path: str, key: str, limit: int | None, named: NamedFields | None
) -> tuple[str, str, Callable[[], list[tuple[str, Example]]]]:
    """Name, digest and reader of the file at ``path``; relative paths start at the working directory."""
    file = user_path(path)
    if not file.is_file():
        raise DataError(
            f"{key}={path!r}: {'this is a folder' if file.is_dir() else 'no such file'}",
            f"Plait looked for {file.resolve()}.",
            "Set the path of an existing file.",
        )
    try:
        content = file.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{key}={path!r}: {error.strerror}", "The file must be readable.") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{key}={path!r}: byte {error.start} is not UTF-8",
            "A JSONL file must be UTF-8 text.",
            "Convert the file.",
        ) from error
    return file.name, hashlib.sha256(content).hexdigest(), partial(_examples, text, file.name, limit, named)


def _examples(
    text: str, name: str, limit: int | None, named: NamedFields | None
) -> list[tuple[str, Example]]:
    """The first ``limit`` rows, each with its place.

    Raises:
        DataError: a line is not a JSON object, a row has no known format, or there is no row.
    """
    examples: list[tuple[str, Example]] = []
    # Not splitlines(): a JSON text may hold U+2028 and the like as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if limit is not None and len(examples) >= limit:
            break
        if line.strip():
            where = f"{name}, line {number}"
            examples.append((where, read_example(_parse(line, where), where, named)))
    if not examples:
        raise DataError(f"{name} is empty", "A data file must have at least one row.", "Check data.path.")
    return examples


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also of endless numbers and of endless nesting
        place = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise DataError(
            f"{where}: not JSON ({place})",
            "Each line must be one JSON object.",
            "Correct the line; write a JSON array as one object per line.",
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: {type(row).__name__} instead of an object",
            "Each line must be one JSON object.",
            "Write one object per line.",
        )
    return row
