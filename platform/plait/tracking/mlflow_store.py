"""The MLflow store: the few calls that Plait makes on one experiment, and the conversion of runs to job
records.

A running search writes through :class:`StoreSender`, in the writer's thread.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from plait.core.lifecycle import JobState
from plait.core.objectives import Objective
from plait.tracking import names
from plait.tracking.leaderboard import JobRecord, Leaderboard
from plait.tracking.location import Location
from plait.tracking.names import TAG_JOB, TAG_PARENT, TAG_SEARCH, TAG_STUDY, TAG_TRIAL
from plait.tracking.records import LogFolder, LogPoints, LogText, OpenRun, SetStatus, UseData
from plait.tracking.values import parameter_value
from plait.tracking.writer import RefusedError, Request, UpdateRun

ENTRIES_PER_REQUEST = 1000
PAIRS_PER_REQUEST = 100  # parameters or tags
PARAMETER_LENGTH = 6000
TAG_LENGTH = 8000
DATA_NAME, DATA_DIGEST = 500, 36
PAGE = 1000
_MARKS = re.compile(r"['\"\\`]")
FOR_GOOD = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}

# Hide messages about new tables, and tracebacks of an unavailable database, which Plait reports itself.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # the same for a server, at each attempt


class Store:
    """One experiment of one MLflow store; every method is one or a few blocking calls.

    Raises:
        mlflow.exceptions.MlflowException: from every method, if the store refuses or does not answer.
    """

    def __init__(self, location: Location, experiment: str) -> None:
        self.location = location
        self.experiment = experiment
        self.client = MlflowClient(location.uri)
        self.experiment_id = self._experiment_id()
        self._began: dict[str, int] = {}  # when runs began that were made here and have not ended

    def _experiment_id(self) -> str:
        found = self.client.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        # With this kind, MLflow's pages show training runs instead of conversations.
        tags = {"mlflow.experimentKind": "custom_model_development"}
        try:
            return str(self.client.create_experiment(self.experiment, self.location.artifacts, tags))
        except MlflowException as error:
            found = self.client.get_experiment_by_name(self.experiment)
            if error.error_code != "RESOURCE_ALREADY_EXISTS" or found is None:
                raise
            return str(found.experiment_id)  # another process made it in between

    # ---- reading ---------------------------------------------------------------------------------------

    def searches(self, name: str | None = None, study: str = "") -> list[Run]:
        """Runs of searches, newest first; only those of a name and a study, if given."""
        tags = {TAG_SEARCH: name, TAG_STUDY: study}
        wanted = {tag: value for tag, value in tags.items() if value}
        return list(self._runs(wanted, f"tags.`{TAG_SEARCH}` IS NOT NULL AND tags.`{TAG_TRIAL}` IS NULL"))

    def children(self, parent_id: str) -> dict[int, Run]:
        """Runs of a search's jobs by trial number; if a trial has several, the newest."""
        newest_last = reversed(self.all_children(parent_id))
        return {int(run.data.tags[TAG_TRIAL]): run for run in newest_last}

    def all_children(self, parent_id: str) -> list[Run]:
        """Runs of a search's jobs, newest first; there may be several for one trial."""
        return list(self._runs({TAG_PARENT: parent_id}, f"tags.`{TAG_TRIAL}` IS NOT NULL"))

    def child(self, parent_id: str, *, trial: int | None = None, job: str | None = None) -> Run | None:
        """The run of a trial, or of a job given by name; the newest if there are several, None if there is
        none."""
        key, value = (TAG_JOB, job) if job is not None else (TAG_TRIAL, str(trial))
        return next(self._runs({TAG_PARENT: parent_id, key: value}, page_size=1), None)

    def _runs(self, tags: Mapping[str, str], condition: str = "", page_size: int = PAGE) -> Iterator[Run]:
        """Runs with these values of tags, newest first.

        MLflow's filters cannot express a quote or a backslash; these are replaced by a wildcard, and the
        results are filtered again.
        """
        conditions = [
            f"tags.`{key}` LIKE '{_MARKS.sub('_', value)}'"
            if _MARKS.search(value)
            else f"tags.`{key}` = '{value}'"
            for key, value in tags.items()
        ]
        token = None
        while True:
            page = self.client.search_runs(
                [self.experiment_id],
                " AND ".join([*conditions, *([condition] if condition else [])]),
                max_results=page_size,
                order_by=["attributes.start_time DESC"],
                page_token=token,
            )
            yield from (run for run in page if tags.items() <= run.data.tags.items())
            token = page.token
            if not token:
                return

    def run(self, run_id: str) -> Run | None:
        """The run with this id, if it exists in this experiment."""
        return next(self._runs({}, f"attributes.run_id = '{run_id}'"), None)

    # ---- writing ---------------------------------------------------------------------------------------

    def create_run(self, name: str, tags: Mapping[str, str], time_ms: int) -> str:
        """Make a run with status RUNNING and return its id."""
        shortened = {key: value[:TAG_LENGTH] for key, value in tags.items()}
        run_id = str(self.client.create_run(self.experiment_id, time_ms, shortened, name).info.run_id)
        self._began[run_id] = time_ms
        return run_id

    def log_parameters(self, run_id: str, parameters: Mapping[str, str]) -> None:
        """Log parameters; existing ones must have the same value."""
        pairs = list(parameters.items())
        for start in range(0, len(pairs), PAIRS_PER_REQUEST):
            part = pairs[start : start + PAIRS_PER_REQUEST]
            self.client.log_batch(
                run_id, params=[Param(key, value[:PARAMETER_LENGTH]) for key, value in part]
            )

    def update(self, run_id: str, points: Iterable[LogPoints], tags: Mapping[str, str]) -> None:
        """Log metric values and set or replace tags, in as few requests as the limits allow."""
        metrics = [
            Metric(key, value, point.time_ms, point.step)
            for point in points
            for key, value in point.values.items()
        ]
        pairs = [RunTag(key, value[:TAG_LENGTH]) for key, value in tags.items()]
        while metrics or pairs:
            some = pairs[:PAIRS_PER_REQUEST]
            most = ENTRIES_PER_REQUEST - len(some)
            self.client.log_batch(run_id, metrics=metrics[:most], tags=some)
            metrics, pairs = metrics[most:], pairs[PAIRS_PER_REQUEST:]

    def log_data(self, run_id: str, data: UseData) -> None:
        """Log the data set that a run trains on; repeating this has no effect."""
        name, digest = data.name[:DATA_NAME], data.digest[:DATA_DIGEST]
        found = Dataset(name, digest, "local", data.source, None, data.profile)
        used = DatasetInput(found, [InputTag(MLFLOW_DATASET_CONTEXT, "train")])
        self.client.log_inputs(run_id, [used])

    def set_status(self, run_id: str, status: str, time_ms: int) -> None:
        """Set a run's status; its end is never before its start, whatever the clock says."""
        if status in ("RUNNING", "SCHEDULED"):
            self.client.update_run(run_id, status=status)
            return
        if (began := self._began.pop(run_id, None)) is None:
            began = self.client.get_run(run_id).info.start_time
        self.client.set_terminated(run_id, status, max(time_ms, began))

    # ---- jobs ------------------------------------------------------------------------------------------

    def jobs(self, parent_id: str) -> list[JobRecord]:
        """Records of a search's jobs, including the tag for the Pareto front."""
        return [job_record(child) for child in self.children(parent_id).values()]


