"""The leaderboard of a search: what is known about every job from events, and its rows, best first.

The totals, the live view and what MLflow and the command line show all come from it. It is plain Python,
without a clock or a store.
"""

from __future__ import annotations

import csv
import io
import json
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import (
    Event,
    GroupStep,
    JobAdmitted,
    JobEvaluated,
    JobGenerated,
    JobPaused,
    JobProgress,
    JobReleased,
    ModelFitted,
    Notice,
    SpansTaken,
)
from plait.core.objectives import Objective, best_of, front_of
from plait.core.spans import ReplicaTotals
from plait.tracking.names import OBJECTIVE, objective_name
from plait.tracking.values import parameter_text

Cell = str | int | float | None
NO_SLOT = "waiting for a slot"  # why a released job is paused
USUAL_KEYS = ("adapter.rank", "train.lr")  # parameters shown if none varies


@dataclass(slots=True, repr=False)
class JobRecord:
    """What events have reported about one job. Its text is short; the attributes have everything.

    Attributes:
        trial: Optuna's number of the trial.
        parameters: values of the config keys that define the job.
        steps: total optimiser steps; 0 until the job is admitted.
        eval_loss: loss of the last evaluation or, for a finished job that keeps its best weights, of the
            best.
        accuracy: of generated answers, at the last evaluation or, for a finished job, of its adapter.
        best_eval_loss, best_eval_step: the lowest loss of all evaluations, and its step.
        tokens_per_s: throughput of the newest step.
        adapter: folder of the finished adapter, or its path among the run's artifacts.
        others: values of the further objectives, if there are several.
        feasible: it breaks no constraint of the search.
        on_front: no other job dominates it; set by ``Leaderboard.front``.
        outside: its settings outside the search space, as overrides; "" if there are none.
        searched_only: ``parameters`` has the searched keys alone, as the study knows them.
    """

    name: str
    trial: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    state: JobState = JobState.QUEUED
    group: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_eval_step: int | None = None
    accuracy: float | None = None
    objective: float | None = None
    tokens: int = 0
    tokens_per_s: float | None = None
    device_seconds: float = 0.0
    completion_seconds: float | None = None
    adapter: str = ""
    reason: str = ""
    run_id: str = ""
    others: tuple[float, ...] = ()
    feasible: bool = True
    on_front: bool = False
    outside: str = ""
    searched_only: bool = False

    def __repr__(self) -> str:
        values = ", ".join(f"{value:.6g}" for value in self.values)
        facts = [str(self.state), *([f"objective {values}"] if values else []), f"step {self.step}"]
        facts += [f"{key}={self.parameters[key]}" for key in USUAL_KEYS if key in self.parameters]
        return f"<{self.name}: {', '.join(facts)}>"

    @property
    def live(self) -> bool:
        """Whether it trains now."""
        return self.state == JobState.RUNNING

    @property
    def values(self) -> tuple[float, ...]:
        """All objectives; empty if they were not measured."""
        return () if self.objective is None else (self.objective, *self.others)

    @property
    def keeps_most_accurate(self) -> bool:
        """Whether its adapter is that of the evaluation with the highest accuracy."""
        return self.parameters.get("train.keep") == "best_accuracy"

    @property
    def was_better(self) -> bool:
        """Whether an earlier evaluation was better than the last one, whose weights the adapter has."""
        if self.best_eval_loss is None or self.eval_loss is None:
            return False
        return self.best_eval_loss < self.eval_loss

    def evaluated(self, step: int, loss: float) -> None:
        """Add an evaluation after ``step`` optimiser steps; among equal ones the first is best. A job that
        resumes from a checkpoint reports some evaluations again."""
        self.eval_loss = loss
        if math.isfinite(loss) and (self.best_eval_loss is None or loss < self.best_eval_loss):
            self.best_eval_loss, self.best_eval_step = loss, step

    @property
    def ended(self) -> bool:
        """Whether it will not train again."""
        return self.state.ended

    def end_as(self, known: JobRecord) -> None:
        """Adopt how it ended from another record of it."""
        self.state, self.reason, self.feasible = known.state, known.reason, known.feasible
        self.objective, self.others = known.objective, known.others

    def recall(self, earlier: JobRecord) -> None:
        """Adopt the best evaluation of an earlier record, if that was better."""
        loss = earlier.best_eval_loss
        if loss is not None and (self.best_eval_loss is None or loss < self.best_eval_loss):
            self.best_eval_loss, self.best_eval_step = loss, earlier.best_eval_step


