"""What a search's run says of all its jobs while it goes on: leaderboard, Pareto front, best so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from plait.tracking import names
from plait.tracking.board import Board, JobRecord
from plait.tracking.final import so_far
from plait.tracking.leaderboard import to_split_json, varying
from plait.tracking.operations import run_reference
from plait.tracking.outgoing import Outgoing
from plait.tracking.store import table_tag

REFRESH_SECONDS = 10.0  # between two leaderboards of a search that goes on
REFRESH_SHARE = 0.005  # of the time may go into making them


class Overview:
    """Writes it anew now and then: it takes the longer the more jobs there are.

    Args:
        out: takes what is written.
        run: key of the search's run.
        several: the search has several objectives.

    Attributes:
        front: jobs that are tagged as being on the Pareto front.
    """

    def __init__(self, out: Outgoing, run: str, *, several: bool) -> None:
        self.front: set[str] = set()
        self._out = out
        self._run = run
        self._next = 0.0
        self._tables = [*([names.PARETO_FILE] if several else []), names.LEADERBOARD_FILE]

    def add_table(self, path: str) -> None:
        """Tell MLflow of a further table of the search's run."""
        if path not in self._tables:
            self._tables.append(path)
            self._out.tags(self._run, dict([table_tag(*self._tables)]))

    def refresh(self, board: Board, run_id: Callable[[str], str], *, now: bool = False) -> None:
        """Write it, if that is due; ``run_id``: MLflow's id of a job's run."""
        started = time.monotonic()
        if not now and started < self._next:
            return
        for record in board.jobs.values():
            record.run_id = run_id(record.name)
        rows = [replace(record, run_id=run_reference(record.name)) for record in board.ordered()]
        self._out.table(self._run, names.LEADERBOARD_FILE, to_split_json(rows))
        tags = dict([table_tag(*self._tables)])
        if note := so_far(board):
            tags[names.TAG_NOTE] = note
        if board.others:
            self._write_front(rows)
        self._out.tags(self._run, tags)
        taken = time.monotonic() - started
        self._next = started + max(REFRESH_SECONDS, taken / REFRESH_SHARE)

    def _write_front(self, rows: Sequence[JobRecord]) -> None:
        """The Pareto front as a table, and as a tag of each job that is or was on it."""
        front = [row for row in rows if row.on_front]
        self._out.table(self._run, names.PARETO_FILE, to_split_json(front, varying(rows)))
        now = {row.name for row in front}
        for name in sorted(now ^ self.front):
            self._out.tags(name, {names.TAG_PARETO: str(name in now).lower()})
        self.front = now
