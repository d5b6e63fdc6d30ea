"""The beginning of a search's run: found or made in the store, or taken from the study while that is away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.core.lifecycle import JobResult
from plait.tracking import names
from plait.tracking.board import JobRecord
from plait.tracking.check import AwayError, storage_errors
from plait.tracking.connection import Connection
from plait.tracking.left import send_spools
from plait.tracking.operations import OpenRun
from plait.tracking.outgoing import spool_folder
from plait.tracking.parameters import parameter_text
from plait.tracking.records import record_of
from plait.tracking.search_facts import SearchFacts
from plait.tracking.store import Store
from plait.tracking.values import run_parameters, user


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known, without the store, of a search that was recorded in it before.

    Attributes:
        run_id: MLflow's id of the search's run.
        over: its trials that are over.
    """

    run_id: str
    over: Sequence[JobResult] = ()


@dataclass(frozen=True, slots=True)
class ParentRun:
    """How a search's run stands in the store.

    Attributes:
        made: just now.
        step, seconds: of the last point of the search's own curves.
        jobs: all that have a run.
        notices: what was left of ended processes and the store did not take.
        away: the store does not answer; of all this but the id is known.
    """

    run_id: str
    made: bool = False
    step: int = 0
    seconds: float = 0.0
    jobs: Sequence[JobRecord] = ()
    notices: Sequence[str] = ()
    away: AwayError | None = None


def begin_run(
    connection: Connection, search: SearchFacts, begun: Begun | None, tags: Mapping[str, str], time_ms: int
) -> ParentRun:
    """The run of a search that begins, or goes on: asked of the store, which gets what ended processes left
    first; where it is away, the one that is known from before.

    Raises:
        AwayError: the store is away, and no run is known.
        StorageError: it refuses.
    """
    try:
        store = connection.store()
        notices = send_spools(store, spool_folder(store.location.root, search.name))
        with storage_errors(store.location):
            return replace(find_or_make(store, search, tags, time_ms), notices=notices)
    except AwayError as error:
        if begun is None or search.fresh:
            raise
        connection.run_id = begun.run_id
        return ParentRun(begun.run_id, away=error)


def find_or_make(store: Store, search: SearchFacts, tags: Mapping[str, str], time_ms: int) -> ParentRun:
    """The newest run of a search's name and study, or a new one.

    Raises:
        mlflow.exceptions.MlflowException: the store refuses or does not answer.
    """
    runs = [] if search.fresh else store.searches(search.name, search.study)
    if not runs:
        run_id = store.create_run(search.name, tags, time_ms)
        store.log_parameters(run_id, run_parameters(search.settings))
        return ParentRun(run_id, made=True)
    run_id = str(runs[0].info.run_id)
    last = store.client.get_metric_history(run_id, names.SEARCH_SECONDS)
    step = max((point.step for point in last), default=0)
    seconds = runs[0].data.metrics.get(names.SEARCH_SECONDS, 0.0)
    return ParentRun(run_id, step=step, seconds=seconds, jobs=stored_jobs(store, run_id))


def open_job(record: JobRecord, search: str, parent_id: str, time_ms: int, *, known: bool) -> OpenRun:
    """Makes a job's run, or goes on with the one its trial has; ``known`` as of OpenRun."""
    tags = {
        names.TAG_SEARCH: search,
        names.TAG_TRIAL: str(record.trial),
        names.TAG_JOB: record.name,
        names.TAG_STATE: record.state,
        names.TAG_PARENT: parent_id,
        "mlflow.user": user(),
    }
    pairs = tuple((key, parameter_text(value)) for key, value in record.parameters.items())
    return OpenRun(record.name, record.trial, parent_id, pairs, tuple(tags.items()), time_ms, known)


def stored_jobs(store: Store, run_id: str) -> list[JobRecord]:
    """A search's jobs as the store has them; who is tagged as on the front is so there."""
    return [record_of(child) for child in store.children(run_id).values()]
