"""Turns what happens in a search into MLflow runs: a parent for the search, a child for every job."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mlflow.entities import Run

from plait import __version__
from plait.addresses import redact
from plait.engine.messages import (
    Event,
    GroupStep,
    JobAdmitted,
    JobEnded,
    JobEvaluated,
    JobGenerated,
    JobProgress,
)
from plait.errors import StorageError
from plait.jobs import JobSpec
from plait.settings import RunSettings, TrackingSettings
from plait.tracking import facts, names
from plait.tracking.board import Board, JobRecord
from plait.tracking.check import check_folder, open_store, storage_errors
from plait.tracking.leaderboard import to_split_json
from plait.tracking.location import locate
from plait.tracking.operations import EndRun, LogFolder, LogPoints, LogText, OpenRun, SetTags, run_reference
from plait.tracking.records import record_of
from plait.tracking.sender import StoreSender
from plait.tracking.store import table_tag
from plait.tracking.values import (
    finite,
    group_values,
    not_finite,
    parameter_text,
    progress_values,
    run_parameters,
    search_values,
    user,
)
from plait.tracking.writer import Writer

LAST_SECONDS = 1.0  # that a store has to take the last records of an interrupted process


@dataclass(frozen=True, slots=True)
class SearchFacts:
    """What is known of a search before its first job.

    Attributes:
        name: identity of the search (DESIGN §1).
        settings: of the run.
        config: resolved configuration, YAML.
        command: the command line, program first.
        overrides: as Hydra received them.
        fresh: do not go on with an earlier search of this name.
    """

    name: str
    settings: RunSettings
    config: str = ""
    command: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    fresh: bool = False


@dataclass(slots=True)
class _Totals:
    """The search's own counters, that go on where an earlier process left them."""

    step: int = 0
    seconds_before: float = 0.0
    started: float = field(default_factory=time.time)


