"""The worker of one stage where there are several replicas, which may be cut at different layers.

A seam: a stage alone (:mod:`plait.distributed.stage_worker`) knows no other replica. Here gradients of the
same layers are added up over the replicas, and only then the norm by which a job steps is known. So norms do
not travel with hidden states (:mod:`plait.distributed.replica_run`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.messages import RunSchedule, WorkerEvent
from plait.core.settings import EngineSettings
from plait.distributed.exchange import Exchange
from plait.distributed.links import Links
from plait.distributed.replica_run import ReplicaRun
from plait.distributed.stage_worker import StageWorker
from plait.engine.catalogue import DataCatalogue
from plait.engine.span_recorder import SpanRecorder
from plait.models.base import BaseModel
from plait.planner.instructions import Key
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
        links = Links(process - first, model.device, range(first, ends[replica]))
        super().__init__(model, data, settings, links=links, layers=layers[replica], recorder=recorder)
        self._exchange = exchange
        self._says_norms = replica == 0
        self._all_pieces, self._process = pieces(layers), process
        self._pieces: list[tuple[dist.ProcessGroup, tuple[Site, ...]]] = []
        self._stage_run = self._replica_run = ReplicaRun(self, links, links.process)

    def _run_window(self, command: RunSchedule) -> list[WorkerEvent]:
        """Run a schedule to its end; before the first one, all processes make their groups."""
        if not self._pieces:
            groups = self._exchange.groups([each.holders for each in self._all_pieces])
            self._pieces = [
                (groups[each.holders], self._model.sites_of(each.layers))
                for each in self._all_pieces
                if self._process in each.holders
            ]
        # A batch may have nothing here, so steps are not counted on from one schedule to the next.
        self._lowering = Lowering(len(self._layers))
        self._replica_run.keys = [(each.job, each.step) for each in command.steps]
        return super()._run_window(replace(command, drained=True))

    def begin(self, key: Key) -> Future[float]:
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

    def finish(self, begun: Sequence[Future[float]], keys: Sequence[Key]) -> list[float]:
        """Wait for the norms of sums.

        Raises:
            LostProcessError: another process died.
        """
        norms = [self._exchange.result(each) for each in begun]
        self._recorder.lap("exchange", tuple(keys))
        return norms
