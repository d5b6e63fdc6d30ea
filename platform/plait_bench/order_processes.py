"""Runs the cases of the benchmark of orders over processes, one for each stage.

A stage sleeps instead of computing, so that processes may share a few cores and the measurement is of the
schedule, the messages and the loop over instructions alone; or it is the engine's, with its part of the run's
model. Stages that train are measured by processor seconds, since with fewer cores than stages they would wait
for each other's core: a stage's time passes while its thread runs, and where it takes a message, to when that
was sent by the sender's time. So each has a core of its own, whatever else runs; a message is there at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.messages import Attach, Detach, RunSchedule, StepJob
from plait.core.plans import Microbatch
from plait.core.samples import Sample, Split, TokenisedData
from plait.core.settings import RunSettings
from plait.core.spans import ReplicaSpans, Span, SpanKind
from plait.cost.time import StageTime
from plait.distributed.links import Links
from plait.distributed.stage_run import NUMBER, Messages, StageRun
from plait.distributed.stage_worker import StageWorker
from plait.engine.catalogue import DataCatalogue
from plait.engine.replicas import model_time, stage_layers
from plait.engine.span_recorder import Part as Piece
from plait.engine.span_recorder import SpanRecorder, work_of
from plait.models.load import inspect_model, load_part
from plait.models.parts import Part
from plait.planner.instructions import Key
from plait.utils.paths import cache_dir
from plait_bench.gloo_processes import LIMIT, answers, gloo_processes
from plait_bench.order_cases import MODEL, Case, OrderOptions
from plait_bench.progress import part

VOCABULARY = 200  # token ids are drawn below it: any model has so many
RATE = 1e-4  # of learning
CPU = torch.device("cpu")
RECEIVED: SpanKind = "exchange"  # of messages that are taken: there are no replicas to sum over


@dataclass(frozen=True, slots=True)
class Setting:
    """What the processes need to know: a benchmark's options and the run's settings."""

    asked: OrderOptions
    run: RunSettings


class Stages(Protocol):
    """The stages of one process, of one case after another."""

    def case(self, case: Case) -> Callable[[], Sequence[Span]]:
        """Get ready for a case; what is returned runs it, and returns the spans."""


class SleepingStage:
    """A :class:`~plait.distributed.stage_run.Stage` that takes a fixed time.

    Args:
        seconds: for each microbatch; none: those of the options for all.
    """

    def __init__(self, number: int, asked: OrderOptions, seconds: Sequence[StageTime] = ()) -> None:
        self.messages = Messages(asked.width, torch.float32, CPU)
        self.recorder = SpanRecorder()
        self._number = number
        self._asked = asked
        self._seconds = seconds
        self._rows = torch.zeros(asked.tokens, asked.width)

    def received(self) -> None:
        """A span of waiting ends."""
        self.recorder.lap("waiting")

    def sent(self) -> None:
        """A span of sending ends."""
        self.recorder.lap("other")

    def forward(self, number: int, microbatch: Microbatch, entering: Tensor | None) -> Tensor:
        """Take the time of a forward."""
        del entering
        seconds = self._seconds[number] if self._seconds else self._asked.seconds
        return self._take(seconds.forward, microbatch)

    def backward(self, number: int, microbatch: Microbatch, gradient: Tensor | None) -> Tensor | None:
        """Take the time of a backward."""
        del gradient
        seconds = self._seconds[number] if self._seconds else self._asked.seconds
        rows = self._take(seconds.backward, microbatch)
        return rows if self._number else None

    def _take(self, seconds: float, microbatch: Microbatch) -> Tensor:
        time.sleep(seconds)
        self.recorder.lap("microbatch", work_of(microbatch), tokens=microbatch.tokens)
        return self._rows[: microbatch.tokens]

    def squares(self, key: Key) -> float:
        """Nothing is trained."""
        del key
        return 0.0

    def step(self, keys: Sequence[Key], norms: Sequence[float]) -> None:
        """It takes no time."""
        del norms
        self.recorder.lap("step", tuple(keys))


class Sleeping:
    """:class:`Stages` that sleep."""

    def __init__(self, number: int, count: int, setting: Setting) -> None:
        self._number, self._asked = number, setting.asked
        self._links = Links(number, CPU)
        self._groups = {n: dist.new_group(range(n), timeout=LIMIT) for n in range(1, count + 1)}

    def case(self, case: Case) -> Callable[[], Sequence[Span]]:
        """Get ready for a case."""

        def run() -> Sequence[Span]:
            own = case.seconds[self._number] if case.seconds else ()
            stage = SleepingStage(self._number, self._asked, own)
            loop = StageRun(stage, self._links, self._number)
            loop.prepare(case.lists, dict(enumerate(case.microbatches)))
            for each in case.lists[self._number]:
                if case.collective and each.kind == "step":
                    for _ in each.keys:
                        dist.all_reduce(torch.zeros(1), group=self._groups[case.stages])
                    stage.received()
                if not case.collective or each.kind != "step" or self._number == 0:
                    loop.do(each)
            self._links.finish()
            return stage.recorder.take()

        return run


class ProcessorClock:
    """Seconds in which this thread ran, and in which it waited for what other threads sent by such clocks."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        """The time."""
        return time.thread_time() + self._ahead

    def reset(self) -> None:
        """Begin at zero."""
        self._ahead = -time.thread_time()

    def skip(self, seconds: float) -> None:
        """So much time has passed in which the thread waited."""
        self._ahead += seconds


class TimedMessages(Messages):
    """Messages that say when they were ready to be sent; who reads them could not take them earlier."""

    def __init__(
        self, width: int, dtype: torch.dtype, device: torch.device, recorder: ProcessorRecorder
    ) -> None:
        super().__init__(width, dtype, device)
        self._recorder = recorder

    def bytes(self, microbatch: Microbatch | None, numbers: int = 0) -> int:
        """Size of a message with the rows of a microbatch."""
        return super().bytes(microbatch, numbers + 1)

    def pack(self, rows: Tensor | None, numbers: Sequence[float] = ()) -> Tensor:
        """A message."""
        message = super().pack(rows, (*numbers, 0.0))
        message[NUMBER * len(numbers) :][:NUMBER].view(torch.float64).fill_(self._recorder.clock())
        return message

    def unpack(self, message: Tensor, numbers: int = 0) -> tuple[list[float], Tensor]:
        """Numbers and rows of a message."""
        (*found, sent), rows = super().unpack(message, numbers + 1)
        self._recorder.took(sent)
        return found, rows


class ProcessorRecorder(SpanRecorder):
    """Spans by a :class:`ProcessorClock`."""

    def __init__(self, clock: ProcessorClock) -> None:
        super().__init__(clock)
        self._clock = clock

    def took(self, sent: float) -> None:
        """What the thread did since the last call was to take a message: it waited until that was sent."""
        running, waited = self.clock() - self._last, max(0.0, sent - self._last)
        self._clock.skip(waited)
        self.share([Piece("waiting", (), waited), Piece(RECEIVED, (), running)])


class Training:
    """:class:`Stages` of the engine, with the parts of the run's model."""

    def __init__(self, number: int, setting: Setting) -> None:
        self._number, self._setting = number, setting
        self._clock = ProcessorClock()
        self._recorder = ProcessorRecorder(self._clock)
        self._workers: dict[int, StageWorker] = {}  # by stages
        asked = setting.asked
        self._data = DataCatalogue(lambda spec: drawn(spec, asked))

    def case(self, case: Case) -> Callable[[], Sequence[Span]]:
        """Attach fresh jobs."""
        if case.stages not in self._workers:
            self._workers[case.stages] = self._worker(case.stages)
        worker = self._workers[case.stages]
        jobs = [_job(place, self._setting.asked) for place in range(case.adapters)]
        for job in jobs:
            worker.execute(Attach(job))

        def run() -> Sequence[Span]:
            self._clock.reset()
            self._recorder.lap("other")
            self._recorder.take()
            worker.execute(RunSchedule(items(case), order=case.name))
            found = self._recorder.take()
            for job in jobs:
                worker.execute(Detach(job.name))
            return found

        return run

    def _worker(self, stages: int) -> StageWorker:
        model, tokens = self._setting.run.model, self._setting.asked.tokens
        shape = inspect_model(model, cache=cache_dir())
        seconds = model_time(shape.linears, shape.layer_count, shape.hidden_size, shape.vocabulary)
        layers = stage_layers(seconds, stages, (), tokens)
        base = load_part(model, Part(layers[self._number]), cache=cache_dir())
        worker = StageWorker(
            base,
            self._data,
            replace(self._setting.run.engine, capacity=tokens, threads=1),
            links=Links(self._number, CPU),
            layers=layers,
            recorder=self._recorder,
        )
        worker.messages = TimedMessages(base.hidden_size, base.dtype, base.device, self._recorder)
        return worker


