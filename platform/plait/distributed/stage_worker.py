"""A seam: the worker of one stage of a pipeline carries out its list of instructions.

No process waits for all others at an optimiser step: the norm by which a gradient is clipped travels with
gradients and hidden states (:mod:`plait.planner.instructions`). Adapters are whole on disk: the first stage
collects their parts from the others, and each stage reads its own part of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from plait.core.errors import ConfigError, ShortStageError
from plait.core.messages import (
    Command,
    Evaluate,
    Export,
    JobFailed,
    JobLoss,
    MicrobatchDone,
    RunSchedule,
    SaveCheckpoint,
    Saved,
    StepDone,
    StepJob,
    WorkerEvent,
)
from plait.core.plans import Microbatch
from plait.core.settings import EngineSettings
from plait.cost.replica import balanced_split
from plait.cost.time import MicrobatchShape, arithmetic_time
from plait.distributed.links import Links
from plait.engine.adapter_store import AdapterStore
from plait.engine.catalogue import DataCatalogue
from plait.engine.local_worker import LocalWorker
from plait.engine.memory import attempt
from plait.engine.microbatches import LoadedMicrobatch, load_microbatch
from plait.engine.span_recorder import SpanRecorder, work_of
from plait.models.base import BaseModel
from plait.planner.instructions import NONE, Instruction, Key
from plait.simulate.lowering import lower
from plait.simulate.orders import rule
from plait_kernels import adamw_step
from plait_kernels.bank import GRADIENTS

NUMBER = 8  # bytes of a float64


def stage_layers(model: BaseModel, stages: int, split: Sequence[int], capacity: int) -> list[range]:
    """The layers of each stage; without a given split, such that the slowest one is as fast as possible.

    Raises:
        ConfigError: the split is not one of this model, or there are more stages than layers.
    """
    if not split:
        weights = sum(each.in_features * each.out_features for each in model.linears)
        time = arithmetic_time(
            model.layer_count, weights=weights, hidden=model.hidden_size, vocabulary=model.vocabulary
        )
        split = balanced_split(time, stages, MicrobatchShape.of([capacity]))
    if sum(split) != model.layer_count or len(split) != stages:
        raise ConfigError(
            f"cluster.layer_split={list(split)}",
            f"It has the layers of each of {stages} stages, {model.layer_count} in all.",
            "Leave it out: then the stages are balanced.",
        )
    return [range(*each) for each in pairwise([0, *accumulate(split)])]


@dataclass(slots=True)
class _Running:
    """A microbatch between its forward and its backward."""

    loaded: LoadedMicrobatch
    entering: Tensor | None
    leaving: Tensor  # hidden states, on the last stage the loss
    nll: Tensor | None
    seconds: float


class StageWorker(LocalWorker):
    """A :class:`~plait.engine.worker.Worker` for one stage, whose number is that of its process.

    Args:
        layers: of every stage.
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
    ) -> None:
        model.keep(layers[links.process])
        super().__init__(model, data, settings, recorder=recorder)
        self._links = links
        self._layers = layers

    def _execute(self, command: Command) -> Sequence[WorkerEvent]:
        match command:
            case RunSchedule():
                return self._attempt(lambda: _Window(self, command).run())
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
                f"stage {self.stage} ran out of memory: {detail}",
                "Each stage keeps the activations of several microbatches.",
                "Lower engine.capacity or planner.max_jobs, or set engine.checkpointing.",
            )
        return events

    # ---- running -----------------------------------------------------------------------------------------

    @property
    def stage(self) -> int:
        """Its number."""
        return self._links.process

    @property
    def model(self) -> BaseModel:
        """Its part of the base model."""
        return self._model

    @property
    def links(self) -> Links:
        """Those to its neighbours."""
        return self._links

    def lists(self, command: RunSchedule) -> list[list[Instruction]]:
        """The lists of all stages, checked."""
        order = rule(command.order, _counts(command.items))
        return lower(command.microbatches, len(self._layers), order)

    def message_bytes(self, microbatch: Microbatch | None, totals: int) -> int:
        """Size of a message with the rows of a microbatch."""
        tokens = 0 if microbatch is None else microbatch.tokens
        return NUMBER * totals + tokens * self._model.hidden_size * self._model.dtype.itemsize

    def unpack(self, message: Tensor, totals: int) -> tuple[list[float], Tensor]:
        """Numbers and rows of a message."""
        head, body = message[: NUMBER * totals], message[NUMBER * totals :]
        rows = body.view(self._model.dtype).view(-1, self._model.hidden_size)
        return head.view(torch.float64).tolist(), rows

    def pack(self, numbers: Sequence[float], rows: Tensor | None) -> Tensor:
        """A message of numbers and rows."""
        head = torch.tensor(numbers, dtype=torch.float64, device=self._model.device).view(torch.uint8)
        if rows is None:
            return head
        return torch.cat([head, rows.detach().contiguous().view(torch.uint8).flatten()])

    def forward(self, microbatch: Microbatch, entering: Tensor | None, *, training: bool) -> _Running:
        """Run this stage's layers, and on the last stage the loss."""
        started = self._clock()
        loaded = load_microbatch(
            microbatch,
            self._split_of,
            self.bank,
            training=training,
            checkpointing=training and self._checkpointing,
        )
        nll = None
        with torch.set_grad_enabled(training):
            leaving = self._model.hidden(loaded.context, entering)
            if self._model.is_last:
                leaving, nll = self._model.loss(leaving, loaded.rows, loaded.targets, loaded.weights)
        return _Running(loaded, entering, leaving, nll, self._clock() - started)

    def backward(self, running: _Running, gradient: Tensor | None) -> float:
        """Run backward from what the next stage sent, on the last one from the loss; its seconds."""
        started = self._clock()
        if running.leaving.requires_grad:
            running.leaving.backward(gradient)  # type: ignore[no-untyped-call]
        return self._clock() - started

    def losses(self, running: _Running) -> tuple[JobLoss, ...]:
        """The losses of a microbatch, which the last stage has."""
        return () if running.nll is None else running.loaded.losses(running.nll)

    def lap(self, microbatch: Microbatch, *, tokens: int, training: bool = True) -> None:
        """A span of forward or backward ends now."""
        self._recorder.lap("microbatch" if training else "evaluation", work_of(microbatch), tokens=tokens)

    def waited(self) -> None:
        """A span of waiting for another stage ends now."""
        self._recorder.lap("waiting")

    def step(self, steps: Sequence[StepJob], norms: Sequence[float]) -> list[WorkerEvent]:
        """Step these jobs by the norms over all stages."""
        started = self._clock()
        due = [self._adapter_step(each) for each in steps]
        results = adamw_step(self.bank, due, norms=norms, backend=self._backend)
        seconds = (self._clock() - started) / len(steps)
        self._recorder.lap("step", tuple((each.job, each.step) for each in steps))
        return [
            StepDone(each.job, each.step, result.grad_norm, seconds)
            for each, result in zip(steps, results, strict=True)
        ]

    def _evaluate(self, microbatches: Sequence[Microbatch]) -> list[WorkerEvent]:
        first, last = self._model.is_first, self._model.is_last
        events: list[WorkerEvent] = []
        if not first:
            self._links.expect(self.stage - 1, [self.message_bytes(each, 0) for each in microbatches])
        for each in microbatches:
            entering = None if first else self.unpack(self._links.receive(self.stage - 1), 0)[1]
            self.waited()
            running = self.forward(each, entering, training=False)
            if not last:
                self._links.send(self.stage + 1, self.pack((), running.leaving))
            events += done(each, self.losses(running), running.seconds, training=False)
            self.lap(each, tokens=each.tokens, training=False)
        self._links.finish()
        return events

    # ---- files -------------------------------------------------------------------------------------------

    def _save(self, job: str, write: Callable[[Sequence[AdapterStore]], None]) -> list[WorkerEvent]:
        """On the first stage: write with the parts of the others; on these: send them."""
        started = self._clock()
        if not self._model.is_first:
            for tensor in self.adapters.whole(job, best=self.adapters.has_best(job)):
                self._links.send(0, tensor.to(self._model.device).contiguous().view(torch.uint8).flatten())
            self._links.finish()
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
        self._links.expect(stage, [each.nbytes for each in tensors])
        for tensor in tensors:
            tensor.copy_(self._links.receive(stage).view(tensor.dtype).view(tensor.shape))
        return part


