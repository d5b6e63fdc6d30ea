"""Files with one JSON object a line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from plait.core.errors import DataError
from plait.data.examples import Example, NamedFields, Row, read_example


@dataclass(frozen=True, slots=True)
class JsonlFile:
    """A file's content, its digest and its name as errors give it."""

    name: str
    text: str
    digest: str

    def examples(self, limit: int | None, named: NamedFields | None) -> list[tuple[str, Example]]:
        """The first ``limit`` rows, each with its place ("train.jsonl, line 7").

        Raises:
            DataError: a line is not a JSON object, a row has no known format, or there is no row.
        """
        examples: list[tuple[str, Example]] = []
        # Not splitlines(): a JSON text may hold U+2028 and the like as they are.
        for number, line in enumerate(self.text.split("\n"), start=1):
            if limit is not None and len(examples) >= limit:
                break
            if line.strip():
                where = f"{self.name}, line {number}"
                examples.append((where, read_example(_parse(line, where), where, named)))
        if not examples:
            raise DataError(f"{self.name} is empty", "A data file has at least one row.", "Check data.path.")
        return examples


def open_jsonl(path: str, key: str = "data.path") -> JsonlFile:
    """The file at ``path``; relative paths start at the working directory.

    Raises:
        DataError: no such file, not readable, or not UTF-8.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(
            f"{key}={path!r}: {'this is a folder' if file.is_dir() else 'no such file'}",
            f"Looked for {file.resolve()}.",
            "Give the path of a file that exists.",
        )
    try:
        content = file.read_bytes()
        return JsonlFile(file.name, content.decode("utf-8-sig"), hashlib.sha256(content).hexdigest())
    except OSError as error:
        raise DataError(f"{key}={path!r}: {error.strerror}", "The file must be readable.") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{key}={path!r}: byte {error.start} is not UTF-8",
            "A JSONL file is UTF-8 text.",
            "Convert the file.",
        ) from error


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON ({error.msg} at column {error.colno})",
            "Each line holds one JSON object.",
            "Correct the line; a file with one JSON array must be written as one object a line.",
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: {type(row).__name__} instead of an object",
            "Each line holds one JSON object.",
            "Write one object a line.",
        )
    return row
