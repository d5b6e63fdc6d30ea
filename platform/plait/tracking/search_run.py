"""The search's own run in MLflow: its start, its curves, its tables of all jobs, and its final state.

Each process of a search knows its own jobs and, about those of other processes, what the store had when it
last read it. While it trains, it writes this view; when all trials have ended, the last process writes the
final state from the study, which knows them all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlflow.entities import Run

from plait.core.lifecycle import STORED_AS, JobResult, JobState
from plait.core.settings import TrackingSettings
from plait.tracking import names
from plait.tracking.connection import AwayError, Connection, open_store, storage_errors
from plait.tracking.event_log import EventLog, free_logs, logs_folder, time_ms
from plait.tracking.facts import SearchFacts, run_parameters
from plait.tracking.leaderboard import JobRecord, Leaderboard, to_split_json, varying
from plait.tracking.location import locate
from plait.tracking.mlflow_store import NO_POINT, Store, StoreSender, newest_point, stored_leaderboard
from plait.tracking.records import LogPoints
from plait.tracking.ui import page_settings
from plait.tracking.values import finite, grown_stride, is_kept
from plait.tracking.writer import BATCH, RefusedError, describe_refused, gather
from plait.utils.addresses import redact

REFRESH_SECONDS = 10.0  # interval between two leaderboards of a running search
REFRESH_SHARE = 0.005  # share of the time that may be spent on making them
RISING = {names.TRAIN_TOKENS, names.DEVICE_SECONDS}  # sums that fall back to checkpoints after a kill
SUMS = (  # over all jobs, including those of earlier processes
    names.TRAIN_TOKENS,
    names.DEVICE_SECONDS,
    names.SEARCH_THROUGHPUT,
    names.SEARCH_ENDED,
    names.SEARCH_FAILED,
)

# ---- the beginning -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A search's run as the store has it.

    Attributes:
        made: just now.
        newest: point of the search's own curves.
        jobs: all that have a run.
        notices: what ended processes left and the store did not take.
        away: the store does not answer; of all this only the id is known.
    """

    run_id: str
    made: bool = False
    newest: LogPoints = NO_POINT
    jobs: Sequence[JobRecord] = ()
    notices: Sequence[str] = ()
    away: AwayError | None = None


def begin_run(
    connection: Connection, search: SearchFacts, known: str, tags: Mapping[str, str], now: int
) -> FoundRun:
    """The run of a search that begins or resumes: from the store, after sending what ended processes left,
    or, if that is unavailable, the one ``known`` from before, if any.

    Raises:
        AwayError: the store is unavailable, and no run is known.
        StorageError: the store refuses.
    """
    try:
        store = connection.store()
        notices = send_logs(store, logs_folder(store.location.root, search.name))
        with storage_errors(store.location):
            return replace(find_or_make(store, search, tags, now), notices=notices)
    except AwayError as error:
        if not known:
            raise
        return FoundRun(known, away=error)


def find_or_make(store: Store, search: SearchFacts, tags: Mapping[str, str], now: int) -> FoundRun:
    """The newest run of a search's name and study, or a new one.

    Raises:
        mlflow.exceptions.MlflowException: the store refuses or does not answer.
    """
    runs = store.searches(search.name, search.study)
    if not runs:
        run_id = store.create_run(search.name, tags, now)
        store.log_parameters(run_id, run_parameters(search.settings))
        tag, shown = page_settings(run_id, search.settings.search, search.searched)
        store.client.set_experiment_tag(store.experiment_id, tag, shown)
        return FoundRun(run_id, made=True)
    run_id = str(runs[0].info.run_id)
    return FoundRun(run_id, newest=newest_point(runs[0]), jobs=store.jobs(run_id))


# ---- what ended processes left ------------------------------------------------------------------------


def left_unsent(settings: TrackingSettings, search: str) -> list[str]:
    """What ended processes of a search left unsent, in words."""
    found = []
    for log in free_logs(logs_folder(locate(settings).root, search)):
        if log.waiting:
            found.append(log.describe_unsent())
        log.close()
    return found


def send_left(settings: TrackingSettings, search: str) -> list[str]:
    """Send what ended processes of a search left unsent. Waits for the store.

    Returns:
        What can never be sent, in words.

    Raises:
        AwayError: the store does not answer; what was not sent is kept.
        StorageError: it refuses.
    """
    location = locate(settings)
    folder = logs_folder(location.root, search)
    if not any(folder.glob("*")):
        return []
    return send_logs(open_store(location, settings.experiment), folder)


