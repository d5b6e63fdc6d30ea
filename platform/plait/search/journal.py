"""Optuna's journal file, safe against processes that are killed and disks that fill up.

Optuna's own lock outlives a killed process and is waited for half a minute, and what such a process wrote
half of would make the line after it unreadable, and with it the study.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import BaseJournalFileLock

from plait.search.locks import FileLock

BLOCK = 65536


class _Lock(FileLock, BaseJournalFileLock):
    """Optuna's kind of lock."""


class Journal(JournalFileBackend):
    """A journal whose lines are whole or absent.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own_lock = _Lock(path.with_name(f"{path.name}.write-lock"))
        super().__init__(str(path), self._own_lock)

    def append_logs(self, logs: Sequence[dict[str, Any]]) -> None:
        """Write lines through to the disk, all or none.

        Raises:
            OSError: the disk is full or fails.
        """
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        with self._own_lock.held():
            handle = os.open(self.path, os.O_RDWR)
            try:
                end = _end_of_whole_lines(handle)
                try:
                    os.ftruncate(handle, end)
                    _write(handle, lines, end)
                    os.fsync(handle)
                except BaseException:
                    os.ftruncate(handle, end)
                    raise
            finally:
                os.close(handle)


def _end_of_whole_lines(handle: int) -> int:
    """Where the last whole line ends: behind it, a killed process may have left a piece."""
    end = os.fstat(handle).st_size
    while end > 0:
        start = max(0, end - BLOCK)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _write(handle: int, content: bytes, offset: int) -> None:
    while content:
        written = os.pwrite(handle, content, offset)
        content, offset = content[written:], offset + written
