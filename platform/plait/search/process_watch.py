"""Follows the processes of a run, also while it waits for them: for the view and for other terminals.

A seam: engine and view do not know of each other; each may be absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.settings import RunSettings
from plait.core.spans import ReplicaTotals
from plait.engine.catalogue import DataCatalogue
from plait.tracking.processes import ProcessFile, ProcessRow, process_rows

if TYPE_CHECKING:
    from plait.distributed.fleet import Fleet

MakeFleet = Callable[[RunSettings, DataCatalogue], "Fleet"]


class ProcessWatch:
    """The processes of a run, as they are now.

    Args:
        folder: of the search.
        totals: what each replica has done so far, by its number.

    Attributes:
        show: called every second or so while processes are waited for; in the thread that trains.
    """

    def __init__(self, folder: Path, totals: Callable[[], Mapping[int, ReplicaTotals]]) -> None:
        self.show: Callable[[], None] = lambda: None
        self._totals = totals
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
        return () if self._fleet is None else process_rows(self._fleet.states(), self._totals())

    def _look(self) -> None:
        self._file.write(self.rows())
        self.show()

    def close(self) -> None:
        """Follow them no more."""
        self.show = lambda: None
        self._file.close()
