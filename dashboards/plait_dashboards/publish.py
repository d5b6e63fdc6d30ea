"""Stores a search's figures with its run in MLflow, whose artifact viewer shows them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mlflow import MlflowClient

from plait.core.settings import TrackingSettings
from plait.tracking.connection import storage_errors
from plait.tracking.results import load_search
from plait_dashboards.figures import all_figures
from plait_dashboards.page import report, single
from plait_dashboards.reading import sweep_of

REPORT = "report.html"
FOLDER = "figures"


def publish(settings: TrackingSettings, run_id: str, storage: str | None, final: bool) -> None:
    """Write the page of a search to its run's artifacts and, when the search has ended, each figure
    separately.

    Args:
        settings: settings of the tracking store.
        run_id: id of the search's run.
        storage: storage of the study (``search.storage``).
        final: whether the search has ended.

    Raises:
        SearchError: there is no such run.
        StorageError: the store cannot be used.
    """
    result = load_search(settings, run_id)
    client = MlflowClient(result.location.uri)
    with storage_errors(result.location), tempfile.TemporaryDirectory() as name:
        sweep = sweep_of(result, client, storage)
        shown = all_figures(sweep)
        folder = Path(name)
        (folder / REPORT).write_text(report(sweep, shown), encoding="utf-8")
        if final:
            (folder / FOLDER).mkdir()
            for item in shown:
                page = folder / FOLDER / f"{item.key}.html"
                page.write_text(single(sweep, item), encoding="utf-8")
        client.log_artifacts(result.run_id, str(folder))
