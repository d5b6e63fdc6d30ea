"""The MLflow store: the few calls that Plait makes of it, on one experiment."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag

from plait.tracking.location import Location
from plait.tracking.names import TAG_JOB, TAG_PARENT, TAG_SEARCH, TAG_STUDY, TAG_TABLES, TAG_TRIAL
from plait.tracking.operations import LogPoints

ENTRIES_PER_REQUEST = 1000
PAIRS_PER_REQUEST = 100  # parameters or tags
PARAMETER_LENGTH = 6000
TAG_LENGTH = 8000
PAGE = 1000
Item = TypeVar("Item")

# No news of tables being made, and no traceback of a database that is away: Plait tells that itself.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # so of a server, at each attempt


class Store:
    """One experiment of one MLflow store; every method is one or a few blocking calls.

    Raises:
        mlflow.exceptions.MlflowException: from every method, where the store refuses or does not answer.
    """

    def __init__(self, location: Location, experiment: str) -> None:
        self.location = location
        self.experiment = experiment
        self.client = MlflowClient(location.uri)
        self.experiment_id = self._experiment_id()

    def _experiment_id(self) -> str:
        found = self.client.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        # The kind tells MLflow's pages to show training runs and not conversations.
        tags = {"mlflow.experimentKind": "custom_model_development"}
        return str(self.client.create_experiment(self.experiment, self.location.artifacts, tags))

    # ---- reading ---------------------------------------------------------------------------------------

    def searches(self, name: str | None = None, study: str = "") -> list[Run]:
        """Runs of searches, newest first; of one name and one study if given."""
        condition = f"tags.`{TAG_SEARCH}` = '{_quoted(name)}'" if name else f"tags.`{TAG_SEARCH}` IS NOT NULL"
        if study:
            condition += f" AND tags.`{TAG_STUDY}` = '{_quoted(study)}'"
        return list(self._runs(f"{condition} AND tags.`{TAG_TRIAL}` IS NULL"))

    def children(self, parent_id: str) -> dict[int, Run]:
        """Runs of a search's jobs by trial number; of several for one trial, the newest."""
        newest_last = reversed(self.all_children(parent_id))
        return {int(run.data.tags[TAG_TRIAL]): run for run in newest_last}

    def all_children(self, parent_id: str) -> list[Run]:
        """Runs of a search's jobs, newest first; there may be several for one trial."""
        return list(self._runs(f"tags.`{TAG_PARENT}` = '{parent_id}' AND tags.`{TAG_TRIAL}` IS NOT NULL"))

    def child(self, parent_id: str, *, trial: int | None = None, job: str | None = None) -> Run | None:
        """The run of one trial, or of one job's name, if there is one; of several the newest."""
        key, value = (TAG_JOB, job) if job is not None else (TAG_TRIAL, str(trial))
        condition = f"tags.`{TAG_PARENT}` = '{parent_id}' AND tags.`{key}` = '{_quoted(value)}'"
        return next(self._runs(condition, 1), None)

    def _runs(self, condition: str, page_size: int = PAGE) -> Iterator[Run]:
        token = None
        while True:
            page = self.client.search_runs(
                [self.experiment_id],
                condition,
                max_results=page_size,
                order_by=["attributes.start_time DESC"],
                page_token=token,
            )
            yield from page
            token = page.token
            if not token:
                return

    def run(self, run_id: str) -> Run | None:
        """The run of an id, if there is one in this experiment."""
        return next((run for run in self._runs(f"attributes.run_id = '{run_id}'")), None)

    def last_steps(self, run: Run) -> dict[str, int]:
        """The last step of every metric that the run has."""
        return {
            key: max(point.step for point in self.client.get_metric_history(run.info.run_id, key))
            for key in run.data.metrics
        }

    # ---- writing ---------------------------------------------------------------------------------------

    def create_run(self, name: str, tags: Mapping[str, str], time_ms: int) -> str:
        """A new running run; the id."""
        shortened = {key: value[:TAG_LENGTH] for key, value in tags.items()}
        run = self.client.create_run(self.experiment_id, time_ms, shortened, name)
        return str(run.info.run_id)

    def reopen(self, run_id: str) -> None:
        """Set an ended run to running."""
        self.client.update_run(run_id, status="RUNNING")

    def log_parameters(self, run_id: str, parameters: Sequence[tuple[str, str]]) -> None:
        """Log parameters; those that are there already must have the same value."""
        for part in _parts(parameters, PAIRS_PER_REQUEST):
            self.client.log_batch(
                run_id, params=[Param(key, value[:PARAMETER_LENGTH]) for key, value in part]
            )

    def update(self, run_id: str, points: Iterable[LogPoints], tags: Sequence[tuple[str, str]] = ()) -> None:
        """Log metric values and set or replace tags, in as few requests as the limits allow."""
        metrics = [
            Metric(key, value, point.time_ms, point.step) for point in points for key, value in point.values
        ]
        pairs = [RunTag(key, value[:TAG_LENGTH]) for key, value in tags]
        while metrics or pairs:
            some = pairs[:PAIRS_PER_REQUEST]
            most = ENTRIES_PER_REQUEST - len(some)
            self.client.log_batch(run_id, metrics=metrics[:most], tags=some)
            metrics, pairs = metrics[most:], pairs[PAIRS_PER_REQUEST:]

    def log_text(self, run_id: str, path: str, text: str) -> None:
        """Write a text artifact."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / Path(path).name
            file.write_text(text, encoding="utf-8")
            parent = str(Path(path).parent)
            self.client.log_artifact(run_id, str(file), None if parent == "." else parent)

    def log_folder(self, run_id: str, folder: Path, path: str) -> None:
        """Copy a folder's files to the run's artifacts."""
        self.client.log_artifacts(run_id, str(folder), path)

    def download(self, run_id: str, path: str, destination: Path) -> Path:
        """Copy an artifact to a folder; the path of the copy."""
        return Path(self.client.download_artifacts(run_id, path, str(destination)))

    def has_artifact(self, run_id: str, path: str) -> bool:
        """Whether the run has an artifact folder of that name."""
        return any(item.path == path for item in self.client.list_artifacts(run_id))

    def delete_run(self, run_id: str) -> None:
        """Hide a run; MLflow keeps it until its own cleaning up."""
        self.client.delete_run(run_id)

    def end_run(self, run_id: str, status: str, time_ms: int) -> None:
        """Set a run's final status. It does not end before it began, whatever the clock says by now."""
        began = self.client.get_run(run_id).info.start_time
        self.client.set_terminated(run_id, status, max(time_ms, began))


def table_tag(*paths: str) -> tuple[str, str]:
    """The tag by which MLflow's UI knows which JSON artifacts are tables."""
    return TAG_TABLES, json.dumps([{"path": path, "type": "table"} for path in paths])


def _quoted(text: str) -> str:
    return text.replace("'", "''")


def _parts(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
