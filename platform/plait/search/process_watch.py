"""Follows the jobs and processes of a run, also while it waits for them: for views here and elsewhere.

A seam: engine and view do not know of each other; each may be absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.settings import RunSettings
from plait.engine.catalogue import DataCatalogue
from plait.tracking.leaderboard import Leaderboard
from plait.tracking.processes import JobNow, ProcessFile, ProcessRow, process_rows

if TYPE_CHECKING:
    from plait.distributed.fleet import Fleet

MakeFleet = Callable[[RunSettings, DataCatalogue], "Fleet"]


class ProcessWatch:
    """The processes of a run, as they are now, and how far the jobs are that it trains.

    Args:
        folder: of the search.
        board: knows what each replica has done so far, and the jobs.
        own: numbers of the trials of this process.

    Attributes:
        show: called every second or so while processes are waited for; in the thread that trains.
    """

    def __init__(
        self, folder: Path, board: Callable[[], Leaderboard], own: Callable[[], Collection[int]]
    ) -> None:
        self.show: Callable[[], None] = lambda: None
        self._board = board
        self._own = own
        self._file = ProcessFile(folder)
        self._fleet: Fleet | None = None

    def following(self, make: MakeFleet) -> MakeFleet:
        """The same, with every fleet that it makes followed."""

        def made(settings: RunSettings, data: DataCatalogue) -> Fleet:
            self._fleet = make(settings, data)
            self._fleet.processes.watch = self._look
            return self._fleet

        return made

    def rows(self) -> tuple[ProcessRow, ...]:
        """A row for each of several processes; none for a single one."""
        return () if self._fleet is None else process_rows(self._fleet.states(), self._board().replicas)

    def keep(self) -> None:
        """Write the file for other terminals, if that is due."""
        self._file.write(self.rows, self._jobs)

    def _look(self) -> None:
        self.keep()
        self.show()

    def _jobs(self) -> dict[str, JobNow]:
        own = self._own()
        records = (each for each in self._board().jobs.values() if each.trial in own and each.steps)
        return {each.name: JobNow(each.step, each.steps, each.loss) for each in records}

    def close(self) -> None:
        """Follow them no more."""
        self.show = lambda: None
        self._file.close()
