"""Optuna's journal file, safe against processes that are killed and disks that fill up.

Optuna's own lock outlives a killed process and is waited for half a minute, and a partial line that such a
process left would make the next one unreadable, and with it the study.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend

from plait.utils.line_log import LineLog, check_kind

BEGINS = b'{"op_code":'  # of every line that Optuna writes


class Journal(JournalFileBackend):
    """A journal whose lines are whole or absent.

    Raises:
        StorageError: the file is there and is no journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            check_kind(path, BEGINS)
        super().__init__(str(path))

    def append_logs(self, logs: Sequence[dict[str, Any]]) -> None:
        """Write lines through to the disk, all or none.

        Raises:
            OSError: the disk is full or fails.
        """
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with LineLog(self.path, BEGINS, make=False) as journal:
            journal.lock()
            journal.append(lines.encode())
            try:
                journal.commit()
            except OSError:
                journal.cut(journal.end - len(lines.encode()))
                raise
