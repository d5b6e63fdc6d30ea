"""The tracking store of a search, opened when it first answers: a search that goes on begins without it."""

from __future__ import annotations

import threading

from plait.core.errors import StorageError
from plait.tracking.check import open_store, storage_errors
from plait.tracking.location import Location
from plait.tracking.store import Store


class Connection:
    """One store for all threads of a process.

    Args:
        location, experiment: of the store.

    Attributes:
        run_id: of the run that must be there when the store is opened late; "" while none is known. A store
            that came back without it would lose everything that was sent for it.
    """

    def __init__(self, location: Location, experiment: str) -> None:
        self.run_id = ""
        self._location = location
        self._experiment = experiment
        self._lock = threading.Lock()
        self._store: Store | None = None

    @property
    def opened(self) -> Store | None:
        """The store, if it has answered by now."""
        return self._store

    def store(self) -> Store:
        """The store; asked within seconds, as often as this is called, until it answers.

        Raises:
            StorageError: it does not answer (``AwayError``) or refuses, or the search's run is not there.
        """
        with self._lock:
            if self._store is None:
                store = open_store(self._location, self._experiment)
                if self.run_id:
                    self._check_run(store)
                self._store = store
            return self._store

    def _check_run(self, store: Store) -> None:
        with storage_errors(self._location):
            if store.run(self.run_id) is None:
                raise StorageError(
                    f"run {self.run_id} is not in {self._location}, experiment {self._experiment!r}",
                    "The search was recorded there before.",
                    "Restore the run or the database; what waits for it is kept.",
                )