def send_logs(store: Store, folder: Path) -> list[str]:
    """Send the unsent records of a folder's logs that no process has open; otherwise as :func:`send_left`.

    The logs are kept, because they know which points are written. A log is not sent if the search's run is
    not in this store, or was deleted.
    """
    troubles: list[str] = []
    for log in free_logs(folder):
        try:
            if log.waiting:
                troubles += _send(store, log)
        finally:
            log.close()
    return troubles


def _send(store: Store, log: EventLog) -> list[str]:
    head = log.head
    with storage_errors(store.location):
        if store.run(head.parent_id) is None:
            return [log.describe_unsent()]
        sender = StoreSender(lambda: store, head.parent_id, {head.parent: head.parent_id})
        refused: list[str] = []
        while batch := log.peek(BATCH):
            for request in gather(batch):
                try:
                    sender.send(request)
                except RefusedError as refusal:
                    refused.append(redact(str(refusal)))
            log.drop()
    return describe_refused(refused)


# ---- while it is running -----------------------------------------------------------------------------


class SearchClock:
    """Steps and seconds of the search's own curves, which one process at a time writes, whichever the study
    names; the next one continues after the last point that it knows of.

    Attributes:
        writes: whether this process writes them.
    """

    def __init__(self, rising: Callable[[], float]) -> None:
        self.writes = False
        self._rising, self._started = rising, rising()
        self._step, self._before = 0, 0.0
        self._sums = dict.fromkeys(RISING, 0.0)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the search, including those of earlier processes."""
        return self._before + self._rising() - self._started

    def follow(self, point: LogPoints) -> None:
        """Continue after a point, unless a later one is known: time and sums only increase."""
        self._step = max(self._step, point.step)
        self._before += max(point.values.get(names.SEARCH_SECONDS, 0.0) - self.seconds, 0.0)
        self.risen(point.values)

    def next(self) -> tuple[int, float]:
        """The next step and its seconds."""
        self._step += 1
        return self._step, self.seconds

    def risen(self, values: Mapping[str, float]) -> dict[str, float]:
        """The values of a point, with sums that do not fall: what a kill took back is trained again, and
        until then such a curve stays where it was."""
        for name in RISING & values.keys():
            self._sums[name] = max(self._sums[name], values[name])
        return {name: self._sums.get(name, value) for name, value in values.items()}


class SearchRun:
    """Writes the search's run while the search is running.

    Attributes:
        whole: whether the board has all jobs that had ended when this process began.
        front: jobs that are tagged as being on the Pareto front.
    """

    def __init__(self, log: EventLog, board: Leaderboard, clock: SearchClock, most: int) -> None:
        self.whole = True
        self.front: set[str] = set()
        self.clock = clock
        self._log = log
        self._key = log.head.parent
        self._board = board
        self._most = most
        self._next = 0.0  # time at which the leaderboard is written again
        self._tables = [*([names.PARETO_FILE] if board.others else []), names.LEADERBOARD_FILE]
        self._wrote = False  # whether this process wrote the curves the last time

    def write_point(self, more: Mapping[str, float]) -> None:
        """Write one point of the search's curves, with ``more`` values; the last point, without any, is
        always written. Sums over jobs that are not known yet are left out."""
        wrote, self._wrote = self._wrote, self.clock.writes
        if not self.clock.writes:
            return
        if not wrote:
            self._log.adopt_ended()  # which may have points that the store does not have yet
        if self._log.newest is not None:
            self.clock.follow(self._log.newest)
        step, seconds = self.clock.next()
        if not more or is_kept(step, grown_stride(step, self._most)):
            self._log.points(self._key, step, self._values(more, seconds))

    def _values(self, more: Mapping[str, float], seconds: float) -> dict[str, float]:
        """The values of a point. They are read off all jobs, so only of a point that is written."""
        values = self.clock.risen(dict(more) | search_values(self._board, seconds))
        unknown = () if self.whole else SUMS
        return {key: value for key, value in values.items() if key not in unknown}

    def write_table(self, path: str, text: str) -> None:
        """Write an artifact that MLflow shows as a table: JSON with ``columns`` and ``data``."""
        self._log.text(self._key, path, text)
        if path not in self._tables:
            self._tables.append(path)
            self._log.tags(self._key, self._table_tag())

    def refresh(self, *, now: bool = False) -> None:
        """Write leaderboard, Pareto front and best so far, if due, because this takes longer with more
        jobs."""
        started = time.monotonic()
        if not now and started < self._next:
            return
        board = self._board
        rows = board.ordered()
        for path, text in tables(board, rows).items():
            self._log.text(self._key, path, text)
        front = {row.name for row in rows if row.on_front}
        for name in sorted(front ^ self.front):
            self._log.tags(name, {names.TAG_PARETO: str(name in front).lower()})
        self.front = front
        self._log.tags(self._key, self._table_tag() | note(board))
        self._next = started + max(REFRESH_SECONDS, (time.monotonic() - started) / REFRESH_SHARE)

    def _table_tag(self) -> dict[str, str]:
        """The tag that tells MLflow's pages which artifacts are tables."""
        return {names.TAG_TABLES: json.dumps([{"path": path, "type": "table"} for path in self._tables])}


