"""Taking a search's runs out of the store."""

from __future__ import annotations

from collections.abc import Sequence

from plait.core.settings import TrackingSettings
from plait.tracking.check import storage_errors
from plait.tracking.location import locate, sqlite_in
from plait.tracking.results import store_to_read


def stored_runs(settings: TrackingSettings, name: str, run_id: str) -> list[str]:
    """MLflow's ids of a search's runs, the jobs' first.

    In the folder of the runs, where no other search has its name, those of all its beginnings; elsewhere
    somebody else may have one of this name, and only the run that is known to be its own counts.

    Args:
        settings: the store.
        name: of the search.
        run_id: of its run, as its study has it; "" where that is not known.

    Raises:
        AwayError, StorageError: the store does not answer, or refuses.
    """
    store = store_to_read(settings)
    if store is None:
        return []
    location = locate(settings)
    with storage_errors(location):
        parents = [run.info.run_id for run in store.searches(name)]
        if location.uri != sqlite_in(location.root):
            parents = [parent for parent in parents if parent == run_id]
        jobs = [run.info.run_id for parent in parents for run in store.all_children(parent)]
    return [*jobs, *parents]


def delete_runs(settings: TrackingSettings, run_ids: Sequence[str]) -> None:
    """Delete runs as MLflow does: they are hidden, and come back by `mlflow runs restore` until `mlflow gc`.

    Raises:
        AwayError, StorageError: the store does not answer, or refuses.
    """
    store = store_to_read(settings) if run_ids else None
    if store is not None:
        with storage_errors(store.location):
            for run_id in run_ids:
                store.delete_run(run_id)
