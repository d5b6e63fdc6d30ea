"""Replicas with stages of fixed time, measured: what adding up their gradients costs, hidden and not.

Stages sleep, each in a process of its own, over the links, the exchange and the loop that real ones use. The
simulator knows no exchange, so its makespan is what would be reached if sums took no time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from plait.config.fields import build
from plait.core.errors import LostProcessError
from plait.core.jobs import JobSpec
from plait.core.plans import Microbatch, ReplicaShape
from plait.core.settings import RunSettings
from plait.distributed.exchange import Exchange, Sum
from plait.distributed.layout import Layout
from plait.distributed.links import Links
from plait.distributed.replica_run import ReplicaRun
from plait.engine.span_recorder import SpanRecorder
from plait.planner.instructions import Key
from plait_bench.benchmarks import BENCHMARKS
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import OPTIONS, at_least_one
from plait_bench.order_cases import Case, OrderOptions, case_of
from plait_bench.order_processes import LIMIT, SleepingStage
from plait_bench.progress import part

LAYERS = (range(1), range(1, 2))  # of both replicas: the same
PROCESSES = 2 * len(LAYERS)
SHARE = 1.12  # of the simulated makespan that is aimed at


@dataclass(frozen=True, slots=True)
class Options:
    """Options of ``replica_overlap``.

    Attributes:
        adapters: that train for ``steps`` steps, each with a batch of ``microbatches`` on each replica.
        slack: microbatches that the plan leaves between a batch and the next one of its job for the sum.
        numbers: gradients of an adapter on a stage.
        forward, backward: milliseconds of a stage for a microbatch.
    """

    adapters: int = 4
    steps: int = 6
    microbatches: int = 2
    slack: int = 1
    numbers: int = 1_000_000
    forward: float = 20.0
    backward: float = 40.0

    def __post_init__(self) -> None:
        at_least_one(self, "adapters", "steps", "microbatches", "slack", "numbers")


class SummingSleep(SleepingStage):
    """A sleeping stage of one of several replicas, whose gradients are really added up.

    Attributes:
        hidden: whether sums are made while the stage works.
    """

    def __init__(
        self, number: int, times: OrderOptions, exchange: Exchange, process: int, numbers: int
    ) -> None:
        super().__init__(number, times)
        self.hidden = True
        self._exchange = exchange
        self._open: list[Future[float]] = []  # begun since the last microbatch
        layout = Layout([ReplicaShape(len(LAYERS))] * 2, [LAYERS, LAYERS])
        groups = exchange.groups([each.processes for each in layout.pieces()])
        self._members, self._group = next(each for each in groups.items() if process in each[0])
        self._gradients = torch.ones(numbers)

    def begin(self, key: Key) -> Future[float]:
        """Begin to add up a job's gradients."""
        sums = [Sum(self._group, self._members, [self._gradients])]
        begun = self._exchange.add_pieces(sums, lambda: torch.zeros(1, dtype=torch.float64), (key,))
        self._open = [*self._open, begun]
        return begun

    def _take(self, seconds: float, microbatch: Microbatch) -> Tensor:
        if not self.hidden:
            self.finish(self._open, [])
        self._open = []
        return super()._take(seconds, microbatch)

    def finish(self, begun: Sequence[Future[float]], keys: Sequence[Key]) -> list[float]:
        """Wait for the norms of sums."""
        norms = [self._exchange.result(each) for each in begun]
        self.recorder.lap("exchange", tuple(keys))
        return norms


def measure(runs: Sequence[tuple[Case, bool]], numbers: int, times: OrderOptions) -> list[float]:
    """Makespans over the simulator's, of cases with sums that are hidden or not; both replicas have the same
    lists.

    Raises:
        LostProcessError: a process died or hangs.
    """
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in range(PROCESSES)]
    with tempfile.TemporaryDirectory() as folder:
        given = (folder, runs, numbers, times)
        processes = [
            context.Process(target=_serve, args=(number, far, *given), daemon=True)
            for number, (_, far) in enumerate(pipes)
        ]
        for each in processes:
            each.start()
        for _, far in pipes:
            far.close()
        piece, found = part("measuring", len(runs)), list[float]()
        for case, hidden in runs:
            piece("sums hidden" if hidden else "sums waited for")
            ends = [near.recv() for near, _ in pipes if near.poll(LIMIT.total_seconds())]
            if len(ends) < PROCESSES:
                raise LostProcessError(
                    "a stage is lost", "Every stage answers within 5 minutes.", "Run the benchmark again."
                )
            seconds = max(end for _, end in ends) - min(start for start, _ in ends)
            found.append(seconds / case.simulated([times.seconds] * case.stages).makespan)
        for each in processes:
            each.join()
    return found


def _serve(
    number: int,
    link: Connection,
    folder: str,
    runs: Sequence[tuple[Case, bool]],
    numbers: int,
    times: OrderOptions,
) -> None:
    """One process: a stage of one of two replicas."""
    torch.set_num_threads(1)
    replica, place = divmod(number, len(LAYERS))
    device, store = torch.device("cpu"), FileStore(str(Path(folder) / "store"), PROCESSES)
    exchange = Exchange(store, number, PROCESSES, device, LIMIT.total_seconds(), SpanRecorder())
    links = Links(place, device, range(replica * len(LAYERS), (replica + 1) * len(LAYERS)))
    stage = SummingSleep(place, times, exchange, number, numbers)
    for case, hidden in runs:
        stage.hidden = hidden
        last = {(s.job, s.step): at for at, each in enumerate(case.microbatches) for s in each.segments}
        run = ReplicaRun(stage, links, place)
        run.keys = sorted(last, key=last.__getitem__)  # as they are complete
        dist.barrier()
        stage.recorder.take()
        run.run(case.lists, dict(enumerate(case.microbatches)))
        links.finish()
        own = stage.recorder.take()
        link.send((own[0].start, own[-1].end))
    dist.barrier()
    exchange.close()


@BENCHMARKS.register("replica_overlap")
def replica_overlap(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Two replicas of two stages: sums hidden behind computation, and sums that are waited for.

    Raises:
        ConfigError: a wrong option.
        LostProcessError: a process died or hangs.
    """
    del settings, jobs
    asked = build(Options, options, OPTIONS)
    times = OrderOptions(
        microbatches=asked.microbatches, steps=asked.steps, forward=asked.forward, backward=asked.backward
    )
    tight, case = (
        case_of("plait", len(LAYERS), asked.adapters, times, slack=slack) for slack in (0, asked.slack)
    )
    runs = [(case, True), (case, True), (tight, True), (case, False)]
    _, hidden, without_slack, waited = measure(runs, asked.numbers, times)  # the first one connects
    figures = (
        Figure(
            "sums hidden: makespan over the simulator's",
            hidden,
            "×",
            "measured",
            Baseline(1.0, "simulated", at_most=SHARE),
        ),
        Figure("the same without slack in the plan", without_slack, "×", "measured"),
        Figure("the same with sums that are waited for", waited, "×", "measured"),
    )
    note = (
        f"2 replicas of 2 stages, {asked.adapters} adapters, {asked.steps} steps. A stage sleeps "
        f"{asked.forward:g} and {asked.backward:g} ms for a microbatch, and adds up "
        f"{asked.numbers * 4 / 1e6:.0f} MB for a step of an adapter."
    )
    return Report("Replicas with stages: exchange hidden", figures, (note,))