def items(case: Case) -> tuple[Microbatch | StepJob, ...]:
    """A case as the engine is given it: each job steps after its global batch."""
    last = {(s.job, s.step): at for at, each in enumerate(case.microbatches) for s in each.segments}
    found: list[Microbatch | StepJob] = []
    for at, each in enumerate(case.microbatches):
        found.append(each)
        found += [StepJob(*key, RATE) for key, place in last.items() if place == at]
    return tuple(found)


def _job(place: int, asked: OrderOptions) -> JobSpec:
    train = TrainSpec(steps=asked.steps, batch_size=asked.microbatches, seed=place)
    return JobSpec(f"job{place}", AdapterSpec(), train, DataSpec.of("drawn", seed=place))


def drawn(spec: DataSpec, asked: OrderOptions) -> TokenisedData:
    """Random samples, each of which fills a microbatch."""
    source = np.random.default_rng(spec.mapping()["seed"])
    samples = [
        Sample(source.integers(3, VOCABULARY, asked.tokens).astype(np.int32), np.ones(asked.tokens, np.bool_))
        for _ in range(asked.microbatches)
    ]
    return TokenisedData(spec.options, Split.of(samples), Split.of([]))


def spans_of(cases: Sequence[Case], setting: Setting) -> list[list[ReplicaSpans]]:
    """Run the cases over processes, one after another; the spans of every stage.

    Raises:
        LostProcessError: a process died or hangs.
    """
    found: list[list[ReplicaSpans]] = []
    count = max(case.stages for case in cases)
    with gloo_processes(count, _serve, count, cases, setting) as links:
        piece = part("measuring", len(cases))
        for case in cases:
            piece(case.label)
            found.append(answers(links[: case.stages], f"a stage of {case.label} is lost"))
    return found


def _serve(number: int, link: Connection, count: int, cases: Sequence[Case], setting: Setting) -> None:
    """One process: the stage of its number in every case that has it."""
    stages: Stages = (
        Training(number, setting) if setting.asked.work == MODEL else Sleeping(number, count, setting)
    )
    for case in cases:
        run = stages.case(case) if number < case.stages else None
        dist.barrier()
        if run is not None:
            link.send(ReplicaSpans(number, "", 0, "cpu", tuple(run())))
        dist.barrier()  # no process gets ready for the next one while another still runs