@dataclass(slots=True)
class Leaderboard:
    """All jobs of a search.

    Attributes:
        direction: "minimize" or "maximize" the objective, or the first of several.
        trials: total number of trials that the search wants.
        others: the further objectives.
        replicas: what each has done in this process's run, by its number.
        searched: keys that are searched, which vary even if only one job is known.
    """

    direction: str
    trials: int
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    group: GroupStep | None = None
    others: tuple[Objective, ...] = ()
    replicas: dict[int, ReplicaTotals] = field(default_factory=dict)
    searched: Collection[str] = ()
    _varying: tuple[list[Mapping[str, Any]], list[str]] = field(
        default_factory=lambda: ([], []), init=False, repr=False, compare=False
    )

    def add(self, record: JobRecord) -> None:
        """Add a job, or continue one that is already there."""
        self.jobs[record.name] = record

    def handle(self, event: Event) -> None:
        """Learn from an event. Jobs that were not announced get the trial number -1."""
        if isinstance(event, GroupStep):
            self.group = event
            return
        if isinstance(event, JobAdmitted):
            record = self._record(event.job.name)
            record.state, record.group = JobState.RUNNING, event.group
            record.loss = None if event.step < record.step else record.loss  # of a step that comes again
            record.step, record.steps, record.reason = event.step, event.steps, ""
            return
        if isinstance(event, SpansTaken):
            for each in event.replicas:
                before = self.replicas.get(each.replica, ReplicaTotals())
                self.replicas[each.replica] = before.with_spans(each.spans)
            return
        if isinstance(event, (Notice, ModelFitted)):
            return
        record = self._record(event.job)
        match event:
            case JobProgress():
                record.step, record.loss, record.tokens = event.step, event.loss, event.tokens
                record.tokens_per_s, record.device_seconds = event.tokens_per_s, event.device_seconds
            case JobEvaluated():
                record.evaluated(event.step, event.loss)
            case JobPaused():
                record.state, record.reason = JobState.PAUSED, event.reason
                record.tokens = max(record.tokens, event.tokens)
                record.device_seconds = max(record.device_seconds, event.device_seconds)
            case JobReleased():
                record.reason = NO_SLOT
            case JobGenerated():
                record.accuracy = event.accuracy
            case JobResult():
                self._end(record, event)

    def take_result(self, result: JobResult) -> None:
        """Learn from the study how a trial ended. A trial that failed before it had a run is not one of the
        search's jobs."""
        if result.job not in self.jobs:
            if result.state == JobState.FAILED:
                return
            self.add(JobRecord(result.job, result.trial, result.parameters, searched_only=True))
        self.handle(result)

    def best(self) -> JobRecord | None:
        """The best finished job; None before there is one, and if several objectives are optimised: they have
        a front."""
        return None if self.others else best_of(self.jobs.values(), self.objectives[0])

    def front(self) -> list[JobRecord]:
        """The finished jobs that break no constraint and that no other one dominates, best in the first
        objective first; empty if there is only one objective."""
        for record in self.jobs.values():
            record.on_front = False
        if not self.others:
            return []
        front = front_of(self.jobs.values(), self.objectives)
        for record in front:
            record.on_front = True
        return front

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """All objectives; the first one is called "objective"."""
        return Objective(OBJECTIVE, self.direction), *self.others

    def rank(self, record: JobRecord) -> tuple[int, float, int]:
        """A sorting key: finished jobs by objective, with those on a front first and those that break a
        constraint last; then other jobs that have an objective, then the rest; ties by trial number."""
        if record.objective is None:
            return 4, 0.0, record.trial
        place = (
            3 if record.state != JobState.FINISHED else 2 if not record.feasible else int(not record.on_front)
        )
        return place, self.objectives[0].badness(record.objective), record.trial

    def ordered(self) -> list[JobRecord]:
        """All jobs, best first."""
        self.front()
        return sorted(self.jobs.values(), key=self.rank)

    def count(self, *states: JobState) -> int:
        """The number of jobs in any of the states."""
        return sum(job.state in states for job in self.jobs.values())

    def varying(self) -> list[str]:
        """Parameters that differ between jobs or are searched; compared again only if a job is new or its
        parameters changed."""
        now = [record.parameters for record in self.jobs.values()]
        before, found = self._varying
        if len(now) != len(before) or not all(map(operator.is_, now, before)):
            found = varying(list(self.jobs.values()), self.searched)
            self._varying = now, found
        return found

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
    def _end(record: JobRecord, result: JobResult) -> None:
        record.state, record.reason = result.state, result.reason or record.reason
        record.feasible = result.feasible
        if result.values:
            objective, *others = result.values
            record.objective = objective if math.isfinite(objective) else None
            record.others = tuple(others)
        if result.completion_seconds is None:  # the rest is not known here
            return
        record.step, record.tokens, record.device_seconds = result.step, result.tokens, result.device_seconds
        record.eval_loss = record.eval_loss if result.eval_loss is None else result.eval_loss
        record.completion_seconds = result.completion_seconds
        record.adapter = "" if result.adapter is None else str(result.adapter)