class Tracker:
    """Writes a search to MLflow, in the background.

    Every method but :meth:`start_search`, :meth:`flush` and :meth:`close` returns at once. As a context
    manager it ends the search's run and closes.

    Args:
        settings: where to write.
        clock: seconds since 1970; stamps points and runs.
        directory: folder whose git state is recorded.

    Raises:
        StorageError: the store cannot be used (see ``check_tracking``).
    """

    def __init__(
        self,
        settings: TrackingSettings,
        *,
        clock: Callable[[], float] = time.time,
        directory: Path | None = None,
    ) -> None:
        self.location = locate(settings)
        check_folder(self.location.root, "tracking.root")
        self._store = open_store(self.location, settings.experiment)
        self._settings = settings
        self._clock = clock
        self._directory = directory or Path.cwd()
        self._search = ""
        self._parent = ""  # key of the search's run
        self._parent_id = ""
        self._ids: dict[str, str] = {}  # by key; filled by the writer as it makes runs
        self._writer: Writer | None = None
        self._totals = _Totals()
        self._ended = False
        self.board = Board("minimize", 0)

    # ---- the search ------------------------------------------------------------------------------------

    def start_search(self, search: SearchFacts) -> str:
        """Make the search's run, or go on with the one of its name; waits for the store.

        Returns:
            MLflow's id of the run.

        Raises:
            StorageError: the store does not answer or refuses.
        """
        self.board = Board(search.settings.search.direction, search.settings.search.trials)
        self._search = search.name
        self._parent = f"search {search.name}"
        with storage_errors(self.location):
            runs = [] if search.fresh else self._store.searches(search.name)
            found = self._go_on(runs[0]) if runs else {}
            tags = self._search_tags(search)
            if not runs:
                self._parent_id = self._store.create_run(search.name, tags, self._now())
                self._store.log_parameters(self._parent_id, run_parameters(search.settings))
        self._ids = {record.name: record.run_id for record in self.board.jobs.values()}
        self._ids[self._parent] = self._parent_id
        self._totals.started = self._clock()
        sender = StoreSender(self._store, self._ids, found)
        self._writer = Writer(sender, self._settings.flush_seconds, str(self.location))
        self._put(SetTags(self._parent, tuple(tags.items())))
        self._record_facts(search)
        return self._parent_id

    def _go_on(self, run: Run) -> dict[int, Run]:
        """Take up an earlier process's run of this search, with its jobs."""
        self._parent_id = run.info.run_id
        self._store.reopen(self._parent_id)
        last = self._store.client.get_metric_history(self._parent_id, names.SEARCH_SECONDS)
        self._totals.step = max((point.step for point in last), default=0)
        self._totals.seconds_before = run.data.metrics.get(names.SEARCH_SECONDS, 0.0)
        found = self._store.children(self._parent_id)
        for child in found.values():
            self.board.add(record_of(child))
        return found

    def _search_tags(self, search: SearchFacts) -> dict[str, str]:
        state = facts.git_state(self._directory)
        self._record_later = {"git.diff": state.diff} if state.diff else {}
        tags = {
            names.TAG_SEARCH: search.name,
            names.TAG_STATE: names.RUNNING,
            names.TAG_DIRECTION: search.settings.search.direction,
            names.TAG_METRIC: search.settings.search.metric,
            "plait.version": __version__,
            "plait.command": redact(shlex.join(search.command)),
            "mlflow.user": user(),
            "mlflow.source.type": "LOCAL",
            "mlflow.source.name": Path(search.command[0]).name if search.command else "plait",
        }
        if state.commit:
            tags |= {"mlflow.source.git.commit": state.commit, "mlflow.source.git.branch": state.branch}
            tags["plait.git.dirty"] = str(state.dirty).lower()
        return tags

    def _record_facts(self, search: SearchFacts) -> None:
        self.record("config.yaml", search.config)
        self.record("overrides.txt", "".join(f"{item}\n" for item in search.overrides))
        self.record("packages.txt", facts.packages())
        self.record("hardware.json", facts.hardware())
        for name, text in self._record_later.items():
            self.record(name, text)

    def record(self, path: str, content: str | Mapping[str, Any]) -> None:
        """Keep a fact with the search's run as an artifact: text as it is, a mapping as JSON.

        For the plan ("plan.json"), the lengths ("lengths.json"), the data digests ("data.json").
        """
        text = content if isinstance(content, str) else json.dumps(content, indent=2, default=str)
        self._put(LogText(self._parent, path, redact(text)))

    def end_search(self, state: str = names.FINISHED, reason: str = "") -> None:
        """End the search's run: "finished", "interrupted" or "failed". Jobs that still train are marked
        interrupted; a later process takes them up."""
        if self._ended or not self._parent_id:
            return
        self._ended = True
        for record in list(self.board.jobs.values()):
            if record.live:
                self._end_run(record.name, names.INTERRUPTED, "The search was interrupted.")
        self._refresh()
        self._log_totals({})
        self._end_run(self._parent, state, reason)

    # ---- jobs ------------------------------------------------------------------------------------------

    def start_job(self, job: JobSpec, trial: int, parameters: Mapping[str, Any] | None = None) -> None:
        """Announce a job: makes its run, or goes on with the one its trial has.

        Args:
            job: as submitted; its name is the run's name.
            trial: Optuna's number.
            parameters: config keys that define the job; those of the job itself by default.
        """
        shown = dict(job.parameters() if parameters is None else parameters)
        known = self.board.jobs.get(job.name)
        self.board.add(known or JobRecord(job.name, trial, shown))
        self.board.jobs[job.name].parameters = shown
        tags = {
            names.TAG_SEARCH: self._search,
            names.TAG_TRIAL: str(trial),
            names.TAG_JOB: job.name,
            names.TAG_STATE: self.board.jobs[job.name].state,
            names.TAG_PARENT: self._parent_id,
            "mlflow.user": user(),
        }
        pairs = tuple((key, parameter_text(value)) for key, value in shown.items())
        self._put(OpenRun(job.name, trial, self._parent_id, pairs, tuple(tags.items()), self._now()))

    def judge(self, job: str, state: str, objective: float | None = None, reason: str = "") -> None:
        """The search's last word on a job: "finished", "pruned" or "failed", and its objective."""
        record = self.board.judge(job, state, objective, reason)
        if record.objective is not None:
            self._points(job, record.step, {names.OBJECTIVE: record.objective})
        self._end_run(job, state, record.reason)
        self._refresh()

    def handle(self, event: Event) -> None:
        """Log an event of the engine."""
        known = self.board.jobs.get(event.job) if isinstance(event, JobEnded) else None
        logged = (known.tokens, known.device_seconds) if known else None
        self.board.handle(event)
        match event:
            case JobAdmitted():
                tags = ((names.TAG_STATE, names.RUNNING), (names.TAG_GROUP, event.group))
                self._put(SetTags(event.job.name, tags))
            case JobProgress():
                self._points(event.job, event.step, progress_values(event))
            case JobEvaluated():
                values = {names.EVAL_LOSS: event.loss, names.EVAL_TOKENS: float(event.tokens)}
                self._points(event.job, event.step, values)
            case JobGenerated():
                self._points(event.job, event.step, {names.EVAL_ACCURACY: event.accuracy})
            case JobEnded():
                self._job_ended(event, logged)
            case GroupStep():
                self._log_totals(group_values(event))

    def _job_ended(self, event: JobEnded, logged: tuple[int, float] | None) -> None:
        values = {names.COMPLETION_SECONDS: event.completion_seconds}
        if logged != (event.tokens, event.device_seconds):  # what came after the last complete step
            values |= {names.TRAIN_TOKENS: float(event.tokens), names.DEVICE_SECONDS: event.device_seconds}
        self._points(event.job, event.step, values)
        tags = [(names.TAG_STEP, str(event.step))]
        if event.adapter is not None:
            self._put(LogFolder(event.job, event.adapter, names.ADAPTER_FOLDER))
            tags.append((names.TAG_ADAPTER, str(event.adapter)))
        self._put(SetTags(event.job, tuple(tags)))
        self._end_run(event.job, event.state, event.reason)
        self._refresh()

    def _log_totals(self, more: Mapping[str, float]) -> None:
        """One point of the search's own curves."""
        self._totals.step += 1
        values = dict(more) | search_values(self.board, self.seconds)
        self._points(self._parent, self._totals.step, values)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the search, those of earlier processes included."""
        return self._totals.seconds_before + self._clock() - self._totals.started

    # ---- what is written -------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Write leaderboard, best so far and description of the search anew."""
        for record in self.board.jobs.values():
            record.run_id = self._ids.get(record.name, "")
        rows = [replace(record, run_id=run_reference(record.name)) for record in self.board.ordered()]
        self._put(LogText(self._parent, names.LEADERBOARD_FILE, to_split_json(rows)))
        tags = [table_tag(names.LEADERBOARD_FILE)]
        best = self.board.best()
        if best is not None and best.objective is not None:
            tags.append((names.TAG_NOTE, f"Best so far: {best.name}, objective {best.objective:.6g}"))
        self._put(SetTags(self._parent, tuple(tags)))

    def _points(self, run: str, step: int, values: Mapping[str, float]) -> None:
        if kept := finite(values):
            self._put(LogPoints(run, step, self._now(), kept))
        if wrong := not_finite(values):
            self._put(SetTags(run, ((names.TAG_DIVERGED, f"step {step}: {wrong}"),)))

    def _end_run(self, run: str, state: str, reason: str) -> None:
        self._put(SetTags(run, ((names.TAG_STATE, state), (names.TAG_REASON, reason))))
        self._put(EndRun(run, names.RUN_STATUS[state], self._now()))

    def _put(self, operation: OpenRun | LogPoints | SetTags | LogText | LogFolder | EndRun) -> None:
        if self._writer is None:
            raise RuntimeError("start_search() comes first")
        self._writer.put(operation)

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def flush(self) -> None:
        """Wait until the store has everything; raises StorageError as ``Writer.flush``."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Send what is left and stop writing; raises StorageError as ``Writer.close``."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end_search()
        elif isinstance(error, KeyboardInterrupt):
            self.end_search(names.INTERRUPTED, "Interrupted.")
        else:
            self.end_search(names.FAILED, f"{type(error).__name__}: {error}")
        # Who interrupts a second time does not want to wait for a server that is gone.
        patience = LAST_SECONDS if isinstance(error, KeyboardInterrupt) else None
        try:
            if self._writer is not None:
                self._writer.close(patience)
        except StorageError as trouble:
            if error is None:
                raise
            error.add_note(str(trouble))