def search_values(board: Leaderboard, seconds: float) -> dict[str, float]:
    """Totals of a search and its best so far, for the search's run."""
    values: dict[str, float] = {
        names.TRAIN_TOKENS: board.tokens,
        names.DEVICE_SECONDS: board.device_seconds,
        names.SEARCH_SECONDS: seconds,
        names.SEARCH_RUNNING: board.count(JobState.RUNNING),
        names.SEARCH_ENDED: sum(job.ended for job in board.jobs.values()),
        names.SEARCH_FAILED: board.count(JobState.FAILED),
    }
    if seconds > 0:
        values[names.SEARCH_THROUGHPUT] = board.tokens / seconds
    best = board.best()
    if best is not None and best.objective is not None:
        values |= {names.SEARCH_BEST: best.objective, names.SEARCH_BEST_TRIAL: best.trial}
    if board.others:
        values[names.SEARCH_FRONT] = len(board.front())
    return values


def tables(board: Leaderboard, rows: Sequence[JobRecord]) -> dict[str, str]:
    """The leaderboard and, of several objectives, the Pareto front, as artifacts that MLflow shows as tables;
    ``rows``: the board's, best first."""
    found = {names.LEADERBOARD_FILE: to_split_json(rows)}
    if board.others:
        front = [row for row in rows if row.on_front]
        found[names.PARETO_FILE] = to_split_json(front, varying(rows))
    return found


def note(board: Leaderboard) -> dict[str, str]:
    """The tag with one line for the run's page about what the search has found; none if it has found
    nothing."""
    if board.others:
        front = ", ".join(row.name for row in board.front())
        return {names.TAG_NOTE: f"Pareto front so far: {front or 'empty'}"}
    best = board.best()
    if best is None or best.objective is None:
        return {}
    return {names.TAG_NOTE: f"Best so far: {best.name}, objective {best.objective:.6g}"}


# ---- the end -----------------------------------------------------------------------------------------


def conclude(settings: TrackingSettings, search: str, study: str, results: Sequence[JobResult]) -> str | None:
    """End the run of a search whose trials have ended, using :func:`write_final`, if its last process could
    not.

    Returns:
        MLflow's id of the run; None if it is not in the store.

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
        _settle(store, runs[0], JobState.FINISHED, "")
    return run_id


def _settle(store: Store, run: Run, state: JobState, reason: str) -> None:
    """Give a run the state in which the study says that it ended, if the store has another."""
    status = STORED_AS[state].mlflow
    if (run.info.status, run.data.tags.get(names.TAG_STATE)) != (status, state):
        store.update(run.info.run_id, (), {names.TAG_STATE: state, names.TAG_REASON: reason})
        store.set_status(run.info.run_id, status, time_ms())


def write_final(store: Store, run_id: str, results: Sequence[JobResult]) -> Leaderboard:
    """Write leaderboard, Pareto front, best so far and totals of a search whose trials have ended, from the
    study; other facts about each job come from the store.

    Only one process may do this at a time, after it has sent everything else, so that what the last one
    writes is complete.

    Raises:
        mlflow.exceptions.MlflowException: the store refuses or does not answer.
    """
    run = store.client.get_run(run_id)
    children = store.children(run_id)
    board = stored_leaderboard(run, children)
    for result in results:
        board.take_result(result)
        if result.trial in children:  # a killed host's records, if they come late, begin its run again
            _settle(store, children[result.trial], result.state, result.reason)
    rows = board.ordered()
    for path, text in tables(board, rows).items():
        store.client.log_text(run_id, text, path)
    for row in rows if board.others else ():
        was = row.trial in children and children[row.trial].data.tags.get(names.TAG_PARETO) == "true"
        if row.run_id and was != row.on_front:
            store.update(row.run_id, (), {names.TAG_PARETO: str(row.on_front).lower()})
    newest = newest_point(run)
    values = finite(search_values(board, newest.values.get(names.SEARCH_SECONDS, 0.0)))
    known = values.items() <= run.data.metrics.items()
    last = [] if known else [LogPoints(run_id, newest.step + 1, time_ms(), values)]
    store.update(run_id, last, note(board))
    return board
