"""Carries the writer's requests out on the MLflow store."""

from __future__ import annotations

from typing import assert_never

from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from plait.tracking.operations import (
    EndRun,
    LogFolder,
    LogPoints,
    LogText,
    OpenRun,
    PointsOfRun,
    Request,
    SetTags,
    resolve_references,
)
from plait.tracking.store import Store
from plait.tracking.writer import RefusedError

FOR_GOOD = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}


class StoreSender:
    """Knows which MLflow run belongs to which key, and what each run already had when it was found again.

    Args:
        store: where requests go.
        runs: MLflow ids of the runs that exist, by key.
        found: runs of the search's jobs that exist, by trial number.
    """

    def __init__(self, store: Store, runs: dict[str, str], found: dict[int, Run]) -> None:
        self._store = store
        self._ids = runs
        self._found = found
        self._tried: set[str] = set()
        self._had: dict[str, dict[str, int]] = {}

    def send(self, request: Request) -> None:
        """Carry one request out.

        Raises:
            RefusedError: the store will never take it.
            Exception: the store does not answer, or not now.
        """
        try:
            self._send(request)
        except MlflowException as error:
            if error.error_code in FOR_GOOD:
                raise RefusedError(f"{request.run}: {error.message}") from error
            raise
        except FileNotFoundError as error:
            raise RefusedError(f"{request.run}: {error}") from error

    def _send(self, request: Request) -> None:
        if isinstance(request, OpenRun):
            self._open(request)
            return
        run_id = self._ids.get(request.run)
        if run_id is None:
            raise RefusedError(f"{request.run}: its run could not be made")
        match request:
            case PointsOfRun():
                self._store.log_points(run_id, self._new_points(request))
            case SetTags():
                self._store.set_tags(run_id, request.tags)
            case LogText():
                text = resolve_references(request.text, self._ids)
                self._store.log_text(run_id, request.path, text)
            case LogFolder():
                if not request.folder.is_dir():
                    raise FileNotFoundError(f"{request.folder} is not there to be kept as {request.path}")
                self._store.log_folder(run_id, request.folder, request.path)
            case EndRun():
                self._store.end_run(run_id, request.status, request.time_ms)
            case _:
                assert_never(request)

    def _open(self, request: OpenRun) -> None:
        """Make the run, or take up the one that is there: from before, or from an attempt whose answer got
        lost on the way."""
        run = self._found.get(request.trial)
        if run is None and request.run in self._tried:
            run = self._store.child(request.parent_id, request.trial)
        self._tried.add(request.run)
        if run is None:
            run_id = self._store.create_run(request.run, dict(request.tags), request.time_ms)
            parameters = request.parameters
        else:
            run_id = run.info.run_id
            self._had[request.run] = self._store.last_steps(run)
            parameters = tuple(pair for pair in request.parameters if pair[0] not in run.data.params)
            self._store.reopen(run_id)
            self._store.set_tags(run_id, request.tags)
        self._ids[request.run] = run_id
        self._store.log_parameters(run_id, parameters)

    def _new_points(self, request: PointsOfRun) -> list[LogPoints]:
        """The points without those that the run had when it was found again: a job that goes on from a
        checkpoint repeats some steps, and no step is counted twice."""
        had = self._had.get(request.run)
        if not had:
            return list(request.points)
        kept = []
        for point in request.points:
            values = tuple((key, value) for key, value in point.values if point.step > had.get(key, -1))
            if values:
                kept.append(LogPoints(point.run, point.step, point.time_ms, values))
        return kept