def done(
    microbatch: Microbatch, losses: tuple[JobLoss, ...], seconds: float, *, training: bool
) -> list[WorkerEvent]:
    """The events of a microbatch; a loss that is not finite fails its job."""
    what = "loss" if training else "validation loss"
    failed = [
        JobFailed(each.job, each.step, f"{what} is {each.loss_sum}")
        for each in losses
        if not math.isfinite(each.loss_sum)
    ]
    return [MicrobatchDone(microbatch.index, losses, seconds, None, evaluation=not training), *failed]


class _Window:
    """One schedule on one stage, from its first instruction to its last."""

    def __init__(self, worker: StageWorker, command: RunSchedule) -> None:
        self.worker = worker
        self.microbatches = command.microbatches
        self.steps = {(each.job, each.step): each for each in command.steps}
        self.list = worker.lists(command)[worker.stage]
        self.hidden: dict[int, Tensor] = {}  # received, not yet used
        self.gradients: dict[int, Tensor] = {}
        self.running: dict[int, _Running] = {}
        self.numbers: dict[Key, float] = {}  # sums of squares on the way up, totals on the way down
        self.events: list[WorkerEvent] = []
        self.stepped: list[WorkerEvent] = []
        self.failed: set[str] = set()  # jobs with a loss that is not finite

    def run(self) -> list[WorkerEvent]:
        """Carry out the list; microbatches first in what it returns, then steps."""
        for kind, process in (("receive_hidden", -1), ("receive_gradient", 1)):
            sizes = [self._bytes(each) for each in self.list if each.kind == kind]
            if sizes:
                self.worker.links.expect(self.worker.stage + process, sizes)
        actions: dict[str, Callable[[Instruction], None]] = {
            "receive_hidden": self._receive_hidden,
            "receive_gradient": self._receive_gradient,
            "forward": self._forward,
            "backward": self._backward,
            "send_hidden": self._send_hidden,
            "send_gradient": self._send_gradient,
            "step": self._step,
        }
        for each in self.list:
            actions[each.kind](each)
        self.worker.links.finish()
        return [*self.events, *self.stepped]

    def _bytes(self, each: Instruction) -> int:
        microbatch = None if each.microbatch == NONE else self.microbatches[each.microbatch]
        return self.worker.message_bytes(microbatch, len(each.keys))

    def _receive(self, each: Instruction, process: int) -> tuple[dict[Key, float], Tensor]:
        numbers, rows = self.worker.unpack(self.worker.links.receive(process), len(each.keys))
        self.worker.waited()
        return dict(zip(each.keys, numbers, strict=True)), rows

    def _receive_hidden(self, each: Instruction) -> None:
        totals, rows = self._receive(each, self.worker.stage - 1)
        self.numbers |= totals
        if each.microbatch != NONE:
            self.hidden[each.microbatch] = rows.requires_grad_()

    def _receive_gradient(self, each: Instruction) -> None:
        sums, self.gradients[each.microbatch] = self._receive(each, self.worker.stage + 1)
        self.numbers |= sums

    def _forward(self, each: Instruction) -> None:
        microbatch = self.microbatches[each.microbatch]
        entering = self.hidden.pop(each.microbatch, None)
        self.running[each.microbatch] = self.worker.forward(microbatch, entering, training=True)
        self.worker.lap(microbatch, tokens=0)

    def _send_hidden(self, each: Instruction) -> None:
        rows = None if each.microbatch == NONE else self.running[each.microbatch].leaving
        totals = [self.numbers.pop(key) for key in each.keys]
        self.worker.links.send(self.worker.stage + 1, self.worker.pack(totals, rows))

    def _backward(self, each: Instruction) -> None:
        microbatch, running = self.microbatches[each.microbatch], self.running[each.microbatch]
        gradient = self.gradients.pop(each.microbatch, None)
        seconds = running.seconds + self.worker.backward(running, gradient)
        if self.worker.stage == 0:
            del self.running[each.microbatch]  # other stages send its gradient on
        events = done(microbatch, self.worker.losses(running), seconds, training=True)
        self.failed |= {event.job for event in events if isinstance(event, JobFailed)}
        self.events += events
        self.worker.lap(microbatch, tokens=microbatch.tokens)

    def _send_gradient(self, each: Instruction) -> None:
        entering = self.running.pop(each.microbatch).entering
        assert entering is not None
        assert entering.grad is not None
        sums = [self._squares(key) + self.numbers.pop(key, 0.0) for key in each.keys]
        self.worker.links.send(self.worker.stage - 1, self.worker.pack(sums, entering.grad))

    def _squares(self, key: Key) -> float:
        """The sum of squares of a job's gradient here; not a number where its loss is not finite, so that no
        stage steps it."""
        if key[0] in self.failed:
            return math.nan
        gradients = self.worker.bank.block(key[0]).state[GRADIENTS]
        return float(gradients.double().square().sum())

    def _step(self, each: Instruction) -> None:
        if self.worker.stage == 0:
            for key in each.keys:
                self.numbers[key] = self._squares(key) + self.numbers.get(key, 0.0)
        norms = [math.sqrt(self.numbers[key]) for key in each.keys]
        self.stepped += self.worker.step([self.steps[key] for key in each.keys], norms)


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