class StoreSender:
    """Carries out the writer's requests; knows which MLflow run belongs to which key of a search.

    ``connect`` returns the store, or raises if it does not answer; ``ids`` is filled with MLflow's ids of
    runs, by key, as these are made or found.
    """

    def __init__(self, connect: Callable[[], Store], parent_id: str, ids: dict[str, str]) -> None:
        self._connect = connect
        self._parent_id = parent_id
        self._ids = ids
        self._had: dict[str, dict[str, int]] = {}  # last steps of runs that were there

    def send(self, request: Request) -> None:
        """Carry one request out.

        Raises:
            RefusedError: the store will never take it.
            Exception: the store does not answer, or not now.
        """
        try:
            store = self._connect()
            if isinstance(request, OpenRun):
                self._open(store, request)
            else:
                self._send(store, self._id(store, request.run), request)
        except MlflowException as error:
            if error.error_code in FOR_GOOD:
                raise RefusedError(f"{request.run}: {error.message}") from error
            raise
        except FileNotFoundError as error:
            raise RefusedError(f"{request.run}: {error}") from error

    def _send(
        self, store: Store, run_id: str, request: UseData | UpdateRun | LogText | LogFolder | SetStatus
    ) -> None:
        match request:
            case UseData():
                store.log_data(run_id, request)
            case UpdateRun():
                own = run_id == self._parent_id
                points = self._not_anothers(store, request) if own else self._new_points(request)
                store.update(run_id, points, request.tags)
            case LogText():
                text = Path(request.file).read_text(encoding="utf-8")
                store.client.log_text(run_id, text, request.path)
            case LogFolder():
                if not Path(request.folder).is_dir():
                    raise FileNotFoundError(
                        f"{request.folder} does not exist, so it cannot be kept as {request.path}"
                    )
                store.client.log_artifacts(run_id, request.folder, request.path)
            case SetStatus():
                store.set_status(run_id, request.status, request.time_ms)
            case _:
                assert_never(request)

    def _id(self, store: Store, run: str) -> str:
        """The id of a run that this process, an earlier one or another worker of the search has made."""
        if run not in self._ids:
            found = store.child(self._parent_id, job=run)
            if found is None:
                raise RefusedError(f"{run}: its run could not be created")
            self._ids[run] = found.info.run_id
            self._had[run] = last_steps(found)  # another worker may have trained the job since
        return self._ids[run]

    def _open(self, store: Store, request: OpenRun) -> None:
        """Make the run, or resume the existing one: from before, from another worker, or from an attempt
        whose answer was lost."""
        run = store.child(request.parent_id, trial=request.trial)
        if run is None:
            run_id = store.create_run(request.name, request.tags, request.time_ms)
            parameters = request.parameters
        else:
            run_id = run.info.run_id
            self._had[request.run] = last_steps(run)
            there = run.data.params
            parameters = {key: value for key, value in request.parameters.items() if key not in there}
            store.set_status(run_id, "RUNNING", request.time_ms)
            store.update(run_id, (), request.tags)
        self._ids[request.run] = run_id
        store.log_parameters(run_id, parameters)

    def _new_points(self, request: UpdateRun) -> list[LogPoints]:
        """The points without those that the run had when it was found. A job that resumes from a checkpoint
        on another machine, or without its log, repeats some steps, and no step may count twice."""
        had = self._had.get(request.run)
        if not had:
            return list(request.points)
        kept = []
        for point in request.points:
            fresh = {key: value for key, value in point.values.items() if point.step > had.get(key, -1)}
            if values := point.values if point.late else fresh:
                kept.append(replace(point, values=values))
        return kept

    def _not_anothers(self, store: Store, request: UpdateRun) -> list[LogPoints]:
        """The points of the search's own curves that come after what is there: a process that had the store
        out of reach, or was dead, may send its points after another one has continued the curves."""
        newest = newest_point(store.client.get_run(self._parent_id))
        step, seconds = newest.step, newest.values.get(names.SEARCH_SECONDS, 0.0)
        kept = []
        for point in request.points:
            now = point.values.get(names.SEARCH_SECONDS, seconds)
            if point.step > step and now >= seconds:
                step, seconds = point.step, now
                kept.append(point)
            elif point.time_ms == newest.time_ms:  # it may be there in part
                kept.append(point)
        return kept


