"""Orders of a pipeline, measured: stages in processes that take a fixed time, beside the simulator.

A stage sleeps instead of computing, so that processes may share a few cores and the measurement is of the
schedule, the messages and the loop over instructions alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from plait.config.fields import build
from plait.core.errors import ConfigError, LostProcessError, choices
from plait.core.jobs import JobSpec
from plait.core.plans import GlobalBatch, Microbatch
from plait.core.settings import RunSettings
from plait.core.spans import ReplicaSpans
from plait.cost.time import StageTime
from plait.distributed.links import Links
from plait.distributed.stage_run import Messages, StageRun
from plait.engine.replica_times import times_between
from plait.engine.span_recorder import SpanRecorder, work_of
from plait.planner.instructions import Instruction, Key
from plait.planner.packing_exact import GREEDY
from plait.simulate.events import Pipeline, Work, simulate
from plait.simulate.lowering import lower
from plait.simulate.orders import ORDERS, OrderName, arrange
from plait_bench.benchmarks import BENCHMARKS
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import OPTIONS, at_least_one
from plait_bench.progress import part

LIMIT = timedelta(minutes=5)  # a case that takes longer hangs
Lists = Sequence[Sequence[Instruction]]


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """Options of the benchmark of orders.

    Attributes:
        stages: numbers of them; each is measured, over as many processes.
        adapters: numbers of them, each trained for ``steps`` steps.
        orders: by name.
        microbatches: of each adapter's global batch.
        tokens: of a microbatch.
        width: numbers of a token that stages send, of 4 bytes.
        forward, backward: milliseconds of a stage for a microbatch.
    """

    stages: tuple[int, ...] = (2, 3, 4)
    adapters: tuple[int, ...] = (1, 2, 3, 4)
    orders: tuple[str, ...] = ORDERS
    microbatches: int = 4
    steps: int = 2
    tokens: int = 64
    width: int = 512
    forward: float = 40.0
    backward: float = 80.0

    def __post_init__(self) -> None:
        at_least_one(self, "microbatches", "steps", "tokens", "width")
        if wrong := sorted(set(self.orders) - set(ORDERS)):
            raise ConfigError(f"{OPTIONS}.orders={wrong}", f"It has names of orders: {choices(ORDERS)}.")
        for name in ("stages", "adapters"):
            if min(getattr(self, name), default=0) < 1:
                raise ConfigError(
                    f"{OPTIONS}.{name}={getattr(self, name)}", "There must be one, of at least 1."
                )


@dataclass(frozen=True, slots=True)
class Case:
    """One order with its lists.

    Attributes:
        collective: whether all stages wait for each other at every optimiser step.
    """

    name: OrderName
    stages: int
    adapters: int
    microbatches: tuple[Microbatch, ...]
    lists: Lists
    makespan: float
    waiting: float
    collective: bool = False

    @property
    def label(self) -> str:
        """In the table."""
        jobs = f"{self.adapters} adapter{'s' * (self.adapters > 1)}"
        return f"{self.stages} stages, {jobs}, {self.name}"


def case_of(name: OrderName, stages: int, adapters: int, asked: OrderOptions, *, slack: int = 0) -> Case:
    """Plan, simulate and lower one case; its makespan and share of waiting are the simulator's.

    Args:
        slack: microbatches more between a batch and the next one of its job than the stages need.
    """
    batches = {f"job{place}": _batches(f"job{place}", asked) for place in range(adapters)}
    found = arrange(name, batches, stages=stages + slack, capacity=asked.tokens, limits=GREEDY)
    one = StageTime(asked.forward / 1000, asked.backward / 1000)
    seconds = [[one if each.segments else StageTime(0.0, 0.0) for each in found.microbatches]] * stages
    works = [
        Work(tuple((part.job, part.step) for part in each.segments), tokens=each.tokens)
        for each in found.microbatches
    ]
    run = simulate({0: Pipeline(works, seconds, found.order)})
    busy = sum(span.end - span.start for span in run.spans)
    lists = lower(found.microbatches, stages, found.order, seconds)
    waiting = 1 - busy / (stages * run.makespan)
    return Case(name, stages, adapters, found.microbatches, lists, run.makespan, waiting)


def _batches(job: str, asked: OrderOptions) -> list[GlobalBatch]:
    count, lengths = asked.microbatches, (asked.tokens,) * asked.microbatches
    return [
        GlobalBatch(job, step, tuple(range(count)), (0,) * count, lengths, 1.0) for step in range(asked.steps)
    ]


def with_collectives(case: Case) -> Case:
    """The same with a collective at every step: each stage steps before it takes anything that follows."""
    lists = []
    for own in case.lists:
        moved: list[Instruction] = []
        for each in own:
            after = moved and moved[-1].kind == "receive_hidden" and moved[-1].keys == each.keys
            moved.insert(len(moved) - (1 if each.kind == "step" and after else 0), each)
        lists.append(moved)
    return replace(case, lists=lists, collective=True)


class SleepingStage:
    """A :class:`~plait.distributed.stage_run.Stage` that takes a fixed time."""

    def __init__(self, number: int, asked: OrderOptions) -> None:
        self.messages = Messages(asked.width, torch.float32, torch.device("cpu"))
        self.recorder = SpanRecorder()
        self._number = number
        self._asked = asked
        self._rows = torch.zeros(asked.tokens, asked.width)

    def received(self) -> None:
        """A span of waiting ends."""
        self.recorder.lap("waiting")

    def forward(self, number: int, microbatch: Microbatch, entering: Tensor | None) -> Tensor:
        """Take the time of a forward."""
        del number, entering
        return self._take(self._asked.forward, microbatch)

    def backward(self, number: int, microbatch: Microbatch, gradient: Tensor | None) -> Tensor | None:
        """Take the time of a backward."""
        del number, gradient
        rows = self._take(self._asked.backward, microbatch)
        return rows if self._number else None

    def _take(self, milliseconds: float, microbatch: Microbatch) -> Tensor:
        time.sleep(milliseconds / 1000)
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


@dataclass(frozen=True, slots=True)
class Measured:
    """What a case took: from its first span to its last, and the share of it in which stages waited."""

    makespan: float
    waiting: float


def measure(cases: Sequence[Case], asked: OrderOptions) -> list[Measured]:
    """Run the cases over processes, one after another.

    Raises:
        LostProcessError: a process died or hangs.
    """
    count, context = max(case.stages for case in cases), get_context("spawn")
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(count)]
        processes = [
            context.Process(target=_serve, args=(number, count, folder, far, cases, asked), daemon=True)
            for number, (_, far) in enumerate(pipes)
        ]
        for each in processes:
            each.start()
        for _, far in pipes:
            far.close()
        piece = part("measuring", len(cases))
        for case in cases:
            piece(case.label)
            found.append(_measured(case, [near for near, _ in pipes[: case.stages]]))
        for each in processes:
            each.join()
    return found


def _measured(case: Case, links: Sequence[Connection]) -> Measured:
    spans: list[ReplicaSpans] = []
    for link in links:
        with suppress(EOFError):
            if link.poll(LIMIT.total_seconds()):
                spans.append(link.recv())
    if len(spans) < len(links):
        raise LostProcessError(
            f"a stage of {case.label} is lost", "Every stage answers within 5 minutes.", "Run it again."
        )
    start = min(each.spans[0].start for each in spans)
    end = max(each.spans[-1].end for each in spans)
    times = times_between(spans, start, end)
    waited = sum(each.waited_seconds for each in times)
    return Measured(end - start, waited / (case.stages * (end - start)))


def _serve(
    number: int, count: int, folder: str, link: Connection, cases: Sequence[Case], asked: OrderOptions
) -> None:
    """One process: the stage of its number in every case that has it."""
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), count)
    dist.init_process_group("gloo", store=store, rank=number, world_size=count, timeout=LIMIT)
    groups = {stages: dist.new_group(range(stages), timeout=LIMIT) for stages in range(1, count + 1)}
    links = Links(number, torch.device("cpu"))
    for case in cases:
        dist.barrier()
        if number < case.stages:
            stage = SleepingStage(number, asked)
            run = StageRun(stage, links, number)
            run.prepare(case.lists, dict(enumerate(case.microbatches)))
            for each in case.lists[number]:
                if case.collective and each.kind == "step":
                    for _ in each.keys:
                        dist.all_reduce(torch.zeros(1), group=groups[case.stages])
                    stage.received()
                if not case.collective or each.kind != "step" or number == 0:
                    run.do(each)
            links.finish()
            link.send(ReplicaSpans(number, "", 0, "cpu", stage.recorder.take()))
    dist.barrier()
    dist.destroy_process_group()


@BENCHMARKS.register("mlora/pipeline_orders")
def pipeline_orders(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Waiting shares of every order, by stages and adapters, measured beside simulated.

    Raises:
        ConfigError: a wrong option.
        LostProcessError: a process died or hangs.
    """
    del settings, jobs
    asked = build(OrderOptions, options, OPTIONS)
    names = [name for name in ORDERS if name in asked.orders]
    cases = [
        case_of(name, stages, adapters, asked)
        for stages in asked.stages
        for adapters in asked.adapters
        for name in names
    ]
    often = replace(asked, microbatches=2, steps=2 * asked.steps)
    stepping = case_of("plait", max(asked.stages), max(asked.adapters), often)
    _, *measured, own, collective = measure(  # the first one connects the processes
        [stepping, *cases, stepping, with_collectives(stepping)], asked
    )
    figures = [
        _figure(case, found, detail=case.stages < max(asked.stages))
        for case, found in zip(cases, measured, strict=True)
    ]
    apart = max(100 * abs(m.waiting - c.waiting) for c, m in zip(cases, measured, strict=True))
    longest = max(m.makespan / c.makespan for c, m in zip(cases, measured, strict=True))
    worst = Figure("largest difference from the simulated share", apart, "points", "measured")
    slowest = Figure(
        "longest makespan over the simulator's",
        longest,
        "×",
        "measured",
        Baseline(1.0, "simulated", at_most=1.1),
    )
    stalled = Figure(
        f"{stepping.label}, 2 microbatches a batch, a collective at each step: makespan",
        collective.makespan,
        "s",
        "measured",
        Baseline(own.makespan, "without", at_least=1.3),
    )
    times = f"{asked.forward:g} ms forward and {asked.backward:g} ms backward"
    note = f"A stage sleeps {times} for a microbatch, in a process of its own."
    return Report("Orders of a pipeline", (*figures, worst, slowest, stalled), (note,))


def _figure(case: Case, found: Measured, *, detail: bool) -> Figure:
    simulated = Baseline(100 * case.waiting, "simulated")
    note = f"makespan {found.makespan:.2f} s, simulated {case.makespan:.2f} s"
    name, waiting = f"{case.label}: waiting", 100 * found.waiting
    return Figure(name, waiting, "%", "measured", simulated, note=note, detail=detail)
