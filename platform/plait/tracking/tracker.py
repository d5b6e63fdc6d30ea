"""Turns what happens in a search into MLflow runs: a parent for the search, a child for every job."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from plait.core.errors import StorageError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import (
    Event,
    GroupStep,
    JobAdmitted,
    JobEvaluated,
    JobGenerated,
    JobPaused,
    JobProgress,
)
from plait.core.settings import TrackingSettings
from plait.tracking import facts, names
from plait.tracking.begin import Begun, ParentRun, begin_run, open_job, stored_jobs
from plait.tracking.board import Board, JobRecord, job_of, orphan
from plait.tracking.check import AwayError, check_folder, storage_errors
from plait.tracking.connection import Connection
from plait.tracking.elsewhere import Elsewhere
from plait.tracking.encoding import Head
from plait.tracking.final import take_result, write_final
from plait.tracking.location import locate
from plait.tracking.operations import LogFolder, LogText, Reopen
from plait.tracking.outgoing import Outgoing, open_outgoing, spool_folder
from plait.tracking.overview import Overview
from plait.tracking.search_facts import SearchFacts, search_tags
from plait.tracking.sender import StoreSender
from plait.tracking.totals import Totals
from plait.tracking.values import evaluation_values, group_values, search_values
from plait.utils.addresses import redact

LAST_SECONDS = 1.0  # that a store has to take the last records of a process that ends at once
SUMS = (  # over all jobs, those of earlier processes included
    names.TRAIN_TOKENS,
    names.DEVICE_SECONDS,
    names.SEARCH_THROUGHPUT,
    names.SEARCH_ENDED,
    names.SEARCH_FAILED,
)


class Tracker:
    """Writes a search to MLflow, in the background.

    Whatever is to be sent goes to a file below the search's folder first (``spool/``), and from there to the
    store as it takes it. Every method but :meth:`start_search`, :meth:`flush`, :meth:`commit` and
    :meth:`close` returns at once. As a context manager it ends the search's run and closes.

    Args:
        settings: where to write.
        clock: seconds since 1970; stamps points and runs. Where it is set back, stamps wait for it.
        rising: seconds that only rise; measures how long the search takes.
        directory: folder whose git state is recorded.

    Attributes:
        board: what is known of every job.
        notices: what the store did not take, in words; filled by :meth:`start_search` and :meth:`close`.
        away: why the search began without the store, if it did.

    Raises:
        StorageError: the folder cannot be written. Every method raises it where the spool cannot be written,
            as on a full disk.
    """

    def __init__(
        self,
        settings: TrackingSettings,
        *,
        clock: Callable[[], float] = time.time,
        rising: Callable[[], float] = time.monotonic,
        directory: Path | None = None,
    ) -> None:
        self.location = locate(settings)
        check_folder(self.location.root, "tracking.root")
        self._connection = Connection(self.location, settings.experiment)
        self._settings = settings
        self._clock = clock
        self._stamp = 0  # the last one
        self._directory = directory or Path.cwd()
        self._search = ""
        self._parent = ""  # key of the search's run
        self._parent_id = ""
        self._ids: dict[str, str] = {}  # by key; filled by the writer as it makes runs
        self._out: Outgoing | None = None
        self._overview: Overview | None = None
        self._totals = Totals(rising)
        self._elsewhere: Elsewhere | None = None
        self._state = ""  # in which the search ended
        self._own: set[str] = set()  # jobs that this process trains or has trained
        self._results: dict[str, JobResult] = {}  # of jobs that were over when it began without the store
        self._whole = True  # the board has all of the jobs that were over when it began
        self.others: Callable[[], bool] = lambda: False  # whether other processes train jobs of the search
        self.over: Callable[[], Collection[str]] = tuple  # jobs that are over, whoever trained them
        self.orphaned: Callable[[], Collection[str]] = tuple  # jobs whose worker is dead
        self.board = Board("minimize", 0)
        self.notices: list[str] = []
        self.away: AwayError | None = None

    # ---- the search ------------------------------------------------------------------------------------

    def start_search(self, search: SearchFacts, begun: Begun | None = None) -> str:
        """Make the search's run, or go on with the one of its name; waits for the store where that answers.

        Args:
            search: what is known of it.
            begun: where it was recorded in this store before. Then it begins without a store that is away.

        Returns:
            MLflow's id of the run.

        Raises:
            AwayError: the store does not answer, and nothing is known of an earlier start.
            StorageError: it refuses.
        """
        first, *others = search.settings.search.objectives
        self.board = Board(first.direction, search.settings.search.trials, others=tuple(others))
        self._search = search.name
        self._parent = f"search {search.name}"
        folder = spool_folder(self.location.root, search.name)
        git = facts.git_state(self._directory)
        tags = search_tags(search, git)
        run = begin_run(self._connection, search, begun, tags, self._now())
        if run.away is not None and begun is not None:
            self._begin_without(run, begun.over)
        self.notices += run.notices
        self._parent_id = run.run_id
        self._ids[self._parent] = self._parent_id
        head = Head(self._parent_id, self._parent, str(self.location))
        sender = StoreSender(self._connection.store, self._parent_id, self._ids)
        self._out = open_outgoing(folder, head, sender, self._settings, self._now)
        self._out.writer.away = run.away.value if run.away is not None else ""
        self._overview = Overview(self._out, self._parent, several=bool(others))
        self._take_others(run.jobs)
        orphan(self.board.jobs.values(), self.orphaned())
        self._totals.stood(run.step, run.seconds)
        self._totals.begin(folder.parent, self._parent_id)
        self._elsewhere = Elsewhere(self._to_learn, self._stored)
        if not run.made:
            self._out.put(Reopen(self._parent))
        self._out.tags(self._parent, tags)
        self._record_facts(search, git)
        return self._parent_id

    @property
    def unreachable(self) -> str:
        """Why the store does not take anything at the moment; empty where it does, as far as is known."""
        return "" if self._out is None else self._out.writer.away

    def _begin_without(self, run: ParentRun, over: Sequence[JobResult]) -> None:
        """What a store that is away would have told, as far as it is known."""
        self.away = run.away
        self._results = {result.job: result for result in over}
        self._whole = not over
        for result in over:
            take_result(self.board, result)

    def _record_facts(self, search: SearchFacts, git: facts.GitState) -> None:
        self.record("config.yaml", search.config)
        self.record("overrides.txt", "".join(f"{item}\n" for item in search.overrides))
        self.record("packages.txt", facts.packages())
        self.record("hardware.json", facts.hardware())
        if git.diff:
            self.record("git.diff", git.diff)

    def record(self, path: str, content: str | Mapping[str, Any]) -> None:
        """Keep a fact with the search's run as an artifact: text as it is, a mapping as JSON.

        For the plan ("plan.json"), the lengths ("lengths.json"), the data digests ("data.json").
        """
        text = content if isinstance(content, str) else json.dumps(content, indent=2, default=str)
        self._started.put(LogText(self._parent, path, redact(text)))

    def record_table(self, path: str, text: str) -> None:
        """Keep a table with the search's run: JSON with ``columns`` and ``data``, as MLflow shows it."""
        self.record(path, text)
        if self._overview is not None:
            self._overview.add_table(path)

    def end_search(self, state: JobState = JobState.FINISHED, reason: str = "") -> None:
        """End the search's run: finished, paused or failed. Jobs that still train are marked paused; a later
        process adopts them. While other processes train jobs of this search, their
        jobs' runs and the search's are theirs to end."""
        if self._state or self._out is None:
            return
        self._state = state
        shared, over = self.others(), self.over()  # in this order: what is over meanwhile counts as over
        for record in list(self.board.jobs.values()):
            mine = record.name in self._own or not (shared or record.name in over)
            if mine and record.state in (JobState.RUNNING, JobState.ORPHANED):
                left = JobState.PAUSED if record.state == JobState.RUNNING else record.state
                self._out.set_state(record.name, left, "The search was interrupted.")
        if (self._out.shared or not self._whole) and self._connection.opened and not self._out.behind:
            with suppress(StorageError), storage_errors(self.location):
                self._take_others(self._stored())
        self._refresh(now=True)
        self._log_totals({})
        if not shared:
            self._out.set_state(self._parent, state, reason)
        self._out.commit()

    def _to_learn(self) -> bool:
        """Whether the store has jobs that are not on the board. While it lacks what ended processes left,
        what it says of theirs is out of date."""
        out = self._out
        return out is not None and not out.behind and (not self._whole or out.others_write())

    def _stored(self) -> list[JobRecord]:
        records = stored_jobs(self._connection.store(), self._parent_id)
        orphan(records, self.orphaned())
        return records

    def _take_others(self, records: Sequence[JobRecord]) -> None:
        """Have the jobs on the board that this process does not train, as the store knows them."""
        for record in records:
            if self._overview is not None and record.on_front:
                self._overview.front.add(record.name)
            if record.name not in self._own:
                self.board.add(record)
                self._ids[record.name] = record.run_id
                if record.name in self._results:
                    take_result(self.board, self._results[record.name])
            elif known := self.board.jobs.get(record.name):
                known.recall(record)
        self._whole |= bool(records)

    # ---- jobs ------------------------------------------------------------------------------------------

    def start_job(self, job: JobSpec, trial: int, parameters: Mapping[str, Any] | None = None) -> None:
        """Announce a job: makes its run, or goes on with the one its trial has.

        Args:
            job: as submitted; its name is the run's name.
            trial: Optuna's number.
            parameters: config keys that define the job; those of the job itself by default.
        """
        shown = dict(job.parameters() if parameters is None else parameters)
        self.board.add(self.board.jobs.get(job.name) or JobRecord(job.name, trial, shown))
        self.board.jobs[job.name].parameters = shown
        self._own.add(job.name)
        out = self._started
        out.adopt()
        record, known = self.board.jobs[job.name], out.knows(job.name)
        out.put(open_job(record, self._search, self._parent_id, self._now(), known=known))

    def lose(self, job: str) -> None:
        """Another process trains a job from here on: nothing more is written of it."""
        self._own.discard(job)
        self.board.jobs.pop(job, None)
        self._started.forget(job)

    def handle(self, event: Event) -> None:
        """Log an event of the engine."""
        out = self._started
        before = self.board.jobs.get(job_of(event))
        was = before.state if before else None
        logged = (before.tokens, before.device_seconds) if before else None
        self.board.handle(event)
        match event:
            case JobAdmitted():
                out.begin_curve(event.job.name, event.steps)
                if was == JobState.PAUSED:
                    out.put(Reopen(event.job.name))
                tags = {names.TAG_STATE: JobState.RUNNING, names.TAG_GROUP: event.group}
                out.tags(event.job.name, tags | {names.TAG_STEPS: str(event.steps)})
            case JobPaused():
                out.set_state(event.job, JobState.PAUSED, event.reason)
            case JobProgress():
                out.progress(event)
            case JobEvaluated():
                out.points(event.job, event.step, evaluation_values(event, self.board.jobs[event.job]))
            case JobGenerated():
                out.points(event.job, event.step, {names.EVAL_ACCURACY: event.accuracy})
            case JobResult():
                self._job_ended(event, logged)
            case GroupStep():
                self._take_others((self._elsewhere.take() if self._elsewhere is not None else None) or ())
                self._log_totals(group_values(event))

    def _job_ended(self, result: JobResult, logged: tuple[int, float] | None) -> None:
        """The decision of the search on a job; ``logged``: tokens and seconds of its last complete step."""
        out, job, record = self._started, result.job, self.board.jobs[result.job]
        if result.state.ended:
            out.end_curve(job, record.steps)
        if result.completion_seconds is None:  # it did not train here
            record.step = max(record.step, out.last_step(job))
        else:
            self._log_measured(result, result.completion_seconds, logged or (None, None))
        out.tags(job, {names.TAG_STEP: str(record.step)})
        if record.objective is not None:
            values = (record.objective, *record.others)
            out.points(job, record.step, {names.objective_name(at): value for at, value in enumerate(values)})
        if not result.feasible:
            out.tags(job, {names.TAG_FEASIBLE: "false"})
        out.set_state(job, result.state, record.reason)
        self._refresh()

    def _log_measured(
        self, result: JobResult, seconds: float, logged: tuple[int | None, float | None]
    ) -> None:
        out, job = self._started, result.job
        out.points(job, result.step, {names.COMPLETION_SECONDS: seconds})
        after: dict[str, float] = {}
        if result.tokens != logged[0]:
            after[names.TRAIN_TOKENS] = result.tokens
        if result.device_seconds != logged[1]:
            after[names.DEVICE_SECONDS] = result.device_seconds
        out.amend(job, result.step, after)
        if result.adapter is not None:
            out.put(LogFolder(job, result.adapter, names.ADAPTER_FOLDER))
            out.tags(job, {names.TAG_ADAPTER: str(result.adapter)})

    def _log_totals(self, more: Mapping[str, float]) -> None:
        """One point of the search's own curves; the last one is always written."""
        if (point := self._totals.next()) is None:
            return
        step, seconds = point
        if not more or self._started.wants_totals(step):
            values = dict(more) | search_values(self.board, seconds)
            unknown = () if self._whole else SUMS
            known = {key: value for key, value in values.items() if key not in unknown}
            self._started.points(self._parent, step, known)

    def run_id(self, job: str) -> str:
        """MLflow's id of a job's run; "" while the store has not made it."""
        return self._ids.get(job, "")

    @property
    def seconds(self) -> float:
        """Seconds that the search has taken, those of earlier processes included."""
        return self._totals.seconds

    @property
    def writer_seconds(self) -> float:
        """CPU seconds that sending took so far, in the background."""
        return self._started.writer.cpu_seconds

    # ---- what is written -------------------------------------------------------------------------------

    def _refresh(self, *, now: bool = False) -> None:
        """Write leaderboard, best so far and description of the search anew, if that is due."""
        if self._overview is not None:
            self._overview.refresh(self.board, self.run_id, now=now)

    @property
    def _started(self) -> Outgoing:
        if self._out is None:
            raise RuntimeError("start_search() comes first")
        return self._out

    def _now(self) -> int:
        self._stamp = max(self._stamp, int(self._clock() * 1000))
        return self._stamp

    def commit(self) -> None:
        """Return when everything handed over so far is safe on the disk: after a crash it is sent, and steps
        that are trained again from a checkpoint made since are not sent twice."""
        if self._out is not None:
            self._out.commit()

    def flush(self) -> None:
        """Wait until the store has everything.

        Raises:
            StorageError: it refused something, or did not answer to several attempts; what it has not taken
                is kept and tried again.
        """
        if self._out is not None and (troubles := self._out.flush()):
            raise StorageError(
                "\n".join(troubles),
                "The tracking store has to answer, and a search's runs belong to Plait while it goes on.",
                "Look after the store; search.fresh=true begins the search anew if its runs were changed.",
            )

    def close(self, patience: float | None = None) -> None:
        """Send what is left and stop writing; further calls do nothing.

        What the store does not take is kept in the spool, and told in ``notices``: that is no reason for a
        search to fail that has its results.

        Args:
            patience: seconds for the store; None waits as long as it takes what it gets.
        """
        out, self._out = self._out, None
        if self._elsewhere is not None:
            self._elsewhere.close()
        if out is not None:
            self._totals.close()
            self.notices += out.close(patience, done=self._state == JobState.FINISHED)

    def conclude(self, results: Sequence[JobResult]) -> None:
        """After :meth:`close`, when all trials of the search are over: what its run says of the whole, from
        the study, where other processes trained some of them. For one process at a time; waits for the store.

        Raises:
            StorageError: the store does not answer or refuses.
        """
        if all(result.job in self._own for result in results):
            return
        store = self._connection.store()
        with storage_errors(self.location):
            self.board = write_final(store, self._parent_id, results)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Who interrupts a second time, or has a full disk, does not want to wait for a server that is gone.
        patience = None if error is None else LAST_SECONDS
        try:
            if error is None:
                self.end_search()
            else:
                state, reason = JobState.FAILED, f"{type(error).__name__}: {error}"
                if isinstance(error, KeyboardInterrupt):
                    state, reason = JobState.PAUSED, "Interrupted."
                with suppress(StorageError):  # a disk that is full said so already
                    self.end_search(state, reason)
        finally:
            self.close(patience)
