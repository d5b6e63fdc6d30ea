"""A worker without tensors: a job's losses are a function of the job and of the step, its states small files.

What a job has learned is its count of steps, so a step that is lost, doubled or taken from a wrong state
shows as a loss that does not belong to the step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from plait.core.errors import StorageError
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec
from plait.core.messages import (
    Attach,
    Attached,
    Command,
    Cursor,
    Detach,
    Evaluate,
    Export,
    Generate,
    Generated,
    GenerateJob,
    JobFailed,
    JobLoss,
    KeepWeights,
    MicrobatchDone,
    OutOfMemory,
    RunSchedule,
    SaveCheckpoint,
    Saved,
    StepDone,
    StepJob,
    WorkerEvent,
)
from plait.core.plans import Microbatch
from plait.core.samples import Sample, Split, TokenisedData
from plait.core.spans import ReplicaSpans
from plait.engine.checkpoints import HEADER, checkpoints
from plait.engine.worker import ActivationShape, WorkerFacts
from plait.models.targets import LinearInfo

LINEARS = tuple(LinearInfo(f"layers.{i}.{name}", 64, 64) for i in range(2) for name in ("q_proj", "v_proj"))
SHAPE = ActivationShape(
    layers=2,
    hidden=64,
    heads=2,
    vocabulary=16,
    linear_features=64,
    weight_bytes=10_000,
    element_bytes=4,
    logit_rows=1024,
    keep_up_to=128,
)
ADAPTER = AdapterSpec(rank=2, target_modules=("q_proj", "v_proj"))

Curve = Callable[[JobSpec, int], float]
Fault = Callable[[str, str, int], str | None]


def lengths_data(train: Sequence[int], validation: Sequence[int] = (4,)) -> DataSpec:
    """Data that are nothing but lengths."""
    return DataSpec.of("lengths", train=list(train), validation=list(validation))


def load_lengths(spec: DataSpec) -> TokenisedData:
    """All tokens 1, all labelled."""

    def split(lengths: Sequence[int]) -> Split:
        return Split.of([Sample(np.ones(n, np.int32), np.ones(n, np.bool_)) for n in lengths])

    options = spec.mapping()
    return TokenisedData(spec.options, split(options["train"]), split(options["validation"]))


def no_fault(_kind: str, _job: str, _step: int) -> str | None:
    """All goes well."""
    return None


def step_fault(wrong: Callable[[str, int], bool]) -> Fault:
    """The gradient of these jobs' steps is not finite."""
    return lambda kind, job, step: "its gradient is nan" if kind == "step" and wrong(job, step) else None


@dataclass
class CurveWorker:
    """Answers commands as a worker does.

    Attributes:
        curve: validation loss of a job after so many steps; a step's own loss is that before it.
        fault: what goes wrong with a job at a step; asked of each "run", "step", "evaluate" and "generate".
        room: most jobs in one schedule before memory runs out.
        attach_room: most jobs that are attached before memory runs out.
        commands: all that came.
        taken: steps that each job has taken, also of those that are no more.
        spent: seconds of everything that took some.
    """

    curve: Curve = lambda _job, _step: 2.0
    fault: Fault = no_fault
    room: int | None = None
    attach_room: int | None = None
    memory_bytes: int = 2**30
    jobs: dict[str, JobSpec] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    taken: dict[str, int] = field(default_factory=dict)
    spent: list[float] = field(default_factory=list)

    @property
    def facts(self) -> WorkerFacts:
        return WorkerFacts(SHAPE, LINEARS, max_length=64, memory_bytes=self.memory_bytes)

    def take_spans(self) -> Sequence[ReplicaSpans]:
        return ()

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        self.commands.append(command)
        match command:
            case Attach():
                return [self._attach(command)]
            case Detach():
                del self.jobs[command.job], self.steps[command.job]
                return []
            case RunSchedule():
                return self._run_schedule(command)
            case Evaluate():
                return self._run(command.microbatches, evaluation=True)
            case KeepWeights():
                return []
            case SaveCheckpoint():
                assert command.cursor.step == self.steps[command.job]
                save(command.directory, command.cursor)
                return [Saved(command.job, self._spend())]
            case Export():
                return [Saved(command.job, self._spend())]
            case Generate():
                return [self._generate(each) for each in command.jobs]

    def _spend(self) -> float:
        """A little more each time, so that no two are mistaken for each other."""
        self.spent.append(0.01 + 0.00137 * len(self.spent))
        return self.spent[-1]

    def _attach(self, command: Attach) -> WorkerEvent:
        name = command.job.name
        assert name not in self.jobs
        if self.attach_room is not None and len(self.jobs) >= self.attach_room:
            return OutOfMemory("no room", self._spend())
        cursor, found = Cursor(), None
        if command.resume_from is not None:
            found = checkpoints(command.resume_from)[0]
            cursor = Cursor(**json.loads((found / HEADER).read_text()))
        self.jobs[name], self.steps[name] = command.job, cursor.step
        return Attached(name, cursor, found, seconds=self._spend())

    def _run_schedule(self, schedule: RunSchedule) -> list[WorkerEvent]:
        """The microbatches, then the steps of the jobs that did not fail."""
        events = self._run(schedule.microbatches, evaluation=False)
        if any(isinstance(event, OutOfMemory) for event in events):
            return events
        failed = {event.job for event in events if isinstance(event, JobFailed)}
        return [*events, *(self._step(each) for each in schedule.steps if each.job not in failed)]

    def _run(self, microbatches: Sequence[Microbatch], *, evaluation: bool) -> list[WorkerEvent]:
        names = {segment.job for each in microbatches for segment in each.segments}
        if not evaluation and self.room is not None and len(names) > self.room:
            return [OutOfMemory("no room", self._spend())]
        events: list[WorkerEvent] = []
        for each in microbatches:
            losses = []
            for segment in each.segments:
                assert segment.step == self.steps[segment.job] + (0 if evaluation else 1)
                labelled = segment.tokens - len(segment.samples)
                loss = self.curve(self.jobs[segment.job], self.steps[segment.job])
                losses.append(JobLoss(segment.job, segment.step, loss * labelled, labelled, segment.tokens))
                if reason := self.fault("evaluate" if evaluation else "run", segment.job, segment.step):
                    events.append(JobFailed(segment.job, segment.step, reason))
            events.append(MicrobatchDone(each.index, tuple(losses), self._spend(), (), evaluation))
        return events

    def _step(self, asked: StepJob) -> WorkerEvent:
        job, step = asked.job, asked.step
        assert step == self.steps[job] + 1
        if reason := self.fault("step", job, step):
            return JobFailed(job, step, reason, self._spend())
        self.steps[job] = self.taken[job] = step
        return StepDone(job, step, 1.0, self._spend())

    def _generate(self, asked: GenerateJob) -> WorkerEvent:
        """Answers are "a" and "b" in turn."""
        if reason := self.fault("generate", asked.job, self.steps[asked.job]):
            return JobFailed(asked.job, 0, reason, self._spend())
        return Generated(asked.job, asked.samples, tuple("ab"[i % 2] for i in asked.samples), self._spend())


def save(directory: Path, cursor: Cursor) -> None:
    """Write a checkpoint that a :class:`CurveWorker` reads."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / HEADER).write_text(json.dumps(asdict(cursor)))
    except OSError as error:
        raise StorageError(f"{directory}: {error}") from error