def varying(records: Sequence[JobRecord], searched: Collection[str] = ()) -> list[str]:
    """Parameters that differ between jobs, or are searched, in the order in which jobs name them.

    Values are equal if MLflow stores them as the same text, so a list read back from it equals the tuple of
    another job.
    """
    keys = dict.fromkeys(key for record in records for key in record.parameters)
    return [key for key in keys if key in searched or len(_values(records, key)) > 1]


def _values(records: Sequence[JobRecord], key: str) -> set[str]:
    """The different values that jobs have for a key, as far as they are known."""
    known = (each.parameters for each in records if key in each.parameters or not each.searched_only)
    return {parameter_text(parameters.get(key)) for parameters in known}


def job_of(event: Event) -> str:
    """The name of the job that an event is about; "" if it is about none, or several."""
    return event.job.name if isinstance(event, JobAdmitted) else getattr(event, "job", "")


def orphan(records: Iterable[JobRecord], names: Collection[str]) -> None:
    """Mark the unfinished jobs with these names as orphaned, because their worker is dead."""
    for record in records:
        if record.name in names and record.state in (JobState.RUNNING, JobState.PAUSED):
            record.state = JobState.ORPHANED


# ---- rows --------------------------------------------------------------------------------------


def columns(
    records: Sequence[JobRecord], keys: Sequence[str] | None = None
) -> tuple[list[str], list[list[Cell]]]:
    """Names of columns, and rows in the order of the records. The parameters ``keys``, by default those that
    vary, are in the middle; columns for the front, for broken constraints, for settings outside the search
    space and for accuracies appear only if there are any."""
    keys = varying(records) if keys is None else keys
    several = max((len(record.others) for record in records), default=0)
    constrained = not all(record.feasible for record in records)
    added = any(record.outside for record in records)
    answered = any(record.accuracy is not None for record in records)

    def cells(record: JobRecord) -> dict[str, Any]:
        row: dict[str, Any] = {"trial": record.trial, "state": record.state, "objective": record.objective}
        others = (*record.others, *[None] * several)[:several]
        row |= {objective_name(at): value for at, value in enumerate(others, 1)}
        row |= {"pareto": "yes" if record.on_front else ""} if several else {}
        row |= {"feasible": "yes" if record.feasible else "no"} if constrained else {}
        row |= {key: record.parameters.get(key) for key in keys}
        row |= {"outside": record.outside} if added else {}
        row |= {name: getattr(record, name) for name in ("eval_loss", "best_eval_loss", "best_eval_step")}
        row |= {"accuracy": record.accuracy} if answered else {}
        row |= {"train_loss": record.loss, "steps": record.step, "tokens": record.tokens}
        last = ("device_seconds", "run_id", "adapter", "reason")
        return row | {name: getattr(record, name) for name in last}

    names = list(cells(JobRecord("", -1)))
    return names, [[_cell(value) for value in cells(record).values()] for record in records]


def _cell(value: Any) -> Cell:
    """Numbers and words unchanged, other values as compact text. JSON has no numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float)):
        return value
    return json.dumps(value, separators=(",", ":"))


def to_split_json(records: Sequence[JobRecord], keys: Sequence[str] | None = None) -> str:
    """The JSON in which MLflow's UI shows an artifact as a table, without ids of runs. The UI reads a dot in
    a column's name as a path and finds nothing there, and it shows every digit of a number."""
    names, rows = columns(records, keys)
    shown = [(at, name.replace(".", "_")) for at, name in enumerate(names) if name != "run_id"]
    cells = [[row[at] for at, _ in shown] for row in rows]
    short = [[float(f"{cell:.6g}") if isinstance(cell, float) else cell for cell in row] for row in cells]
    return json.dumps({"columns": [name for _, name in shown], "data": short})


def to_json(records: Sequence[JobRecord]) -> str:
    """A list of objects, one for each job, with all its parameters."""
    names, rows = columns(records)
    listed = []
    for record, row in zip(records, rows, strict=True):
        listed.append(dict(zip(names, row, strict=True)) | {"parameters": dict(record.parameters)})
    return json.dumps(listed, indent=2)


def to_csv(records: Sequence[JobRecord]) -> str:
    """A header, and one line for each job."""
    names, rows = columns(records)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue()
