"""The beginning of a search's run: found or made in the store, or taken from the study while that is away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.tracking import names
from plait.tracking.board import JobRecord
from plait.tracking.final import Judged
from plait.tracking.records import record_of
from plait.tracking.search_facts import SearchFacts
from plait.tracking.store import Store
from plait.tracking.values import run_parameters


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known, without the store, of a search that was recorded in it before.

    Attributes:
        run_id: MLflow's id of the search's run.
        over: its trials that are over.
    """

    run_id: str
    over: Sequence[Judged] = ()


@dataclass(frozen=True, slots=True)
class ParentRun:
    """How a search's run stands in the store.

    Attributes:
        made: just now.
        step, seconds: of the last point of the search's own curves.
        jobs: all that have a run.
    """

    run_id: str
    made: bool = False
    step: int = 0
    seconds: float = 0.0
    jobs: Sequence[JobRecord] = ()


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


def stored_jobs(store: Store, run_id: str) -> list[JobRecord]:
    """A search's jobs as the store has them; who is tagged as on the front is so there."""
    return [record_of(child) for child in store.children(run_id).values()]
