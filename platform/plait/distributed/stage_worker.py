"""A seam: the worker of one stage of a pipeline carries out its list of instructions.

No process waits for all others at an optimiser step: the norm by which a gradient is clipped travels with
gradients and hidden states (:mod:`plait.planner.instructions`). Adapters are whole on disk: the first stage
collects their parts from the others, and each stage reads its own part of a checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.core.errors import ShortStageError
from plait.core.messages import (
    Command,
    Detach,
    Evaluate,
    Export,
    JobFailed,
    JobLoss,
    RunSchedule,
    SaveCheckpoint,
    Saved,
    ScheduleDone,
    StepJob,
    WorkerEvent,
)
from plait.core.plans import Microbatch
from plait.core.settings import EngineSettings
from plait.cost.peaks import PhasePeaks
from plait.distributed.links import Links
from plait.distributed.stage_run import Messages, StageRun
from plait.distributed.tensor import SharedSides, TensorGroup
from plait.engine.adapter_store import AdapterStore
from plait.engine.asked import done
from plait.engine.catalogue import DataCatalogue
from plait.engine.local_worker import LocalWorker
from plait.engine.memory import FlightPeaks, attempt
from plait.engine.microbatches import LoadedMicrobatch, gather, job_losses
from plait.engine.span_recorder import SpanRecorder, work_of
from plait.models.base import BaseModel
from plait.planner.instructions import Key
from plait.simulate.lowering import Lowering
from plait.simulate.orders import rule
from plait_kernels import adamw_step
from plait_kernels.bank import GRADIENTS

EVALUATION, PART = "evaluation", "part"  # what messages are for, besides training


@dataclass(slots=True)
class _Running:
    """A microbatch between its forward and its backward."""

    loaded: LoadedMicrobatch
    entering: Tensor | None
    leaving: Tensor  # hidden states, on the last stage the loss
    nll: Tensor | None
    seconds: float


@dataclass(slots=True)
class _Schedule:
    """A schedule that is not done: backwards and steps that are left, and the events of the others."""

    left: int
    steps: dict[Key, StepJob]
    events: list[WorkerEvent] = field(default_factory=list)
    stepped: list[WorkerEvent] = field(default_factory=list)


class StageWorker(LocalWorker):
    """A :class:`~plait.engine.worker.Worker` for one stage, whose number is that of its process.

    Args:
        model: of which the stage's part is here.
        layers: of every stage.
        group: the processes that hold the stage's layers together; None: this one alone.
    """

    def __init__(
        self,
        model: BaseModel,
        data: DataCatalogue,
        settings: EngineSettings,
        *,
        links: Links,
        layers: Sequence[range],
        recorder: SpanRecorder,
        group: TensorGroup | None = None,
    ) -> None:
        super().__init__(model, data, settings, recorder=recorder)
        self._links, self._stage = links, links.process
        self._layers = layers
        self.messages = Messages(model.hidden_size, model.dtype, model.device)
        self._lowering = Lowering(len(layers))
        self._stage_run = StageRun(self, links, links.process)
        self._running: dict[int, _Running] = {}
        self._schedules: deque[_Schedule] = deque()
        self._of_number: dict[int, _Schedule] = {}  # by microbatch
        self._of_key: dict[Key, _Schedule] = {}
        self._peaks = FlightPeaks(model.device, self._static)
        self._observed: set[int] = set()  # microbatches that are not back
        self._shared = None if group is None else SharedSides(group, model.slices, self.bank.sites)

    def _execute(self, command: Command) -> Sequence[WorkerEvent]:
        match command:
            case RunSchedule():
                return self._attempt(lambda: self._run_window(command))
            case Detach(job):
                self._lowering.forget(job)
            case Evaluate(microbatches):
                return self._attempt(lambda: self._evaluate(microbatches))
            case SaveCheckpoint(job, directory, cursor):
                return self._save(job, lambda parts: self.adapters.save(job, directory, cursor, parts))
            case Export(job, directory, kept_step):
                return self._save(job, lambda parts: self.adapters.export(job, directory, kept_step, parts))
        return super()._execute(command)

    def _attempt(self, action: Callable[[], list[WorkerEvent]]) -> list[WorkerEvent]:
        """The events of an action.

        Raises:
            ShortStageError: memory ran out; what was sent and received until then is of no use.
        """
        events, detail = attempt(action)
        if events is None:
            raise ShortStageError(
                f"stage {self._stage} ran out of memory: {detail}",
                "Each stage keeps the activations of several microbatches.",
                "Lower engine.capacity or planner.max_jobs, or set engine.checkpointing.",
            )
        return events

    # ---- schedules ---------------------------------------------------------------------------------------

    def _run_window(self, command: RunSchedule) -> list[WorkerEvent]:
        """Run the next schedule as far as it may be run without another; what is done by then."""
        begin, order = self._lowering.next, rule(command.order, _counts(command.items))
        lists = self._lowering.window(command.microbatches, order, drained=command.drained)
        numbered = dict(enumerate(command.microbatches, begin))
        steps = {(each.job, each.step): each for each in command.steps}
        filled = {number: each.tokens for number, each in numbered.items() if each.segments}
        if filled and self._sampler.wanted(self._jobs, [*filled.values()]):
            self._observed |= filled.keys()
        schedule = _Schedule(len(filled) + len(steps), steps)
        if schedule.left:  # one that only drains is nothing by itself
            self._schedules.append(schedule)
        self._of_number |= dict.fromkeys(filled, schedule)
        self._of_key |= dict.fromkeys(steps, schedule)
        self._recorder.lap("other")  # the lists are made
        self._stage_run.run(lists, numbered)
        if command.drained:
            self._links.finish()
        done: list[WorkerEvent] = []
        while self._schedules and not self._schedules[0].left:
            first = self._schedules.popleft()
            done.append(ScheduleDone((*first.events, *first.stepped)))
        return done

    def received(self) -> None:
        """A span of waiting for another stage ends now."""
        self._recorder.lap("waiting")

    def sent(self) -> None:
        """A span of sending ends now; else it would count as waiting for what comes next."""
        self._recorder.lap("other")

    def forward(self, number: int, microbatch: Microbatch, entering: Tensor | None) -> Tensor | None:
        """Run this stage's layers, and on the last stage the loss."""
        with self._peaks.forward(number, number in self._observed) as peaks:
            running = self._running[number] = self._through(microbatch, entering, peaks, training=True)
        self._recorder.lap("microbatch", work_of(microbatch))
        return None if self._model.is_last else running.leaving

    def backward(self, number: int, microbatch: Microbatch, gradient: Tensor | None) -> Tensor | None:
        """Run backward from what the next stage sent, on the last one from the loss."""
        started, running = self._clock(), self._running.pop(number)
        with self._peaks.backward(number) as found:
            if running.leaving.requires_grad:
                running.leaving.backward(gradient)  # type: ignore[no-untyped-call]
        self._observed.discard(number)
        seconds = running.seconds + self._clock() - started
        events = done(microbatch, _losses(running), seconds, training=True, peaks=tuple(found))
        self._failed |= {event.job for event in events if isinstance(event, JobFailed)}
        schedule = self._of_number.pop(number)
        schedule.events += events
        schedule.left -= 1
        self._recorder.lap("microbatch", work_of(microbatch), tokens=microbatch.tokens)
        return None if running.entering is None else running.entering.grad

    def squares(self, key: Key) -> float:
        """The sum of squares of a job's gradient here; not a number after a loss or a norm that is not
        finite, so that no stage steps it any more."""
        if key[0] in self._failed:
            return math.nan
        block = self.bank.block(key[0])
        if self._shared is not None:
            return self._shared.complete(block)
        return float(block.state[GRADIENTS].double().square().sum())

    def step(self, keys: Sequence[Key], norms: Sequence[float]) -> None:
        """Step these jobs by the norms over all stages."""
        started = self._clock()
        schedules = [self._of_key.pop(key) for key in keys]
        due = [self._adapter_step(each.steps[key]) for key, each in zip(keys, schedules, strict=True)]
        results = adamw_step(self.bank, due, norms=norms, backend=self._backend)
        stepped = self._stepped(keys, results, self._clock() - started)
        self._recorder.lap("step", tuple(keys))
        for schedule, event in zip(schedules, stepped, strict=True):
            schedule.stepped.append(event)
            schedule.left -= 1
            if not math.isfinite(event.grad_norm):
                self._failed.add(event.job)

    def _through(
        self, microbatch: Microbatch, entering: Tensor | None, peaks: PhasePeaks, *, training: bool
    ) -> _Running:
        """Forward, on the last stage up to the loss."""
        started = self._clock()
        if entering is not None and training:
            entering.requires_grad_()
        again = training and self._checkpointing
        gathered = gather(microbatch, self._split_of)
        loaded = gathered.loaded(self.bank, training=training, checkpointing=again)
        nll = None
        with torch.set_grad_enabled(training):
            leaving = self._model.hidden(loaded.context, entering)
            peaks.end("forward")
            if self._model.is_last:
                leaving, nll = self._model.loss(leaving, loaded.rows, loaded.targets, loaded.weights)
                peaks.end("loss")
        return _Running(loaded, entering, leaving, nll, self._clock() - started)

    def _evaluate(self, microbatches: Sequence[Microbatch]) -> list[WorkerEvent]:
        first, last = self._model.is_first, self._model.is_last
        events: list[WorkerEvent] = []
        if not first:
            sizes = [self.messages.bytes(each) for each in microbatches]
            self._links.expect(self._stage - 1, sizes, EVALUATION)
        for each in microbatches:
            entering = None
            if not first:
                _, entering = self.messages.unpack(self._links.receive(self._stage - 1, EVALUATION))
            self.received()
            running = self._through(each, entering, PhasePeaks(), training=False)
            if not last:
                self._links.send(self._stage + 1, self.messages.pack(running.leaving))
            events += done(each, _losses(running), running.seconds, training=False)
            self._recorder.lap("evaluation", work_of(each), tokens=each.tokens)
        return events

    # ---- files -------------------------------------------------------------------------------------------

    def _save(self, job: str, write: Callable[[Sequence[AdapterStore]], None]) -> list[WorkerEvent]:
        """On the first stage: write with the parts of the others; on these: send them."""
        started = self._clock()
        if not self._model.is_first:
            for tensor in self.adapters.whole(job, best=self.adapters.has_best(job)):
                self._links.send(0, tensor.to(self._model.device).contiguous().view(torch.uint8).flatten())
            self._recorder.lap("checkpoint", ((job, 0),))
            return []
        write([self._part(job, stage) for stage in range(1, len(self._layers))])
        self._recorder.lap("checkpoint", ((job, 0),))
        return [Saved(job, self._clock() - started)]

    def _part(self, job: str, stage: int) -> AdapterStore:
        """A store with what another stage has of a job."""
        part = AdapterStore(self._model, layers=self._layers[stage])
        part.outline(self._jobs[job])
        tensors = part.whole(job, best=self.adapters.has_best(job))
        self._links.expect(stage, [each.nbytes for each in tensors], PART)
        for tensor in tensors:
            tensor.copy_(self._links.receive(stage, PART).view(tensor.dtype).view(tensor.shape))
        return part


def _losses(running: _Running) -> tuple[JobLoss, ...]:
    """The losses of a microbatch, which the last stage has."""
    loaded = running.loaded
    if running.nll is None:
        return ()
    return job_losses(loaded.counts, loaded.segments, loaded.sums(running.nll))


def _counts(items: Sequence[Microbatch | StepJob]) -> list[int]:
    """Microbatches up to each run of steps, or to the end."""
    counts = [0]
    stepping = False
    for each in items:
        if stepping and isinstance(each, Microbatch):
            counts.append(0)
        stepping = isinstance(each, StepJob)
        counts[-1] += not stepping
    return counts
