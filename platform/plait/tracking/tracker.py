"""Records a search as MLflow runs: a parent for the search, a child for every job."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from plait.core.errors import StorageError
from plait.core.jobs import DataSpec, JobSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import (
    Event,
    GroupStep,
    JobAdmitted,
    JobEvaluated,
    JobGenerated,
    JobPaused,
    JobProgress,
    ModelFitted,
    SpansTaken,
)
from plait.core.settings import TrackingSettings
from plait.tracking import facts, names
from plait.tracking.connection import AwayError, Connection, storage_errors
from plait.tracking.event_log import EventLog, logs_folder, open_event_log
from plait.tracking.facts import DataFacts, SearchFacts
from plait.tracking.leaderboard import JobRecord, Leaderboard, job_of, orphan
from plait.tracking.location import check_folder, locate
from plait.tracking.mlflow_store import StoreSender, newest_point
from plait.tracking.records import Head, LogFolder, OpenRun, SetStatus, UseData
from plait.tracking.search_run import FoundRun, SearchClock, SearchRun, begin_run, write_final
from plait.tracking.spans import SpanLog
from plait.tracking.tables import SearchTables
from plait.tracking.ui import search_page
from plait.tracking.values import (
    Curve,
    evaluation_values,
    group_values,
    parameter_text,
    run_name,
    step_values,
)
from plait.tracking.writer import Writer
from plait.utils.addresses import redact

LAST_SECONDS = 1.0  # time for the store to accept the last records of a process that ends immediately
READ_PAUSE = 15.0  # least seconds between two reads of what other processes train
WATCH_PAUSE = 5.0  # seconds between two checks of which process writes the search's own curves
READ_SHARE = 0.005  # share of the time that may be spent on them


@dataclass(frozen=True, slots=True)
class _Started:
    """The state of a tracker between the start and the end of a search."""

    search: SearchFacts
    log: EventLog
    writer: Writer
    run: SearchRun
    tables: SearchTables
    spans: SpanLog


@dataclass(frozen=True, slots=True)
class Peers:
    """What the study knows about the processes of a search; by default, only this one exists.

    Attributes:
        training: whether others train jobs of the search.
        ended: jobs that have ended, in any process.
        orphaned: jobs whose worker is dead.
    """

    training: bool = False
    ended: Collection[str] = ()
    orphaned: Collection[str] = ()


class Tracker:
    """Writes a search to MLflow, in the background.

    All records go to the event log in the search's folder first, and from there to the store when it accepts
    them. All methods except :meth:`start_search`, :meth:`flush`, :meth:`commit` and :meth:`close` return
    immediately. As a context manager it ends the search's run and closes.

    Args:
        clock: returns seconds since 1970, for the time stamps of points and runs. If it is set back, stamps
            wait for it to catch up.
        rising: returns seconds that never decrease, to measure how long the search takes.
        peers: asks the study; also called by the writer's thread.

    Attributes:
        board: what is known about every job.
        notices: what the store did not accept, in words; filled by :meth:`start_search` and :meth:`close`.
        away: why the search began without the store, if it did.

    Raises:
        StorageError: from every method, if the event log cannot be written, as on a full disk.
    """

    def __init__(
        self,
        settings: TrackingSettings,
        *,
        clock: Callable[[], float] = time.time,
        rising: Callable[[], float] = time.monotonic,
        peers: Callable[[], Peers] = Peers,
        writes_curves: Callable[[], bool] = lambda: True,
    ) -> None:
        self.location = locate(settings)
        check_folder(self.location.root, "tracking.root")
        self.board = Leaderboard("minimize", 0)
        self.peers = peers
        self._writes_curves = writes_curves
        self.notices: list[str] = []
        self.away: AwayError | None = None
        self._settings = settings
        self._clock = clock
        self._stamp = 0  # the last one
        self._rising = rising
        self._connection = Connection(self.location, settings.experiment)
        self._started: _Started | None = None
        self._state: JobState | None = None  # the state in which the search ended
        self._ids: dict[str, str] = {}  # MLflow's, by key of the run; filled by the writer as it makes runs
        self._curves: dict[str, Curve] = {}  # of the jobs that train here
        self._data: dict[DataSpec, DataFacts] = {}
        self._own: set[str] = set()  # jobs that this process trains or has trained
        self._read: Sequence[JobRecord] = ()  # other processes' jobs, as read by the writer's thread
        self._had_others = False  # when it last looked
        self._next_reading = time.monotonic() + READ_PAUSE
        self._next_watch = time.monotonic() + WATCH_PAUSE

    # ---- the search ------------------------------------------------------------------------------------

    def start_search(self, search: SearchFacts, known: str = "") -> str:
        """Make the search's run, or resume the existing one; waits for the store while that answers.

        Args:
            known: MLflow's id of the run, if this store recorded it before; then it can begin while the store
                is unavailable.

        Returns:
            MLflow's id of the run.

        Raises:
            AwayError: the store does not answer, and no earlier start is known.
            StorageError: it refuses.
        """
        first, *others = search.settings.search.objectives
        self.board = Leaderboard(
            first.direction,
            search.settings.search.trials,
            others=tuple(others),
            searched=search.searched,
        )
        git = facts.git_state(Path.cwd())
        tags = facts.search_tags(search, git)
        found = begin_run(self._connection, search, known, tags, self._now())
        self.notices += found.notices
        log, run = self._start(search, found)
        run.whole = found.away is None
        self._take_others(found.jobs)
        orphan(self.board.jobs.values(), self.peers().orphaned)
        if not found.made:
            log.append(SetStatus(log.head.parent, "RUNNING", self._now()))
        log.tags(log.head.parent, tags)
        for path, content in facts.artifacts(search, git).items():
            self.record(path, content)
        return found.run_id

    def _start(self, search: SearchFacts, found: FoundRun) -> tuple[EventLog, SearchRun]:
        """Open log, writer and run."""
        folder = logs_folder(self.location.root, search.name)
        head = Head(found.run_id, f"search {search.name}", str(self.location))
        self._ids[head.parent] = self._connection.run_id = found.run_id
        log = open_event_log(folder, head, self._now)
        clock = SearchClock(self._rising)
        for point in (found.newest, log.newest):
            if point is not None:
                clock.follow(point)
        run = SearchRun(log, self.board, clock, self._settings.points)
        sender = StoreSender(self._connection.store, found.run_id, self._ids)
        writer = Writer(sender.send, log, self._settings.flush_seconds, self._between)
        if found.away is not None:
            self.away, writer.away = found.away, found.away.value
        tables = SearchTables(folder.parent, run.write_table)
        spans = SpanLog(folder.parent, f"{socket.gethostname()} {os.getpid()} {self._now()}")
        self._started = _Started(search, log, writer, run, tables, spans)
        with suppress(Exception):  # study and store may be unavailable just now: they are asked again
            self._settle_curves(self._started)
        return log, run

    @property
    def page(self) -> str:
        """The address of the search in MLflow's pages, if a server shows them; else ""."""
        store = self._connection.opened
        if store is None or not self.location.is_server:
            return ""
        return search_page(self.location.pages, store.experiment_id, self._connection.run_id)

    @property
    def unreachable(self) -> str:
        """Why the store accepts nothing at the moment; empty if it does, as far as is known."""
        return "" if self._started is None else self._started.writer.away

    def record(self, path: str, content: str | Mapping[str, Any]) -> None:
        """Store a fact with the search's run as an artifact: text unchanged, a mapping as JSON."""
        text = content if isinstance(content, str) else json.dumps(content, indent=2, default=str)
        self._log.text(self._log.head.parent, path, redact(text))

    def end_search(self, state: JobState = JobState.FINISHED, reason: str = "") -> None:
        """End the search's run as finished, paused or failed. Jobs that still train are marked paused, and a
        later process adopts them. While other processes train jobs of this search, they end their jobs' runs
        and the search's."""
        if self._state is not None or self._started is None:
            return
        self._state = state
        log, run = self._started.log, self._started.run
        peers = self.peers()
        for record in list(self.board.jobs.values()):
            mine = record.name in self._own or not (peers.training or record.name in peers.ended)
            if mine and record.state in (JobState.RUNNING, JobState.ORPHANED):
                left = JobState.PAUSED if record.state == JobState.RUNNING else record.state
                log.state(record.name, left, "The search was interrupted.")
        if (log.shared or not run.whole) and self._connection.opened:
            with suppress(StorageError), storage_errors(self.location):
                self._take_others(self._stored_jobs())
        self._started.tables.finish()
        run.refresh(now=True)
        if not run.clock.writes:  # the last process writes the last point, wherever it is
            with suppress(Exception):
                self._settle_curves(self._started)
        run.write_point({})
        if not peers.training:
            log.state(log.head.parent, state, reason)
        log.commit()

    # ---- jobs of other processes -----------------------------------------------------------------------

    def _between(self) -> None:
        """Other work of the writer's thread, so that training waits for no store and no study."""
        self._watch_curves()
        self._read_others()

    def _watch_curves(self) -> None:
        """Check now and then which process writes the search's own curves, and adopt them if it should be
        this one."""
        now, started = time.monotonic(), self._started
        if started is None or now < self._next_watch:
            return
        self._next_watch = now + WATCH_PAUSE
        self._settle_curves(started)

    def _settle_curves(self, started: _Started) -> None:
        clock, writes = started.run.clock, self._writes_curves()
        if writes and not clock.writes and (store := self._connection.opened) is not None:
            run = store.client.get_run(started.log.head.parent_id)
            clock.follow(newest_point(run))  # another process may have written them until now
        clock.writes = writes

    def _read_others(self) -> None:
        """Read now and then what other processes train, in the writer's thread, so that training does not
        wait for the store."""
        begun, started = time.monotonic(), self._started
        if started is None or begun < self._next_reading:
            return
        self._next_reading = begun + READ_PAUSE
        others = started.log.others()
        if others or self._had_others or not started.run.whole:  # once more after the last one's end
            self._read = self._stored_jobs()
            self._had_others = others
            took = time.monotonic() - begun
            self._next_reading = begun + max(READ_PAUSE, took / READ_SHARE)

    def _stored_jobs(self) -> list[JobRecord]:
        records = self._connection.store().jobs(self._log.head.parent_id)
        orphan(records, self.peers().orphaned)
        return records

    def _take_others(self, records: Sequence[JobRecord]) -> None:
        """Put the jobs that this process does not train on the board, as they are in the store, which may
        learn later than the study that one has ended, and how."""
        run = self._running.run
        for record in records:
            if record.on_front:
                run.front.add(record.name)
            known = self.board.jobs.get(record.name)
            if record.name in self._own:
                if known is not None:
                    known.recall(record)
                continue
            self._ids[record.name] = record.run_id
            if known is not None and known.ended and not record.ended:
                record.end_as(known)
            self.board.add(record)
        run.whole |= bool(records)

    # ---- jobs ------------------------------------------------------------------------------------------

    def start_job(self, job: JobSpec, trial: int, outside: str = "") -> float:
        """Announce a job, whose run has its name: make the run, or resume the one that its trial has.

        Args:
            outside: its settings outside the search space, as overrides.

        Returns:
            Device seconds that earlier processes recorded for it, also after its last checkpoint.
        """
        shown = job.parameters()
        record = self.board.jobs.get(job.name) or JobRecord(job.name, trial, shown)
        record.parameters, record.outside, record.searched_only = shown, outside, False
        self.board.add(record)
        self._own.add(job.name)
        log, search = self._log, self._running.search
        log.adopt_ended()
        tags = {
            names.TAG_SEARCH: search.name,
            names.TAG_TRIAL: str(record.trial),
            names.TAG_JOB: record.name,
            names.TAG_STATE: record.state,
            names.TAG_PARENT: log.head.parent_id,
            "mlflow.user": facts.user(),
        } | ({names.TAG_OUTSIDE: outside} if outside else {})
        texts = {key: parameter_text(value) for key, value in shown.items()}
        name = run_name(search.name, record.trial, shown, search.searched)
        log.append(OpenRun(job.name, record.trial, log.head.parent_id, texts, tags, self._now(), name))
        if (used := self._data.get(job.data)) is not None:
            self._note_data(job.name, used)
        return max(record.device_seconds, log.device_seconds(job.name))

    def use_data(self, found: Mapping[DataSpec, DataFacts]) -> None:
        """Log the data sets that the search's jobs train on, in its run and theirs."""
        self._data.update(found)
        for data in found.values():
            self._note_data(self._log.head.parent, data)

    def _note_data(self, run: str, data: DataFacts) -> None:
        source, profile = json.dumps(data.source, default=str), json.dumps(data.counts)
        self._log.append(UseData(run, data.name, data.digest, redact(source), profile))

    def lose(self, job: str) -> None:
        """Stop recording a job, because another process trains it from now on."""
        self._own.discard(job)
        self.board.jobs.pop(job, None)
        self._curves.pop(job, None)

    def handle(self, event: Event) -> None:
        """Log an event of the engine."""
        log = self._log
        watched = isinstance(event, JobAdmitted | JobPaused | JobResult)
        before = self.board.jobs.get(job_of(event)) if watched else None
        was = before.state if before else None
        tokens = before.tokens if before else None
        self.board.handle(event)
        match event:
            case JobProgress():
                curve = self._curves.get(event.job)
                if curve is None or curve.takes(event):
                    log.points(event.job, event.step, step_values(event))
            case JobEvaluated():
                self._write_left_out(event.job)
                best = self.board.jobs[event.job]
                log.points(
                    event.job, event.step, evaluation_values(event, best.best_eval_loss, best.best_eval_step)
                )
            case JobGenerated():
                log.points(event.job, event.step, {names.EVAL_ACCURACY: event.accuracy})
            case JobAdmitted():
                self._job_admitted(event, was)
            case JobPaused():
                self._write_left_out(event.job)
                newest = before is None or event.step >= before.step  # else it fell back
                if event.step > 0 and newest:  # more than the step's own by an evaluation
                    log.points(event.job, event.step, {names.DEVICE_SECONDS: event.device_seconds}, late=True)
                log.state(event.job, JobState.PAUSED, event.reason)
            case JobResult():
                self._job_ended(event, tokens)
            case GroupStep():
                read, self._read = self._read, ()
                self._take_others(read)
                self._running.run.write_point(group_values(event))
                self._running.tables.handle(event)
            case ModelFitted():
                self._running.tables.handle(event)
            case SpansTaken():
                self._running.spans.add(event)

    def _job_admitted(self, event: JobAdmitted, was: JobState | None) -> None:
        log, job = self._log, event.job.name
        self._curves.setdefault(job, Curve(event.steps, self._settings.points))
        if was == JobState.PAUSED:
            log.append(SetStatus(job, "RUNNING", self._now()))
        tags = {names.TAG_STATE: JobState.RUNNING, names.TAG_GROUP: event.group}
        log.tags(job, tags | {names.TAG_STEPS: str(event.steps)})

    def _write_left_out(self, job: str) -> None:
        """Write the newest step of a job, even if its number would be left out of the curve."""
        curve = self._curves.get(job)
        if curve is not None and (event := curve.left_out) is not None:
            curve.left_out = None
            self._log.points(job, event.step, step_values(event))

    def _job_ended(self, result: JobResult, tokens: int | None) -> None:
        """Record the search's decision on a job; ``tokens`` are those of its last complete step."""
        log, job, record = self._log, result.job, self.board.jobs[result.job]
        self._write_left_out(job)
        if result.state.ended:
            self._curves.pop(job, None)
        if result.completion_seconds is None:  # it did not train here
            record.step = max(record.step, log.last_step(job, names.TRAIN_LOSS) or 0)
        elif result.state.ended:  # if interrupted, the next step includes the rest
            log.points(job, result.step, {names.COMPLETION_SECONDS: result.completion_seconds})
            after = {names.TRAIN_TOKENS: float(result.tokens)} if 0 != tokens != result.tokens else {}
            log.points(job, result.step, after, late=True)
            # Steps after the result's, which a kill took back, may be recorded.
            last = max(result.step, log.last_step(job, names.DEVICE_SECONDS) or 0)
            log.points(job, last, {names.DEVICE_SECONDS: result.device_seconds}, late=True)
        if result.adapter is not None:
            if record.keeps_most_accurate and result.eval_loss is not None:
                log.points(job, result.step, {names.EVAL_KEPT_LOSS: result.eval_loss})
            log.append(LogFolder(job, str(result.adapter), names.ADAPTER_FOLDER))
            log.tags(job, {names.TAG_ADAPTER: str(result.adapter)})
        log.tags(job, {names.TAG_STEP: str(record.step)})
        if record.objective is not None:
            values = (record.objective, *record.others)
            log.points(job, record.step, {names.objective_name(at): value for at, value in enumerate(values)})
        if not result.feasible:
            log.tags(job, {names.TAG_FEASIBLE: "false"})
        log.state(job, result.state, record.reason)
        self._running.run.refresh()

    @property
    def writer_seconds(self) -> float:
        """CPU seconds that sending in the background took so far."""
        return self._running.writer.cpu_seconds

    @property
    def _running(self) -> _Started:
        if self._started is None:
            raise RuntimeError("start_search() comes first")
        return self._started

    @property
    def _log(self) -> EventLog:
        return self._running.log

    def _now(self) -> int:
        self._stamp = max(self._stamp, int(self._clock() * 1000))
        return self._stamp

    # ---- the end ---------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Wait until everything recorded so far is on the disk. After a crash it is sent, and steps that are
        trained again from a later checkpoint are not sent twice."""
        if self._started is not None:
            self._started.log.commit()

    def flush(self) -> None:
        """Wait until the store has everything.

        Raises:
            StorageError: it refused something, or did not answer several attempts; what it has not accepted
                is kept and tried again.
        """
        writer = self._running.writer
        writer.flush()
        if troubles := writer.troubles():
            raise StorageError(
                "\n".join(troubles),
                "The tracking store must answer, and the runs of a search must not be changed while it "
                "is running.",
                "Check the store. If its runs were changed, start the search again with search.fresh=true.",
            )

    def close(self, patience: float | None = None) -> None:
        """Send what is left and stop writing; further calls do nothing.

        What the store does not accept within ``patience`` seconds (None: as long as it accepts anything) is
        kept in the event log and listed in ``notices``; a search that has its results does not fail because
        of it.
        """
        started, self._started = self._started, None
        if started is None:
            return
        log = started.log
        started.spans.close()
        closed = started.writer.close(patience)
        self.notices += started.writer.troubles()
        if closed and self._state == JobState.FINISHED and not log.waiting:
            log.remove()  # it is no longer needed
        elif closed:
            log.close()

    def conclude(self, results: Sequence[JobResult]) -> None:
        """Write the summary of the search's run from the study, if other processes trained some of its
        trials. Called after :meth:`close`, when all trials have ended, by one process at a time; waits for
        the store.

        Raises:
            StorageError: the store does not answer or refuses.
        """
        if all(result.job in self._own for result in results):
            return
        store = self._connection.store()
        with storage_errors(self.location):
            self.board = write_final(store, self._connection.run_id, results)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # After a second interrupt, or with a full disk, do not wait for an unavailable server.
        patience = None if error is None else LAST_SECONDS
        try:
            if error is None:
                self.end_search()
            else:
                state, reason = JobState.FAILED, f"{type(error).__name__}: {error}"
                if isinstance(error, KeyboardInterrupt):
                    state, reason = JobState.PAUSED, "Interrupted."
                with suppress(StorageError):  # a full disk has been reported already
                    self.end_search(state, reason)
        finally:
            self.close(patience)
