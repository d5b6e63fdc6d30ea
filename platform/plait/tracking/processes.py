"""How the processes of a run are doing, for the live view and `plait control`.

The process that you started keeps it in a file below the search's folder, for other terminals. It is of use
while that process lives: with it, the file goes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.spans import ProcessState, ReplicaTotals
from plait.tracking.leaderboard import Leaderboard
from plait.utils.durations import duration
from plait.utils.files import write_text

if TYPE_CHECKING:
    from plait.core.settings import RunSettings
    from plait.distributed.fleet import Fleet
    from plait.engine.catalogue import DataCatalogue

    MakeFleet = Callable[[RunSettings, DataCatalogue, str], Fleet]

FOLDER = "processes"  # below the search's folder
SUFFIX = "-now.json"
SILENT_SECONDS = 5.0  # without a sign of life, of which there is one in a second
WRITE_SECONDS = 2.0  # between two versions of the file, at least
NONE_YET = ReplicaTotals()


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process: how it is doing, and what it has done so far."""

    state: ProcessState
    totals: ReplicaTotals

    @property
    def silent(self) -> bool:
        """It should have been heard of, and was not."""
        return self.state.silent > SILENT_SECONDS

    @property
    def doing(self) -> str:
        """What it does, and for how long: ``training 3 s``."""
        state = self.state
        if self.silent:
            return f"silent for {duration(state.silent)} of {duration(state.limit)}, {state.doing}"
        return f"{state.doing or 'waiting'} {duration(state.seconds)}"

    def __str__(self) -> str:
        state, totals = self.state, self.totals
        done = f"{duration(totals.busy_seconds)} busy, {duration(totals.waited_seconds)} waited"
        named = f"process {state.replica} on {state.device} ({state.host}, pid {state.pid})"
        return f"{named}: {self.doing}; {done}, {totals.tokens:,} tokens"

    def facts(self) -> dict[str, Any]:
        """The same for programs."""
        return asdict(self.state) | asdict(self.totals)


def process_rows(
    states: Sequence[ProcessState], totals: Mapping[int, ReplicaTotals]
) -> tuple[ProcessRow, ...]:
    """A row for each of several processes, silent ones first; none for a single one."""
    rows = [ProcessRow(state, totals.get(state.replica, NONE_YET)) for state in states]
    return tuple(sorted(rows, key=lambda row: (not row.silent, row.state.replica))) if rows[1:] else ()


class ProcessWatch:
    """Follows the processes of a run, also while it waits for them: for views here and, in a file, for other
    terminals.

    Args:
        folder: of the search.
        board: knows what each replica has done so far.

    Attributes:
        show: called every second or so while processes are waited for; in the thread that trains.
    """

    def __init__(self, folder: Path, board: Callable[[], Leaderboard]) -> None:
        self.show: Callable[[], None] = lambda: None
        self._board = board
        self._path = folder / FOLDER / f"{os.getpid()}{SUFFIX}"
        self._next = 0.0
        self._fleet: Fleet | None = None

    def following(self, make: MakeFleet) -> MakeFleet:
        """The same, with every fleet that it makes followed."""

        def made(settings: RunSettings, data: DataCatalogue, tiles: str) -> Fleet:
            self._fleet = make(settings, data, tiles)
            self._fleet.processes.watch = self._look
            return self._fleet

        return made

    def rows(self) -> tuple[ProcessRow, ...]:
        """A row for each of several processes; none for a single one."""
        return () if self._fleet is None else process_rows(self._fleet.states(), self._board().replicas)

    def keep(self) -> None:
        """Write the file, if there are several processes and it is due. A disk that is full does not
        matter."""
        now = time.monotonic()
        if self._fleet is None or now < self._next:
            return
        self._next = now + WRITE_SECONDS
        facts = {"at": time.time(), "processes": [row.facts() for row in self.rows()]}
        with suppress(OSError):
            write_text(self._path, json.dumps(facts), durable=False)

    def _look(self) -> None:
        self.keep()
        self.show()

    def close(self) -> None:
        """Follow them no more."""
        self.show = lambda: None
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def read_processes(folder: Path, living: Iterable[str]) -> list[ProcessRow]:
    """The rows of a search's runs of several processes on this host, as they are now.

    Args:
        folder: of the search.
        living: ids of the processes of this host that train it; what others left is not read.
    """
    rows: list[ProcessRow] = []
    for pid in sorted(living):
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads((folder / FOLDER / f"{pid}{SUFFIX}").read_text(encoding="utf-8"))
            age = max(0.0, time.time() - kept["at"])
            rows += [_row(each, age) for each in kept["processes"]]
    return rows


def remove_left(folder: Path, living: Collection[str]) -> None:
    """Remove what processes left that were killed: their tables, and logs to which nothing was printed.

    Args:
        folder: of the search.
        living: ids of the processes that train it.
    """
    for file in (folder / FOLDER).glob("*-*"):
        with suppress(OSError):
            empty = file.name.endswith(SUFFIX) or file.stat().st_size == 0
            if empty and file.name.partition("-")[0] not in living:
                file.unlink()


def _row(facts: Mapping[str, Any], age: float) -> ProcessRow:
    """A row that was written ``age`` seconds ago, as it is if nothing was heard since."""
    own = {name: facts[name] for name in ProcessState.__dataclass_fields__}
    own["seconds"] += age
    own["silent"] += age if own["doing"] else 0.0
    totals = {name: facts[name] for name in ReplicaTotals.__dataclass_fields__}
    return ProcessRow(ProcessState(**own), ReplicaTotals(**totals))
