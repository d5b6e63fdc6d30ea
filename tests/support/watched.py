"""A command that notes what it writes outside the folders it was given."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forked import Forked

WRITES = "writes"  # file in the command's folder: one line for each path outside
WITHIN = "WATCHED_WITHIN"  # variable with the folders it may write to
# Audit events of Python that change the disk: where their paths and the folders these start at are.
PATHS: Mapping[str, tuple[tuple[int, int | None], ...]] = {
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.truncate": ((0, None),),
    "sqlite3.connect": ((0, None),),
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _run_watched(
    arguments: Sequence[str], folder: str, log: str, environment: Mapping[str, str], last: int | None
) -> None:
    within = environment[WITHIN].split(os.pathsep)
    notes = os.open(Path(folder) / WRITES, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen: set[str] = set()

    def note(event: str, given: tuple[Any, ...]) -> None:
        for path in _written(event, given):
            if path in seen or "__pycache__" in path or any(_is_below(path, each) for each in within):
                continue
            seen.add(path)
            os.write(notes, (json.dumps([path, _state(path)]) + "\n").encode())

    sys.addaudithook(note)
    Forked.run(arguments, folder, log, environment, last)


class Watched(Forked):
    """`plait ...` in a process of its own, which notes what it writes outside ``WITHIN`` of its environment,
    as far as Python does it: C libraries and child processes are not seen."""

    run = staticmethod(_run_watched)

    def written_outside(self) -> list[str]:
        """What it made, changed or deleted outside, now that it has ended. What it made and deleted again
        does not count, nor what it only tried."""
        lines = (self.log.parent / WRITES).read_text().splitlines()
        return [path for path, before in map(json.loads, lines) if _state(path) != before]


def _written(event: str, given: tuple[Any, ...]) -> Iterator[str]:
    """The paths that an operation writes to."""
    if event == "open":
        writing = isinstance(given[2], int) and given[2] & WRITING
        places: tuple[tuple[int, int | None], ...] = ((0, None),) if writing else ()
    else:
        places = PATHS.get(event, ())
    for place, beginning in places:
        path, start = given[place], -1 if beginning is None else given[beginning]
        if not isinstance(path, (str, bytes, os.PathLike)):
            continue
        text = os.fsdecode(path)
        if event == "sqlite3.connect" and text.startswith((":memory:", "file:")):
            continue
        with suppress(OSError, ValueError):  # what is no path is not written to
            base = Path(f"/proc/self/fd/{start}").readlink() if start >= 0 else Path.cwd()
            head, name = os.path.split(base / text)
            yield str(Path(head).resolve() / name)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _state(path: str) -> list[int] | None:
    """What changes when a file is written to; None if there is none, nothing for what is no plain file."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return []
    return [found.st_ino, found.st_size, found.st_mtime_ns]
