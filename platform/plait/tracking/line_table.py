"""Tables in a search's folder, appended as training goes, over restarts and by several processes at once: one
JSON object a line. The same is a table of the search's run in MLflow, thinned evenly where it is long."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

from plait.core.errors import StorageError

GROWTH = 1.25  # the artifact is written anew when the table has grown by this much: its cost stays linear
BLOCK = 2**20  # bytes that are looked at together
Cells = Callable[[int, Mapping[str, Any]], Sequence[Any]]


class LineTable:
    """One table.

    Args:
        path: its folder is made where it is missing.
        columns: as MLflow shows them.
        most: rows that MLflow is to have.
        cells: what a row has in the columns, told its number from 1 and its line.

    Raises:
        StorageError: the folder cannot be made, or the file cannot be read or is another table.
    """

    def __init__(self, path: Path, columns: Sequence[str], most: int, cells: Cells) -> None:
        self.path = path
        self._columns, self._most, self._cells = columns, most, cells
        with table_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._count = count_lines(path)
            for number, row in islice(numbered_rows(path), 1):
                cells(number, row)
        self._shown = 0

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row.

        Raises:
            StorageError: it cannot be written.
        """
        with table_errors(self.path), self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # a line is whole before another process reads or writes
            _cut_torn(file)
            file.write(json.dumps(row).encode() + b"\n")
        self._count += 1

    @property
    def count(self) -> int:
        """Rows that were there at the start, and those added here since."""
        return self._count

    @property
    def grown(self) -> bool:
        """Whether enough was added since :meth:`artifact` to write that anew."""
        return self._count >= max(1, GROWTH * self._shown)

    @property
    def behind(self) -> bool:
        """Whether anything was added since :meth:`artifact`."""
        return self._count > self._shown

    def artifact(self) -> str:
        """The table in the form that MLflow shows, the newest row in it.

        Raises:
            StorageError: it cannot be read.
        """
        self._shown = self._count
        with table_errors(self.path):
            data = [list(self._cells(*each)) for each in numbered_rows(self.path, self._most)]
        return json.dumps({"columns": self._columns, "data": data})


def numbered_rows(path: Path, most: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a table with their numbers from 1, oldest first; none where there is no table. What a crash
    left of a line is no row.

    Args:
        path: of the table.
        most: rows to give; of more, every k-th is parsed up to the newest.

    Raises:
        OSError: it cannot be read.
    """
    if (count := count_lines(path)) == 0:
        return
    every = 1 if most is None else -(-count // most)
    with path.open("rb") as file:
        for number, line in enumerate(islice(file, count), 1):
            if (count - number) % every == 0 and (row := _parsed(line)) is not None:
                yield number, row


def count_lines(path: Path) -> int:
    """Whole lines of a file; 0 where there is none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK), b""))
    except FileNotFoundError:
        return 0


@contextmanager
def table_errors(path: Path) -> Iterator[None]:
    """What goes wrong with a table inside, as a StorageError that names its file."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError) as error:
        said = error.strerror if isinstance(error, OSError) else f"a row lacks or has too much: {error}"
        raise StorageError(
            f"{path}: {said or error}",
            "The search's folder keeps tables of its iterations and of what they were predicted by.",
            "Make room or the folder writable, or move the file away (a new table is begun), and start the "
            "same command again: it goes on.",
        ) from error


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _cut_torn(file: IO[bytes]) -> None:
    """Cut off a last line that a crash left unfinished, so that what follows is a line by itself."""
    end = file.seek(0, os.SEEK_END)
    if end == 0 or _read(file, end - 1, end) == b"\n":
        return
    while end > 0:
        start = max(0, end - BLOCK)
        at = _read(file, start, end).rfind(b"\n") + 1
        end = start + at
        if at:
            break
    file.truncate(end)


def _read(file: IO[bytes], start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)
