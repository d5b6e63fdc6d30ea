"""The last word of a search's run on the whole, where several processes trained it.

Each of them knows its own jobs and what the others had sent when it began. What it writes while it trains is
its own view; when all trials are over, the study knows them all, and whoever ends last writes from there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from plait.core.lifecycle import STORED_AS, JobResult, JobState
from plait.core.settings import TrackingSettings
from plait.tracking import names
from plait.tracking.board import Board, JobRecord
from plait.tracking.check import open_store, storage_errors
from plait.tracking.leaderboard import to_split_json, varying
from plait.tracking.location import locate
from plait.tracking.operations import LogPoints
from plait.tracking.records import stored_board
from plait.tracking.store import Store
from plait.tracking.values import finite, search_values


def conclude(settings: TrackingSettings, search: str, study: str, results: Sequence[JobResult]) -> str | None:
    """End the run of a search whose trials are over, as :func:`write_final` has it, where its last process
    could not.

    Returns:
        MLflow's id of the run; None where the store has none.

    Raises:
        StorageError: the store does not answer or refuses.
    """
    location = locate(settings)
    store = open_store(location, settings.experiment)
    with storage_errors(location):
        runs = store.searches(search, study)
        if not runs:
            return None
        run_id = str(runs[0].info.run_id)
        write_final(store, run_id, results)
        told = runs[0].info.status, runs[0].data.tags.get(names.TAG_STATE)
        status = STORED_AS[JobState.FINISHED].mlflow
        if told != (status, JobState.FINISHED):
            store.update(run_id, (), [(names.TAG_STATE, JobState.FINISHED), (names.TAG_REASON, "")])
            store.end_run(run_id, status, int(time.time() * 1000))
    return run_id


def write_final(store: Store, run_id: str, results: Sequence[JobResult]) -> Board:
    """Write leaderboard, Pareto front, best so far and totals of a search whose trials are over, as the study
    has them; the rest of each job as the store has it.

    Of several processes only one may do so at a time, after it has sent everything else: then what the last
    one writes is whole.

    Raises:
        mlflow.exceptions.MlflowException: the store refuses or does not answer.
    """
    run = store.client.get_run(run_id)
    children = store.children(run_id)
    board = stored_board(run, children)
    for result in results:
        take_result(board, result)
    rows = board.ordered()
    store.log_text(run_id, names.LEADERBOARD_FILE, to_split_json(rows))
    if board.others:
        front = [row for row in rows if row.on_front]
        store.log_text(run_id, names.PARETO_FILE, to_split_json(front, varying(rows)))
        for row in rows:
            was = row.trial in children and children[row.trial].data.tags.get(names.TAG_PARETO) == "true"
            if row.run_id and was != row.on_front:
                store.update(row.run_id, (), [(names.TAG_PARETO, str(row.on_front).lower())])
    last = store.client.get_metric_history(run_id, names.SEARCH_SECONDS)
    step = max((point.step for point in last), default=0) + 1
    values = finite(search_values(board, run.data.metrics.get(names.SEARCH_SECONDS, 0.0)))
    point = LogPoints(run_id, step, int(time.time() * 1000), values)
    store.update(run_id, [point], [(names.TAG_NOTE, note)] if (note := so_far(board)) else ())
    return board


def so_far(board: Board) -> str:
    """What the search has found, in a line for its run's page; "" where there is nothing to tell."""
    if board.others:
        return f"Pareto front so far: {', '.join(row.name for row in board.front()) or 'empty'}"
    best = board.best()
    if best is None or best.objective is None:
        return ""
    return f"Best so far: {best.name}, objective {best.objective:.6g}"


def take_result(board: Board, result: JobResult) -> None:
    """Have on a board what the study says of a trial. One that failed before it had a run is none of the
    search's jobs."""
    if result.job not in board.jobs:
        if result.state == JobState.FAILED:
            return
        board.add(JobRecord(result.job, result.trial, result.parameters))
    board.handle(result)
