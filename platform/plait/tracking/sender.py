"""Carries the writer's requests out on the MLflow store."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from mlflow.exceptions import MlflowException

from plait.tracking.operations import (
    EndRun,
    LogFile,
    LogFolder,
    LogPoints,
    LogText,
    OpenRun,
    Reopen,
    Request,
    UpdateRun,
    resolve_references,
)
from plait.tracking.store import Store
from plait.tracking.writer import RefusedError

FOR_GOOD = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}


class StoreSender:
    """Knows which MLflow run belongs to which key of a search.

    Args:
        connect: the store, where requests go; raises where it does not answer.
        parent_id: MLflow's id of the search's run.
        ids: MLflow ids of the runs that are known to exist, by key; filled as others are made or found.
    """

    def __init__(self, connect: Callable[[], Store], parent_id: str, ids: dict[str, str]) -> None:
        self._connect = connect
        self._parent_id = parent_id
        self._ids = ids
        self._had: dict[str, dict[str, int]] = {}  # last steps of runs of which the spool knew nothing

    @property
    def _store(self) -> Store:
        return self._connect()

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
        run_id = self._id(request.run)
        match request:
            case UpdateRun():
                self._store.update(run_id, self._new_points(request), request.tags)
            case LogText():
                self._log_text(run_id, request.path, request.text)
            case LogFile():
                self._log_text(run_id, request.path, request.file.read_text(encoding="utf-8"))
            case LogFolder():
                if not request.folder.is_dir():
                    raise FileNotFoundError(f"{request.folder} is not there to be kept as {request.path}")
                self._store.log_folder(run_id, request.folder, request.path)
            case EndRun():
                self._store.end_run(run_id, request.status, request.time_ms)
            case Reopen():
                self._store.reopen(run_id)
            case _:
                assert_never(request)

    def _log_text(self, run_id: str, path: str, text: str) -> None:
        self._store.log_text(run_id, path, resolve_references(text, self._ids))

    def _id(self, run: str) -> str:
        """The id of a run that this process, an earlier one or another worker of the search has made."""
        if run not in self._ids:
            found = self._store.child(self._parent_id, job=run)
            if found is None:
                raise RefusedError(f"{run}: its run could not be made")
            self._ids[run] = found.info.run_id
            if run not in self._had:  # somebody else may have gone on with the job since
                self._had[run] = self._store.last_steps(found)
        return self._ids[run]

    def _open(self, request: OpenRun) -> None:
        """Make the run, or take up the one that is there: from before, from another worker, or from an
        attempt whose answer got lost on the way."""
        run = self._store.child(request.parent_id, trial=request.trial)
        if run is None:
            run_id = self._store.create_run(request.run, dict(request.tags), request.time_ms)
            parameters = request.parameters
        else:
            run_id = run.info.run_id
            if not request.known:
                self._had[request.run] = self._store.last_steps(run)
            parameters = tuple(pair for pair in request.parameters if pair[0] not in run.data.params)
            self._store.reopen(run_id)
            self._store.update(run_id, (), request.tags)
        self._ids[request.run] = run_id
        self._store.log_parameters(run_id, parameters)

    def _new_points(self, request: UpdateRun) -> list[LogPoints]:
        """The points without those that the run had when it was found: a job that goes on from a checkpoint
        on another machine, or without its spool, repeats some steps, and no step is counted twice."""
        had = self._had.get(request.run)
        if not had:
            return list(request.points)
        kept = []
        for point in request.points:
            fresh = tuple((key, value) for key, value in point.values if point.step > had.get(key, -1))
            values = point.values if point.late else fresh
            if values:
                kept.append(LogPoints(point.run, point.step, point.time_ms, values))
        return kept
