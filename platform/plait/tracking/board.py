"""What is known of every job of a search, gathered from events: the source of leaderboard, totals and the
terminal's table. Plain Python, no clock and no store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.engine.messages import (
    Event,
    GroupStep,
    JobAdmitted,
    JobEnded,
    JobEvaluated,
    JobGenerated,
    JobParked,
    JobProgress,
    ModelFitted,
    Notice,
)
from plait.tracking.names import FINISHED, RUNNING

WAITING = "waiting"
PARKED = "parked"  # saved, and without a place: at a rung, paused, or since it had to make room


@dataclass(slots=True)
class JobRecord:
    """One job as far as events have told.

    Attributes:
        trial: Optuna's number of the trial.
        parameters: config keys that define the job.
        state: "waiting", "parked", or one of the states in ``names``.
        steps: optimiser steps in all; 0 until the job is admitted.
        tokens_per_s: of the newest step.
        adapter: folder of the finished adapter, or its place among the run's artifacts.
    """

    name: str
    trial: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    state: str = WAITING
    group: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    accuracy: float | None = None
    objective: float | None = None
    tokens: int = 0
    tokens_per_s: float | None = None
    device_seconds: float = 0.0
    completion_seconds: float | None = None
    adapter: str = ""
    reason: str = ""
    run_id: str = ""

    @property
    def live(self) -> bool:
        """It trains now."""
        return self.state == RUNNING

    @property
    def ended(self) -> bool:
        """It will not train again."""
        return self.state not in (RUNNING, WAITING, PARKED)


@dataclass(slots=True)
class Board:
    """All jobs of a search.

    Attributes:
        direction: "minimize" or "maximize" the objective.
        trials: trials that the search wants in all.
    """

    direction: str
    trials: int
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    group: GroupStep | None = None
    iterations: int = 0

    def add(self, record: JobRecord) -> None:
        """Take a job in, or take up one that was there."""
        self.jobs[record.name] = record

    def handle(self, event: Event) -> None:
        """Learn from an event. Jobs that nobody announced are taken in with trial number -1."""
        if isinstance(event, GroupStep):
            self.group = event
            self.iterations += 1
            return
        if isinstance(event, JobAdmitted):
            record = self._record(event.job.name)
            record.state, record.group = RUNNING, event.group
            record.step, record.steps = event.step, event.steps
            return
        if isinstance(event, (Notice, ModelFitted)):
            return
        record = self._record(event.job)
        match event:
            case JobProgress():
                record.step, record.loss, record.tokens = event.step, event.loss, event.tokens
                record.tokens_per_s, record.device_seconds = event.tokens_per_s, event.device_seconds
            case JobEvaluated():
                record.eval_loss = event.loss
            case JobParked():
                record.state = PARKED
            case JobGenerated():
                record.accuracy = event.accuracy
            case JobEnded():
                self._end(record, event)

    def judge(self, job: str, state: str, objective: float | None, reason: str) -> JobRecord:
        """The search's last word on a job."""
        record = self._record(job)
        record.state = state
        record.objective = objective if objective is not None and math.isfinite(objective) else None
        record.reason = reason or record.reason
        return record

    def best(self) -> JobRecord | None:
        """The finished job with the best objective, ties by trial number; None before there is one."""
        done = [job for job in self.jobs.values() if job.state == FINISHED and job.objective is not None]
        return min(done, key=self.rank, default=None)

    def rank(self, record: JobRecord) -> tuple[int, float, int]:
        """Sorting key: finished by objective, others that have one, then the rest; ties by trial number."""
        if record.objective is None:
            return 2, 0.0, record.trial
        value = record.objective if self.direction == "minimize" else -record.objective
        return int(record.state != FINISHED), value, record.trial

    def ordered(self) -> list[JobRecord]:
        """All jobs, best first."""
        return sorted(self.jobs.values(), key=self.rank)

    def count(self, *states: str) -> int:
        """Jobs in any of the states."""
        return sum(job.state in states for job in self.jobs.values())

    @property
    def tokens(self) -> int:
        """Real tokens of all jobs."""
        return sum(job.tokens for job in self.jobs.values())

    @property
    def device_seconds(self) -> float:
        """Device-seconds of all jobs."""
        return sum(job.device_seconds for job in self.jobs.values())

    def _record(self, name: str) -> JobRecord:
        return self.jobs.setdefault(name, JobRecord(name, -1))

    @staticmethod
    def _end(record: JobRecord, event: JobEnded) -> None:
        record.state, record.step, record.reason = event.state, event.step, event.reason
        record.eval_loss = record.eval_loss if event.eval_loss is None else event.eval_loss
        record.tokens, record.device_seconds = event.tokens, event.device_seconds
        record.completion_seconds = event.completion_seconds
        record.adapter = "" if event.adapter is None else str(event.adapter)
