"""The worker of one stage where there are several replicas, which may be cut at different layers.

A seam: a stage alone (:mod:`plait.distributed.stage_worker`) knows no other replica. Here gradients of the
same layers are added up over the replicas, and only then the norm by which a job steps is known. So norms do
not travel with hidden states: each stage begins a sum when its last gradient of a batch is there, a thread
carries it out, and the job steps before its next microbatch, or at the end of the schedule.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.messages import RunSchedule, WorkerEvent
from plait.core.plans import Microbatch
from plait.core.settings import EngineSettings
from plait.distributed.exchange import Exchange
from plait.distributed.links import Links
from plait.distributed.stage_run import StageRun
from plait.distributed.stage_worker import StageWorker
from plait.engine.catalogue import DataCatalogue
from plait.engine.span_recorder import SpanRecorder
from plait.models.base import BaseModel
from plait.planner.instructions import NONE, Key, Lists
from plait.planner.verify import ScheduleError
from plait.simulate.lowering import Lowering
from plait_kernels.bank import GRADIENTS, Block, Site


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers that one process of each replica has; ``holders``: these, in the order of the replicas."""

    layers: range
    holders: tuple[int, ...]


def pieces(layers: Sequence[Sequence[range]]) -> list[Piece]:
    """All layers in pieces, given those of every stage of every replica."""
    first = [0, *accumulate(map(len, layers))]
    found, begin = [], 0
    for end in sorted({each.stop for own in layers for each in own}):
        holders = tuple(
            first[replica] + next(stage for stage, each in enumerate(own) if begin in each)
            for replica, own in enumerate(layers)
        )
        found.append(Piece(range(begin, end), holders))
        begin = end
    return found


class ReplicaLinks(Links):
    """Links of a stage to those of its own replica, by their numbers as stages.

    Args:
        first: process of the replica's first stage.
    """

    def __init__(self, stage: int, first: int, device: torch.device) -> None:
        super().__init__(stage, device)
        self._first = first

    def expect(self, process: int, *sizes: Any) -> None:
        """The same, from a stage."""
        super().expect(self._first + process, *sizes)

    def receive(self, process: int, *what: Any) -> Tensor:
        """The same, from a stage."""
        return super().receive(self._first + process, *what)

    def send(self, process: int, message: Tensor) -> None:
        """The same, to a stage."""
        super().send(self._first + process, message)


class ReplicaStage(StageWorker):
    """A :class:`~plait.engine.worker.Worker` for one stage of one of several replicas.

    Args:
        layers: of every stage of every replica.
        process: number of this process among all.
    """

    def __init__(
        self,
        model: BaseModel,
        data: DataCatalogue,
        settings: EngineSettings,
        *,
        exchange: Exchange,
        layers: Sequence[Sequence[range]],
        process: int,
        recorder: SpanRecorder,
    ) -> None:
        ends = [*accumulate(map(len, layers))]
        replica = next(number for number, end in enumerate(ends) if process < end)
        first = ends[replica] - len(layers[replica])
        links = ReplicaLinks(process - first, first, model.device)
        super().__init__(model, data, settings, links=links, layers=layers[replica], recorder=recorder)
        self._exchange = exchange
        self._says_norms = replica == 0
        self._all_pieces, self._process = pieces(layers), process
        self._pieces: list[tuple[dist.ProcessGroup, tuple[Site, ...]]] = []
        self._stage_run = _ReplicaRun(self, links)
        self._left = Counter[Key]()  # segments of each global batch before their backward
        self._to_begin = deque[Key]()
        self._norms: dict[Key, Future[float]] = {}  # of sums that were begun, not stepped

    def _run_window(self, command: RunSchedule) -> list[WorkerEvent]:
        """Run a schedule to its end; before the first one, all processes make their groups."""
        if not self._pieces:
            groups = self._exchange.groups([each.holders for each in self._all_pieces])
            self._pieces = [
                (groups[each.holders], self._model.sites_of(each.layers))
                for each in self._all_pieces
                if self._process in each.holders
            ]
        parts = (part for each in command.microbatches for part in each.segments)
        self._left = Counter((part.job, part.step) for part in parts)
        self._to_begin = deque((each.job, each.step) for each in command.steps)
        self._begin_sums()
        self._lowering = Lowering(
            len(self._layers)
        )  # a batch may have nothing here: steps are not counted on
        return super()._run_window(replace(command, drained=True))

    def forward(self, number: int, microbatch: Microbatch, entering: Tensor | None) -> Tensor | None:
        """Step those of the microbatch's jobs that are due, and run this stage's layers."""
        first = {part.job: part.step for part in microbatch.segments}
        if late := [key for key in self._to_begin if key[1] < first.get(key[0], 0)]:
            raise ScheduleError(
                f"{late[0][0]}: step {late[0][1]} is due before its gradients can be added up",
                "Replicas take global batches in the order of their steps.",
            )
        self._step_those([key for key in self._norms if key[1] < first.get(key[0], 0)])
        return super().forward(number, microbatch, entering)

    def backward(self, number: int, microbatch: Microbatch, gradient: Tensor | None) -> Tensor | None:
        """Run backward, and begin the sums of batches whose last gradients are there now."""
        leaving = super().backward(number, microbatch, gradient)
        self._left.subtract((part.job, part.step) for part in microbatch.segments)
        self._begin_sums()
        return leaving

    def end(self) -> None:
        """Step what has not stepped yet."""
        self._step_those(list(self._norms))

    def _begin_sums(self) -> None:
        """In the order of the steps, which all processes have."""
        while self._to_begin and not self._left[self._to_begin[0]]:
            key = self._to_begin.popleft()
            self._norms[key] = self._sum(key)

    def _step_those(self, keys: Sequence[Key]) -> None:
        if keys:
            norms = [self._exchange.result(self._norms.pop(key)) for key in keys]
            self._recorder.lap("exchange", tuple(keys))
            self.step(keys, norms)

    def _sum(self, key: Key) -> Future[float]:
        """Begin to add up a job's gradients over the replicas; the norm of the sum, not a number where the
        job failed here."""
        block, failed = self.bank.block(key[0]), key[0] in self._failed
        sums = [(group, self._gradients(block, sites)) for group, sites in self._pieces]

        def squares() -> Tensor:
            """By site, after a place for what is not finite; of each site, one process says it."""
            found = torch.zeros(1 + len(self._model.linears), dtype=torch.float64)
            for site in self.bank.sites if self._says_norms else ():
                own = (each.double().square().sum() for each in self._gradients(block, [site]))
                found[1 + site.module] = sum(map(float, own))
            found[0] = math.nan if failed else 0.0
            return found.to(self._model.device)

        return self._exchange.add_pieces(sums, squares, (key,))

    def _gradients(self, block: Block, sites: Sequence[Site]) -> list[Tensor]:
        own = (site for site in sites if site.name in block.layout.specs)
        return list(chain.from_iterable(block.at(site, GRADIENTS) for site in own))


class _ReplicaRun(StageRun):
    """Carries out lists without the steps and what travels for them, which the worker sees to."""

    def __init__(self, worker: ReplicaStage, links: Links) -> None:
        super().__init__(worker, links, links.process)
        self._worker = worker

    def run(self, lists: Lists, microbatches: Mapping[int, Microbatch]) -> None:
        """Carry out this stage's list of a window, and take all steps that are left."""
        bare = [
            [each._replace(keys=()) for each in own if each.kind != "step" and each.microbatch != NONE]
            for own in lists
        ]
        super().run(bare, microbatches)
        self._worker.end()
