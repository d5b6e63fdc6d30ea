"""The search loop: places are filled from the trial source, events go round, ends are told.

The search and the packing are one loop (DESIGN §4.8): a place that falls free is filled at the next
iteration of the running group, whatever the others do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from plait.engine.messages import Event, JobEnded, JobEvaluated
from plait.errors import EXIT_DONE, EXIT_FAILED_JOBS, EXIT_INTERRUPTED, InputError, StorageError
from plait.jobs import JobSpec
from plait.search.objective import Observed
from plait.search.trials import Finished, Outcome, State, Trial, TrialSource
from plait.settings import SearchSettings


class Coordinator(Protocol):
    """What the loop needs of the engine."""

    def submit(self, job: JobSpec, *, resume_from: Path | None = None) -> None:
        """Queue a job, fresh or from a saved state."""

    def stop(self) -> None:
        """At the next ``advance``, save every job and end it as "stopped"."""

    def places(self) -> int:
        """How many more jobs could be admitted now."""

    def advance(self) -> Iterable[Event]:
        """One iteration of the group."""


class Recorder(Protocol):
    """Who is shown and keeps what happens: tracking and terminal."""

    def start_job(self, job: JobSpec, trial: int) -> None:
        """A job is about to be submitted."""

    def handle(self, event: Event) -> None:
        """Something happened in the engine."""

    def judge(self, job: str, state: str, objective: float | None, reason: str) -> None:
        """The search's last word on a job."""

    def run_id(self, job: str) -> str:
        """MLflow's id of the job's run; "" while it is not known."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """All trials that are over, and whether the search was cut short."""

    finished: tuple[Finished, ...]
    interrupted: bool = False

    @property
    def failed(self) -> int:
        """How many trials failed."""
        return sum(item.outcome.state == "failed" for item in self.finished)

    @property
    def exit_status(self) -> int:
        """DESIGN §1: 0 done, 3 finished with failed jobs, 130 interrupted."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        return EXIT_FAILED_JOBS if self.failed else EXIT_DONE

    def best(self, direction: str) -> Finished | None:
        """The complete trial with the best objective, ties by number; None where there is none."""
        sign = 1.0 if direction == "minimize" else -1.0
        scored = [
            (sign * item.outcome.value, item.trial.number, item)
            for item in self.finished
            if item.outcome.state == "complete" and item.outcome.value is not None
        ]
        return min(scored, key=lambda entry: entry[:2])[2] if scored else None


@dataclass(slots=True)
class SearchRun:
    """Runs a search to its end.

    Attributes:
        source: draws the trials.
        make_job: the job of a trial; an InputError fails that trial only, unless it is a StorageError.
        stop: asked after every iteration; True ends the search in order.
    """

    source: TrialSource
    make_job: Callable[[Trial], JobSpec]
    coordinator: Coordinator
    recorder: Recorder
    settings: SearchSettings
    stop: Callable[[], bool] = lambda: False
    _live: dict[str, Trial] = field(default_factory=dict)
    _observed: Observed = field(default_factory=Observed)
    _failed: int = 0
    _stopping: bool = False

    def run(self) -> SearchResult:
        """Go on until every trial is over, or ``stop`` says so."""
        self._failed = SearchResult(tuple(self.source.finished())).failed
        while not self.stop():
            self._fill()
            if not self._live:
                return SearchResult(tuple(self.source.finished()))
            self._advance()
        self._wind_up()
        return SearchResult(tuple(self.source.finished()), interrupted=True)

    def _fill(self) -> None:
        while (
            len(self._live) < self.settings.parallel and self.coordinator.places() > 0 and not self._hopeless
        ):
            trial = self.source.ask()
            if trial is None:
                return
            self._start(trial)

    @property
    def _hopeless(self) -> bool:
        """More trials failed than the settings put up with: no new ones are started."""
        return self._failed > self.settings.max_failure_rate * self.source.total

    def _start(self, trial: Trial) -> None:
        try:
            job = self.make_job(trial)
        except StorageError:
            raise
        except InputError as error:  # nobody has heard of this job yet
            self._tell(trial, Outcome("failed", None, str(error)))
            return
        self.recorder.start_job(job, trial.number)
        try:
            self.coordinator.submit(job, resume_from=trial.resume_from)
        except StorageError:
            raise
        except InputError as error:
            self._over(trial, "failed", None, str(error))
        else:
            self._live[job.name] = trial

    def _advance(self) -> None:
        for event in self.coordinator.advance():
            self._observed.handle(event)
            self.recorder.handle(event)
            if isinstance(event, JobEvaluated):
                self._report(event)
            elif isinstance(event, JobEnded):
                self._ended(event)

    def _report(self, event: JobEvaluated) -> None:
        """Keep intermediate objectives at evaluations only: a database takes tens of milliseconds for one."""
        trial = self._live.get(event.job)
        value = self._observed.value(event.job, self.settings.metric)
        if trial is not None and value is not None and math.isfinite(value):
            self.source.report(trial, event.step, value)

    def _ended(self, event: JobEnded) -> None:
        trial = self._live.pop(event.job)
        value = self._observed.value(event.job, self.settings.metric)
        if event.state == "stopped" and self._stopping:
            self.source.put_back(trial, event.checkpoint)
        elif event.state == "stopped":
            self._over(trial, "pruned", value, event.reason)
        elif event.state == "failed":
            self._over(trial, "failed", None, event.reason or "failed")
        elif value is None or not math.isfinite(value):
            missing = "was not measured" if value is None else f"is {value}"
            self._over(trial, "failed", None, f"{self.settings.metric} {missing}")
        else:
            self._over(trial, "complete", value, event.reason)

    def _over(self, trial: Trial, state: State, value: float | None, reason: str) -> None:
        self._tell(trial, Outcome(state, value, reason, self.recorder.run_id(trial.name)))
        self.recorder.judge(trial.name, "finished" if state == "complete" else state, value, reason)

    def _tell(self, trial: Trial, outcome: Outcome) -> None:
        self.source.tell(trial, outcome)
        self._failed += outcome.state == "failed"

    def _wind_up(self) -> None:
        """Let the engine save and end every job; trials that do not answer stay RUNNING for the next run."""
        self._stopping = True
        self.coordinator.stop()
        while self._live:
            before = len(self._live)
            self._advance()
            if len(self._live) == before:
                return