NO_POINT = LogPoints("", 0, 0, {})


def newest_point(run: Run) -> LogPoints:
    """The last point of a search's own curves in its run, as it was read."""
    # Only the protobuf message has the steps of the newest points, without reading whole histories.
    points = (each for each in run.data.to_proto().metrics if each.key == names.SEARCH_SECONDS)
    last = next(points, None)
    if last is None:
        return NO_POINT
    return LogPoints(run.info.run_id, int(last.step), last.timestamp, dict(run.data.metrics))


def last_steps(run: Run) -> dict[str, int]:
    """The last step of every metric of a run, as it was read."""
    return {each.key: int(each.step) for each in run.data.to_proto().metrics}


def job_record(run: Run) -> JobRecord:
    """The record of a job from its run. For a job that has ended, its step is in a tag; otherwise it is the
    step of its newest point."""
    tags, metrics = run.data.tags, run.data.metrics
    step = _step(run)
    state = JobState(tags[names.TAG_STATE])
    best_step = metrics.get(names.EVAL_BEST_STEP)
    best = state == JobState.FINISHED and run.data.params.get("train.keep") == "best"
    last = metrics.get(names.EVAL_BEST_LOSS if best else names.EVAL_LOSS)
    return JobRecord(
        name=tags.get(names.TAG_JOB, run.info.run_name),
        trial=int(tags[names.TAG_TRIAL]),
        parameters={key: parameter_value(text) for key, text in run.data.params.items()},
        state=state,
        group=tags.get(names.TAG_GROUP, ""),
        step=step,
        steps=int(tags.get(names.TAG_STEPS, step)),
        loss=metrics.get(names.TRAIN_LOSS),
        eval_loss=metrics.get(names.EVAL_KEPT_LOSS, last),
        best_eval_loss=metrics.get(names.EVAL_BEST_LOSS),
        best_eval_step=None if best_step is None else int(best_step),
        accuracy=metrics.get(names.EVAL_ACCURACY),
        objective=metrics.get(names.OBJECTIVE),
        tokens=int(metrics.get(names.TRAIN_TOKENS, 0.0)),
        device_seconds=metrics.get(names.DEVICE_SECONDS, 0.0),
        completion_seconds=metrics.get(names.COMPLETION_SECONDS),
        adapter=tags.get(names.TAG_ADAPTER, ""),
        reason=tags.get(names.TAG_REASON, ""),
        run_id=run.info.run_id,
        others=_others(metrics),
        feasible=tags.get(names.TAG_FEASIBLE) != "false",
        on_front=tags.get(names.TAG_PARETO) == "true",
        outside=tags.get(names.TAG_OUTSIDE, ""),
    )


def stored_leaderboard(run: Run, children: Mapping[int, Run]) -> Leaderboard:
    """All jobs of a search, from its run and theirs."""
    tags = run.data.tags
    _, *others = json.loads(tags.get(names.TAG_OBJECTIVES, "[null]"))
    further = tuple(Objective(metric, direction) for metric, direction in others)
    board = Leaderboard(tags[names.TAG_DIRECTION], len(children), others=further)
    for child in children.values():
        board.add(job_record(child))
    return board


def _step(run: Run) -> int:
    tags = run.data.tags
    ended = int(tags.get(names.TAG_STEP, "0"))
    if JobState(tags[names.TAG_STATE]).ended:
        return ended
    return max(last_steps(run).values(), default=ended)


def _others(metrics: Mapping[str, float]) -> tuple[float, ...]:
    """The objectives beyond the first."""
    named = itertools.takewhile(metrics.__contains__, map(names.objective_name, itertools.count(1)))
    return tuple(metrics[name] for name in named)
